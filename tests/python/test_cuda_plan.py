"""The plan on a card: the kernel that explain() names is the one that runs, every kernel that can serve is right, predictions hold.

Collected only where there is a card.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

import problems
import snack
from problems import OPERATIONS, check, make_large
from snack import _costs
from snack.bench import fit, tune
from snack.bench.cuda_timing import CudaMeter
from snack.nn import SparseLinear
from snack.ops.products import regime_code

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
# What two names of the plan, of both directions, are in the profiler's words.
LAUNCHED = {"fixed": "fixed_sums", "coo": "product_coo"}
# Shapes, connections: dense tiles, few, none to fill narrow tiles; tall and wide; small.
SHAPES = [
    (2048, 2048, 2_000_000), (2048, 3000, 60_000), (4000, 4000, 20_000), (4000, 4000, 5_000), (300, 20_000, 600_000), (20_000, 300, 600_000),
    (100, 100, 2_000),
]  # fmt: skip
# Of no shape that `snack bench tune` measures; far from its edges.
HELD_OUT = [(3000, 5000, 0.93), (7000, 7000, 0.97), (12_000, 8000, 0.88), (6000, 12_000, 0.96)]


def kernels_of(run):
    """Names of the kernels of this library that a call launches."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages() if "snack::cuda::" in event.key}
    return {re.search(r"snack::cuda::(?:\(anonymous namespace\)::)?(\w+)", name)[1] for name in names}


def runs_of(layer, batch, regime="auto"):
    """{operation: a call}."""
    pattern, values = layer.pattern, layer.values.detach()
    x, dy = (torch.randn(batch, n, device=DEVICE, dtype=values.dtype) for n in pattern.shape[::-1])
    return {
        "spmm": lambda: snack.ops.spmm(pattern, values, x, regime=regime),
        "spmm_t": lambda: snack.ops.spmm_t(pattern, values, dy, regime=regime),
        "sddmm": lambda: snack.ops.sddmm(pattern, dy, x, regime=regime),
    }


def words_of(plan):
    return re.match(r"kernel (\w+): (\w+), .*predicted (?:([\d.]+) us|not measured), floor ([\d.]+) us, runner-up (.+)$", plan).groups()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_named_kernel_is_launched(shape, dtype):
    out, in_, nnz = shape
    layer = SparseLinear(in_, out, sparsity=1 - nnz / (out * in_), device=DEVICE, dtype=dtype)
    for batch in (1, 2, 4, 7, 16, 40, 130):
        for regime in ("auto", "coo"):
            plans = layer.explain(batch, regime)
            for operation, run in runs_of(layer, batch, regime).items():
                named = words_of(plans[operation])[0]
                expected = LAUNCHED.get(named.rsplit("_", 1)[1], named)
                others = {"finish_kernel", "transpose_lines", "fixed_exponents", "fixed_result"}
                assert kernels_of(run) - others == {expected}, (plans[operation], batch)


@pytest.mark.parametrize("dtype", problems.dtypes(DEVICE))
@pytest.mark.parametrize("shape", [(300, 1500, 60_000), (2000, 130, 60_000), (65, 4100, 3_000), (1030, 2050, 900)], ids=str)
def test_every_kernel_that_can_serve_is_right(shape, dtype):
    card = torch.ops.snack.cuda_capability(0)
    seen = set()
    for batch in (1, 2, 3, 5, 8, 9, 17, 70):
        p = make_large(shape[0], shape[1], batch, shape[2], dtype, DEVICE, seed=batch)
        for operation in OPERATIONS:
            for found in tune.candidates(operation, p.pattern.shape, p.pattern.nnz, batch, dtype, card):
                check(operation, p, regime_code(found["kernel"]))
                seen.add(found["kernel"])
    assert len(seen) >= 3


