"""Several processes with a card each, through NCCL. Collected only where there are two cards."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ranks
from snack import dst
from snack.nn import SparseLinear, topology_hash
from test_distributed import METHODS, build, loss_of
from test_resume import Training
from test_sharded import described, shard

pytestmark = pytest.mark.cuda

STEPS = 8


def batches(rank):
    generator = torch.Generator().manual_seed(50 + rank)
    return [torch.randn(6, 24, generator=generator).to("cuda") for _ in range(STEPS)]


def train(method, rank, wrap, seed=0, dtype=torch.float32):
    model = wrap(build(torch.float32, seed=seed).to("cuda"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    stepper = METHODS[method][0](model, optimizer, every=2, seed=3, **METHODS[method][1])
    for x in batches(rank):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            loss = loss_of(model(x).float())
        loss.backward()
        optimizer.step()
        stepper.step()
    return [topology_hash(m) for m in model.modules() if isinstance(m, SparseLinear)], stepper.history[-1].nnz, stepper.history[0].dropped, model


def replicate(model):
    return DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)


def _replicas(rank, world):
    found = {}
    for method in METHODS:
        for dtype in (torch.float32, torch.bfloat16):
            *facts, model = train(method, rank, replicate, seed=rank, dtype=dtype)  # with seeds of their own: the topology of rank 0 is taken
            found[method, dtype] = (facts, [p.detach().cpu() for p in model.parameters()])
    return found


def test_replicas_stay_equal_through_nccl():
    first, second = ranks.run(_replicas, 2, backend="nccl")
    for key in first:
        assert first[key][0] == second[key][0] and first[key][0][2] > 0, key
        assert all(torch.equal(a, b) for a, b in zip(first[key][1], second[key][1])), key


def _shards(rank, world):
    *facts, model = train("RigL", rank, shard)
    return facts, [t.cpu() for t in described(model)[1:]]


def test_shards_stay_equal_and_as_replicas():
    (first, numbers), (second, others) = ranks.run(_shards, 2, backend="nccl")
    replicas = ranks.run(_rigl, 2, backend="nccl")
    assert first == second == replicas[0] and torch.equal(numbers[0], others[0])


def _rigl(rank, world):
    return list(train("RigL", rank, replicate)[:3])


def _first_growth(rank, world):
    """Of a gradient that is exact in float32: small whole numbers, sums of which are exact whatever their order."""
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randint(-3, 4, (8, 24), generator=generator).float(), torch.randint(-3, 4, (8, 16), generator=generator).float()
    torch.manual_seed(0)
    layer = SparseLinear(24, 16, sparsity=0.7)
    own = slice(4 * rank, 4 * rank + 4) if world > 1 else slice(None)
    layer = layer.to("cuda")
    model = replicate(layer) if world > 1 else layer
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    stepper = dst.RigL(model, optimizer, every=1, t_end=100)
    (model(x[own].to("cuda")) * dy[own].to("cuda")).sum().mul(world / 2).backward()  # DistributedDataParallel averages
    optimizer.step()
    stepper.step()
    return topology_hash(layer)


def test_growth_is_that_of_one_process_with_the_whole_batch():
    assert len(set(ranks.run(_first_growth, 2, backend="nccl")) | set(ranks.run(_first_growth, 1, backend="nccl"))) == 1


def _resume(rank, world, path, start):
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(rank + (10 if start else 0))
    training = Training("SNFS", seed=3 if start else 0, wrap=lambda m: replicate(m.to("cuda")))
    torch.manual_seed(rank + (10 if start else 0))
    torch.cuda.manual_seed(rank)
    if start:
        training.load(path)
    else:
        run_on_card(training, 8)
        training.save(path)
    run_on_card(training, 12)
    torch.use_deterministic_algorithms(False)
    return {key: entry.cpu() if torch.is_tensor(entry) else entry for key, entry in training.model.state_dict().items()}


def run_on_card(training, until):
    """Dropout draws from the card's generator."""
    while training.at < until:
        training.at += 1
        training.optimizer.zero_grad()
        (training.wrapped(torch.randn(8, 20, device="cuda")) - 1).square().mean().backward()
        training.optimizer.step()
        training.stepper.step()


def test_exact_resume_on_cards(tmp_path):
    whole = ranks.run(_resume, 2, tmp_path / "a.safetensors", False, backend="nccl")
    resumed = ranks.run(_resume, 2, tmp_path / "a.safetensors", True, backend="nccl")
    for a, b in zip(whole, resumed):
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
