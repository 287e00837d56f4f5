"""Small problems that run every CUDA kernel once or twice, for compute-sanitizer: each result is compared with the CPU's.

Operands are made on the CPU and copied, so that hardly a kernel but ours runs; run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that
every tensor is an allocation of its own, whose ends are watched. Prints the number of cases, exits with 1 on a wrong result.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import torch

import snack
from snack import ops
from snack.bench import tune
from snack.bench.case import PRODUCTS

# Narrow (2-byte words), tall (4-byte words), and shapes that end in the middle of every tile and vector.
SHAPES = [((130, 2100), 9001), ((3001, 4003), 301), ((65, 33), 700), ((1, 5000), 257), ((70, 1), 70)]
BATCHES = (1, 3, 9, 37)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def differs(ours: torch.Tensor, cpu: torch.Tensor, dtype: torch.dtype) -> bool:
    if ours.numel() == 0:
        return ours.shape != cpu.shape
    error = (ours.cpu().double() - cpu.double()).abs().max()
    return not bool(error <= TOLERANCE[dtype] * (1 + cpu.double().abs().max()))


def products(device: torch.device) -> Iterator[tuple[str, bool]]:
    """(name, is wrong) of spmm, spmm_t and sddmm over shapes, dtypes, batches and every kernel that can serve."""
    generator = torch.Generator().manual_seed(5)
    for (out, in_), nnz in SHAPES:
        pattern = snack.Pattern.random((out, in_), min(nnz, out * in_), 7)
        on_card = pattern.to(device)
        for dtype in DTYPES:
            values, bias = (torch.randn(n, generator=generator).to(dtype) for n in (pattern.nnz, out))
            for batch in BATCHES:
                x, dy = (torch.randn(batch, n, generator=generator).to(dtype) for n in (in_, out))
                v, b, cx, cdy = (t.to(device) for t in (values, bias, x, dy))
                if batch in (3, 37):  # every other element
                    cx, cdy = (torch.stack([t, t], 2)[:, :, 0] for t in (cx, cdy))
                runs = (partial(ops.spmm, on_card, v, cx, b), partial(ops.spmm_t, on_card, v, cdy), partial(ops.sddmm, on_card, cdy, cx))
                truth = [ops.spmm(pattern, values, x, bias), ops.spmm_t(pattern, values, dy), ops.sddmm(pattern, dy, x)]
                card = torch.ops.snack.cuda_capability(device.index or 0)
                for name, run, cpu in zip(PRODUCTS, runs, truth, strict=True):
                    able = [found["kernel"] for found in tune.candidates(name, (out, in_), pattern.nnz, batch, dtype, card)]
                    for regime in (*able, "coo"):
                        yield f"{name} {out}x{in_} {dtype} batch {batch} {regime}", differs(run(regime=regime), cpu, dtype)


def many_slots(device: torch.device) -> Iterator[tuple[str, bool]]:
    """sddmm_chunks where a thread takes chunk after chunk: more slots than a block's threads have under way."""
    pattern = snack.Pattern.random((2048, 2048), 3_000_000, 7)
    generator = torch.Generator().manual_seed(5)
    for dtype, batch in ((torch.float32, 2), (torch.bfloat16, 8)):
        x, dy = (torch.randn(batch, 2048, generator=generator).to(dtype) for _ in range(2))
        ours = ops.sddmm(pattern.to(device), dy.to(device), x.to(device), regime="sddmm_chunks")
        yield f"sddmm_chunks of many slots, {dtype}", differs(ours, ops.sddmm(pattern, dy, x), dtype)


