"""How much faster N processes train than one: dense and RigL, each under DistributedDataParallel, with the bytes that they exchange.

Every process has the same batch (weak scaling): efficiency = time of a step on one process / time of a step on N. First rank 0 trains alone,
then all together. An update follows every --every steps; its time is part of the mean. Writes one record a model and contender:

    {"routine": "ddp", "model", "contender", "world", "batch", "params", "step_time_us", "update_time_us", "mean_time_us",
     "alone": {the same times on one process}, "efficiency", "gradient_bytes" (averaged in a step), "update_bytes" (each rank gives in an update)}

Usage: torchrun --nproc-per-node 2 tools/ddp_scaling.py [--out benchmarks/results/h200x2/ddp.json] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import snack
from snack.bench import records
from snack.dst import processes

SPARSITY = 0.9
CONTENDERS = ("dense", "RigL")


class Block(nn.Module):
    """A transformer layer (before-norm, causal) of plain linear layers."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norms[0](x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def models(tiny: bool) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    """{name: (how to build it, shape of a batch of one process)}."""
    hidden, width, heads, samples, sequences, length = (64, 32, 2, 16, 2, 8) if tiny else (8192, 1024, 16, 512, 8, 128)

    def mlp():
        sizes = [3072 if not tiny else 48, hidden, hidden, hidden, 10]
        layers = [part for pair in zip(sizes, sizes[1:]) for part in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*layers[:-1])

    return {
        f"mlp-3x{hidden}": (mlp, (samples, 3072 if not tiny else 48)),
        f"transformer-8x{width}": (lambda: nn.Sequential(*(Block(width, heads) for _ in range(8))), (sequences, length, width)),
    }


@contextmanager
def counted_gathers():
    """A list of the bytes that this process gives in every gather of an update."""
    sent: list[int] = []
    original = processes._gather

    def count(everyone, own, group):
        sent.append(own.nbytes)
        original(everyone, own, group)

    processes._gather = count
    try:
        yield sent
    finally:
        processes._gather = original


def measure(build, shape, contender: str, together: bool, device: torch.device, options) -> dict[str, object]:
    """Median time of steps without and with an update, and their mean over a cycle."""
    torch.manual_seed(0)
    model = build().to(device)
    if contender == "RigL":
        snack.sparsify(model, sparsity=SPARSITY)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if together else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    stepper = snack.RigL(wrapped, optimizer, every=options.every, t_end=10**9) if contender == "RigL" else None
    x = torch.randn(shape, device=device)
    times: dict[bool, list[float]] = {False: [], True: []}
    updates = 0
    with counted_gathers() as sent:
        for step in range(options.warm_up + options.cycles * options.every):
            wait(device, together)
            begin = time.perf_counter()
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            is_update = stepper is not None and stepper.step() is not None
            wait(device)
            updates += is_update
            if step >= options.warm_up:
                times[is_update].append(1e6 * (time.perf_counter() - begin))
    ordinary = statistics.median(times[False])
    update = statistics.median(times[True]) if times[True] else None
    mean = ordinary if update is None else ((options.period - 1) * ordinary + update) / options.period
    facts = {"step_time_us": ordinary, "mean_time_us": mean, "params": sum(p.numel() for p in model.parameters())}
    facts |= {} if update is None else {"update_time_us": update}
    if together:
        facts["gradient_bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
        facts["update_bytes"] = sum(sent) // max(1, updates)
    return facts


def wait(device: torch.device, together: bool = False) -> None:
    """Until the card is done, and everybody else here."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if together:
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE/ddp.json")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--every", type=int, default=8, help="steps between updates while measuring")
    parser.add_argument("--cycles", type=int, default=5, help="updates that are measured")
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--period", type=int, default=100, help="steps between updates that the mean is computed for")
    options = parser.parse_args()

    has_cards = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_cards else torch.device("cpu")
    if has_cards:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if has_cards else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = []
    for name, (build, shape) in models(options.tiny).items():
        for contender in CONTENDERS:
            alone = measure(build, shape, contender, False, device, options) if rank == 0 else None
            dist.barrier()
            facts = measure(build, shape, contender, True, device, options)
            if rank == 0:
                alone.pop("params")
                efficiency = alone["mean_time_us"] / facts["mean_time_us"]
                record = {"routine": "ddp", "model": name, "contender": contender, "world": world, "batch": list(shape), "dtype": "float32"}
                record |= {"sparsity": SPARSITY if contender == "RigL" else 0.0, "period": options.period, **facts}
                found.append(record | {"alone": alone, "efficiency": efficiency})
                print(f"{name} {contender}: {facts['mean_time_us'] / 1e3:.2f} ms on {world}, {alone['mean_time_us'] / 1e3:.2f} ms alone, "
                      f"efficiency {100 * efficiency:.1f} %, {facts['gradient_bytes'] / 2**20:,.1f} MiB a step, "
                      f"{facts['update_bytes'] / 2**20:,.2f} MiB an update", flush=True)
            if has_cards:
                torch.cuda.empty_cache()
    if rank == 0:
        about = records.provenance(device) | {"command": "torchrun tools/ddp_scaling.py" + (" --tiny" if options.tiny else "")}
        out = options.out or Path("benchmarks/results") / str(about["device"]) / "ddp.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"schema": records.SCHEMA, "suite": "ddp", "provenance": about, "records": found}, indent=1) + "\n")
        print(f"record: {out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