@pytest.mark.parametrize(
    ("kernel", "shape", "nnz", "batch", "dtype"),
    [
        ("spmm_t_batch", (130, 1030), 130 * 1030, 4300, torch.float32),  # a round ends within a tile
        ("spmm_t_batch", (130, 1030), 130 * 1030, 4300, torch.bfloat16),  # and sorted places need all of their 16 bits
        ("sddmm_batch", (2500, 1000), 2500 * 1000, 40, torch.float32),  # more slots in a block than sums in shared memory
        ("spmm_batch", (33, 65_537), 300_000, 40, torch.float32),  # more panels than a list holds
    ],
)  # fmt: skip
def test_the_ends_of_what_a_block_holds(kernel, shape, nnz, batch, dtype):
    p = make_large(*shape, batch, nnz, dtype, DEVICE, seed=1)
    check(kernel.rsplit("_", 1)[0], p, regime_code(kernel))


def test_what_a_plan_says_fits_together():
    layer = SparseLinear(10_000, 10_000, sparsity=0.95, device=DEVICE)
    plans = layer.explain(1)
    for operation in OPERATIONS:
        kernel, regime, predicted, floor, runner_up = words_of(plans[operation])
        assert kernel.startswith(operation) and regime == "stream" and 0 < float(floor) < float(predicted)
        assert "workspace" in plans[operation] and f"format {6 * layer.nnz} bytes" in plans[operation]
        other, *time = runner_up.split()
        assert other not in (kernel, "none") and float(time[0]) >= float(predicted)
        forced = layer.explain(1, other)[operation]
        assert words_of(forced)[0] == other and words_of(forced)[4] == "none"


def test_a_table_of_ones_own_comes_before_the_first_plan(tmp_path):
    card = torch.ops.snack.cuda_capability(0)
    found = tune.candidates("spmm", (4096, 4096), 800_000, 1, torch.float32, card, "spmm_stream")[0]
    facts = {"card": "this one", "kernels": torch.ops.snack.cuda_fingerprint(), "capability": card, "copy_tb_s": 1.0}
    path = tmp_path / "costs.txt"
    path.write_text(fit.table([{**found, "time_us": 5.0}], facts, "of a test"))
    with pytest.raises(RuntimeError, match="they must not change"):
        torch.ops.snack.cuda_use_costs(path.read_text())
    code = (
        "import torch, snack\n"
        "layer = snack.SparseLinear(4096, 4096, sparsity=0.95, device='cuda')\n"
        "plans = layer.explain(1)\n"
        "print(plans['costs']); print(plans['spmm'])\n"
        "with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:\n"
        "    layer(torch.ones(1, 4096, device='cuda')); torch.cuda.synchronize()\n"
        "print([event.key for event in profile.key_averages()])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"SNACK_COSTS": str(path)})
    assert done.returncode == 0, done.stderr
    costs, plan, launched = done.stdout.splitlines()
    assert str(path) in costs and words_of(plan)[0] == "spmm_stream" and "spmm_stream" in launched


@pytest.mark.alone
def test_predictions_hold_on_shapes_that_nobody_measured():
    """Within 25 %, of the kernel that is chosen."""
    meter, card = CudaMeter(DEVICE, samples=5), torch.ops.snack.cuda_capability(0)
    costs = _costs.text_of(card)
    wrong, tested = [], 0
    for out, in_, sparsity in HELD_OUT:
        for dtype in (torch.float32, torch.bfloat16):
            layer = SparseLinear(in_, out, sparsity=sparsity, device=DEVICE, dtype=dtype)
            for batch in (1, 2, 4, 8, 24, 96):
                for operation, run in runs_of(layer, batch).items():
                    best = tune.candidates(operation, (out, in_), layer.nnz, batch, dtype, card, costs=costs)[0]
                    us = meter.compare({"run": meter.player([run], "graph")})["run"]["time_us"]
                    tested += 1
                    if abs(best["predicted_us"] / us - 1) > 0.25:
                        wrong.append(f"{operation} {out}x{in_} {sparsity} b{batch} {dtype}: {best['kernel']} {best['predicted_us']:.1f}, is {us:.1f}")
    assert not wrong, f"{len(wrong)} of {tested} beyond 25 %:\n" + "\n".join(wrong)