def edits(device: torch.device) -> Iterator[tuple[str, bool]]:
    """The same for rewire: at constant nnz, growing, shrinking, and refused."""
    for (out, in_), nnz in SHAPES[:3]:
        pattern = snack.Pattern.random((out, in_), nnz, 7)
        on_card = pattern.to(device)
        rows, cols = ops.grow_uniform(pattern, 100, 11)
        for drops, grows in ((100, 100), (0, 50), (50, 0)):
            drop = torch.arange(drops, dtype=torch.int64) * (nnz // 100)
            cpu, cpu_source = ops.rewire(pattern, drop, rows[:grows], cols[:grows])
            ours, source = ops.rewire(on_card, drop.to(device), rows[:grows].to(device), cols[:grows].to(device))
            yield f"rewire {out}x{in_} -{drops} +{grows}", not (cpu.equals(ours.to("cpu")) and torch.equal(source.cpu(), cpu_source))
        row, col = pattern.rows[:1].long(), pattern.cols[:1].long()
        try:
            ops.rewire(on_card, None, row.to(device), col.to(device))
            yield f"rewire {out}x{in_} onto a connection", True
        except snack.SnackError:
            yield f"rewire {out}x{in_} onto a connection", False


def exchanges(device: torch.device) -> Iterator[tuple[str, bool]]:
    """exchange_ and what it is made of: few values and many, as bits and as lists, by every rule; the card gives the CPU's result bit by bit."""
    generator = torch.Generator().manual_seed(5)
    for (out, in_), nnz in (SHAPES[0], SHAPES[1], ((300, 1100), 40_000), ((1024, 9000), 20_000)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            pattern = snack.Pattern.random((out, in_), nnz, 7)
            values = torch.randn(pattern.nnz, generator=generator).to(dtype)
            carried = [values, torch.randn(pattern.nnz, generator=generator), torch.arange(pattern.nnz) % 100 < 50]
            dy, x = (torch.randn(3, n, generator=generator).to(dtype) for n in (out, in_))
            on_card, fills = pattern.to(device), torch.tensor([0.5, 0.0, 1.0])
            where, k = f"{out}x{in_} {dtype}", nnz // 3
            for drop, fraction, grow in (("signed", 0.25, "uniform"), ("magnitude", 0.0, "gradient")):
                by = {"dy": dy, "x": x} if grow == "gradient" else {"key": 3}
                by_card = {name: v.to(device) if torch.is_tensor(v) else v for name, v in by.items()}
                card, cpu = (pattern.to(device), [t.to(device) for t in carried]), (pattern.clone(), [t.clone() for t in carried])
                moved = ops.exchange_(*card, fills.to(device), drop, fraction, k, grow, **by_card).cpu()
                same = torch.equal(moved, ops.exchange_(*cpu, fills, drop, fraction, k, grow, **by))
                same = same and cpu[0].equals(card[0].to("cpu")) and all(torch.equal(a.cpu(), b) for a, b in zip(card[1], cpu[1], strict=True))
                yield f"exchange_ {where} {drop} {grow}", not same
            smallest = ops.select_smallest(values, k)
            yield f"select_smallest {where}", not torch.equal(ops.select_smallest(values.to(device), k).cpu(), smallest)
            ours = ops.grow_gradient(on_card, x.to(device), dy.to(device), k, smallest.to(device))
            cpu = ops.grow_gradient(pattern, x, dy, k, smallest)
            yield f"grow_gradient {where}", not all(torch.equal(a.cpu(), b) for a, b in zip(ours, cpu, strict=True))
            ours, cpu = ops.grow_uniform(on_card, k, 11, smallest.to(device)), ops.grow_uniform(pattern, k, 11, smallest)
            yield f"grow_uniform {where}", not all(torch.equal(a.cpu(), b) for a, b in zip(ours, cpu, strict=True))


def main() -> int:
    device = torch.device("cuda", 0)
    cases = [*products(device), *many_slots(device), *edits(device), *exchanges(device)]
    torch.cuda.synchronize()
    wrong = [name for name, is_wrong in cases if is_wrong]
    print("\n".join(f"wrong: {name}" for name in wrong))
    print(f"{len(cases)} cases, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
