"""Train a sparse network with RigL on several processes, and go on where a run was stopped. Data are made up, so nothing is downloaded.

Run it:    torchrun --nproc-per-node 2 examples/train_ddp.py
Stop it at any time (Ctrl-C, kill -9), and run it again: it resumes from the file, on as many processes as you like.
"""

import argparse
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import snack

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--file", type=Path, default=Path("train_ddp.safetensors"))
arguments = parser.parse_args()

has_cards = torch.cuda.is_available()
dist.init_process_group("nccl" if has_cards else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if has_cards else torch.device("cpu")
if has_cards:
    torch.cuda.set_device(device)

# A teacher makes the labels: the largest of ten products with the input.
teacher = torch.randn(10, 64, generator=torch.Generator().manual_seed(0)).to(device)


def batch(step: int, size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of batch number `step`: every process draws the whole batch and keeps a part, so no number depends on their count."""
    x = torch.randn(size, 64, generator=torch.Generator().manual_seed(step)).chunk(world)[rank].to(device)
    return x, (x @ teacher.T).argmax(dim=1)


model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
snack.sparsify(model, sparsity=0.9)
ddp = DistributedDataParallel(model)  # all ranks take the topology and the values of rank 0
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
dst = snack.RigL(ddp, optimizer, drop_fraction=0.3, every=50, t_end=int(0.75 * arguments.steps))

begin = 0
if arguments.file.exists():
    begin = snack.load_training(arguments.file, ddp, optimizer, dst)["step"]  # every rank reads it

for step in range(begin + 1, arguments.steps + 1):
    x, y = batch(step)
    optimizer.zero_grad()
    loss = F.cross_entropy(ddp(x), y)
    loss.backward()
    optimizer.step()
    dst.step()
    if step % 100 == 0:
        snack.save_training(arguments.file, ddp, optimizer, dst, more={"step": step})  # every rank calls it, rank 0 writes
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, {dst.updates} updates")

snack.nn.check_topology(model)  # the same connections on every rank
x, y = batch(10**6, size=4096)
right = (model(x).argmax(dim=1) == y).float().mean()
dist.all_reduce(right)
if rank == 0:
    nnz = sum(layer.nnz for layer in model if isinstance(layer, snack.SparseLinear))
    print(f"{world} processes, {nnz:,} connections, accuracy {100 * right.item() / world:.1f} %")
dist.destroy_process_group()
