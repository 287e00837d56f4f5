"""Several processes: identical topologies on all ranks, and those of one process with the whole batch; what differs is told, nothing is edited."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ranks
import snack
from checks import snapshot
from snack import dst
from snack.bench import records
from snack.nn import SparseLinear, topology_hash

METHODS = {
    "SET": (dst.SET, {}),
    "RigL": (dst.RigL, {"t_end": 100}),
    "SRigL": (dst.SRigL, {"t_end": 100}),
    "MEST": (dst.MEST, {"t_end": 100}),
    "SNFS": (dst.SNFS, {"t_end": 100, "grow": dst.MomentumGrowth(window=3)}),
    "GMP": (dst.GMP, {"sparsity": 0.9, "t_end": 8}),
    "DST global": (dst.DST, {"drop": "magnitude", "grow": "gradient", "scope": "global"}),
}
STEPS, EVERY, BATCH = 8, 2, 8  # BATCH is that of all ranks together


def build(dtype=torch.float64, seed=0, sparsity=0.7):
    torch.manual_seed(seed)
    return nn.Sequential(
        SparseLinear(24, 16, sparsity=sparsity, dtype=dtype), nn.Tanh(), SparseLinear(16, 12, sparsity=sparsity, dtype=dtype), nn.Tanh(),
        nn.Linear(12, 3, dtype=dtype),
    )


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(BATCH, 24, generator=generator, dtype=torch.float64).to(dtype) for _ in range(STEPS)]


def loss_of(y):
    return (y - 0.3).square().mean()


def train(model, method, rank=0, world=1, wrap=lambda m: m, dtype=torch.float64, pieces=1, on="wrapped"):
    """STEPS iterations on this rank's part of every batch, in `pieces` micro-batches. Returns (model, stepper)."""
    kind, options = METHODS[method]
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    stepper = kind(wrapped if on == "wrapped" else model, optimizer, every=EVERY, seed=3, **options)
    for x in data(dtype):
        optimizer.zero_grad()
        parts = x.chunk(world)[rank].chunk(pieces)
        for number, part in enumerate(parts):
            with wrapped.no_sync() if number + 1 < len(parts) and hasattr(wrapped, "no_sync") else torch.enable_grad():
                (loss_of(wrapped(part)) / len(parts)).backward()
        optimizer.step()
        stepper.step()
    return model, stepper


def described(model):
    """Topologies, and all numbers."""
    layers = [m for m in model.modules() if isinstance(m, SparseLinear)]
    return [topology_hash(m) for m in layers], torch.cat([p.detach().flatten().double() for p in model.parameters()])


def single(method, dtype=torch.float64):
    return described(train(build(dtype), method, dtype=dtype)[0])


# ---- the same as one process ----


def _all_methods(rank, world):
    found = {}
    for number, method in enumerate(METHODS):
        wrap = lambda m: DistributedDataParallel(m, gradient_as_bucket_view=number % 2 == 0)  # noqa: B023, E731
        model, stepper = train(build(), method, rank, world, wrap, on="wrapped" if number % 2 else "model")
        found[method] = (*described(model), [(u.layers, u.grown_layers, u.nnz) for u in stepper.history])
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process_with_the_whole_batch(world):
    found = ranks.run(_all_methods, world)
    for method in METHODS:
        hashes, numbers = single(method)
        for rank in range(world):
            its_hashes, its_numbers, history = found[rank][method]
            assert its_hashes == hashes, (method, rank)
            assert torch.allclose(its_numbers, numbers, rtol=1e-10, atol=1e-12), method
            assert torch.equal(its_numbers, found[0][method][1]), method
            assert history == found[0][method][2] and len(history) == STEPS // EVERY


def _accumulated_and_other_dtypes(rank, world):
    found = {"no_sync": described(train(build(), "RigL", rank, world, DistributedDataParallel, pieces=2)[0])}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for method in ("RigL", "SET"):
            found[method, dtype] = described(train(build(dtype), method, rank, world, DistributedDataParallel, dtype)[0])
    return found


def test_accumulation_with_no_sync_and_every_dtype():
    first, second = ranks.run(_accumulated_and_other_dtypes)
    hashes, numbers = single("RigL")
    assert first["no_sync"][0] == hashes and torch.allclose(first["no_sync"][1], numbers, rtol=1e-10, atol=1e-12)
    for key in first:
        assert first[key][0] == second[key][0] and torch.equal(first[key][1], second[key][1]), key


def _accumulated_without_no_sync(rank, world):
    """Two synchronised backward passes a step: the bucket's view takes the place of the gradient in between."""
    model = build()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    stepper = dst.RigL(wrapped, optimizer, every=1, t_end=100)
    x = data()[0].chunk(world)[rank]
    for part in x.chunk(2):
        (loss_of(wrapped(part)) / 2).backward()
    optimizer.step()
    stepper.step()
    return described(model)[0]


def test_accumulation_without_no_sync():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    stepper = dst.RigL(model, optimizer, every=1, t_end=100)
    loss_of(model(data()[0])).backward()
    optimizer.step()
    stepper.step()
    assert ranks.run(_accumulated_without_no_sync) == [described(model)[0]] * 2


def _uneven(rank, world):
    """Rank 1 has more samples, and a layer that rank 0 does not use. Losses are weighted so that their mean is that of the whole batch."""
    model = build()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    stepper = dst.RigL(wrapped, optimizer, every=1, t_end=100)
    x = data()[0]
    part = x[:3] if rank == 0 else x[3:]
    y = wrapped(part)
    ((y - 0.3).square().sum() * world / (BATCH * 3)).backward()
    optimizer.step()
    record = stepper.step()
    return described(model)[0], record.layers


def test_ranks_with_different_batch_sizes():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    stepper = dst.RigL(model, optimizer, every=1, t_end=100)
    loss_of(model(data()[0])).backward()
    optimizer.step()
    stepper.step()
    (a, moved), (b, _) = ranks.run(_uneven)
    assert a == b == described(model)[0] and sum(moved.values()) > 0


# ---- what is sent ----


def _traffic(rank, world):
    """Collective calls by kind, with the bytes of tensors, in one ordinary forward pass and in one update of each method."""
    sent = []
    gather = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    originals = {name: getattr(dist, name) for name in ("broadcast", gather, "all_gather_object")}

    def counting(name):
        def call(*args, **kwargs):
            sent.append(("all_gather", args[1].nbytes) if name == gather else (name, 0))
            return originals[name](*args, **kwargs)

        return call

    model = build(torch.float32)
    wrapped = DistributedDataParallel(model)
    for name in originals:
        setattr(dist, name, counting(name))
    buffers = sorted(wrapped.named_module_buffers)
    found = {}
    for method in ("SET", "RigL"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stepper = METHODS[method][0](wrapped, optimizer, every=2, **METHODS[method][1])
        for step in range(2):
            sent.clear()
            optimizer.zero_grad()
            loss_of(wrapped(torch.randn(5, 24))).backward()
            optimizer.step()
            stepper.step()
            found[method, step] = list(sent)
    for name, call in originals.items():
        setattr(dist, name, call)
    return buffers, found


def test_the_index_is_never_sent_again_and_traffic_is_bounded():
    for buffers, found in ranks.run(_traffic):
        assert buffers == []  # DistributedDataParallel has nothing to broadcast before a forward pass
        assert found["SET", 0] == found["RigL", 0] == []
        assert found["SET", 1] == [("all_gather_object", 0)] * 2
        assert [entry for entry in found["RigL", 1] if entry[0] != "all_gather_object"] == [
            ("all_gather", 5 * (24 + 16) * 4), ("all_gather", 5 * (16 + 12) * 4)
        ]


# ---- ranks that disagree ----


def _error(call):
    try:
        call()
    except snack.SnackError as error:
        return str(error)
    return None


def _different_seeds(rank, world):
    """neuralmagic/sparseml#429: ranks with different seeds made different masks."""
    model = build(seed=rank)
    own = topology_hash(model[0])
    wrapped = DistributedDataParallel(model)
    return own, described(train(model, "RigL", rank, world, lambda _: wrapped)[0])


def test_sparseml_429_ranks_with_different_seeds():
    (own, first), (other, second) = ranks.run(_different_seeds)
    assert own != other
    assert first[0] == second[0] == single("RigL")[0] and torch.equal(first[1], second[1])


def _disagreements(rank, world):
    found = []
    # Another number of connections: told where the model is wrapped.
    found.append(_error(lambda: DistributedDataParallel(build(sparsity=0.7 if rank == 0 else 0.8))))

    def attempt(model, break_something, **options):
        """One update with averaged gradients; (error, whether anything changed)."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        stepper = dst.DST(model, optimizer, **({"drop": "magnitude", "grow": "uniform", "every": 1, "group": dist.group.WORLD} | options))
        loss_of(model(data()[0])).backward()
        optimizer.step()
        break_something(model)
        before = snapshot(model, optimizer)
        error = _error(stepper.step)
        after = snapshot(model, optimizer)
        return error, all(torch.equal(before[k], after[k]) if torch.is_tensor(before[k]) else before[k] == after[k] for k in before)

    def rewire_on_rank_1(model):
        if rank == 1:
            model[2].rewire(torch.arange(3), snack.ops.grow_uniform(model[2].pattern, 3, 7))

    def other_values(model):
        if rank == 1:
            with torch.no_grad():
                model[2].values.mul_(torch.linspace(0.1, 3, model[2].nnz))

    def grow(layer, k, drop, context):
        if rank == 1 and context.number == 1:
            raise ValueError("no idea where")
        return snack.ops.grow_uniform(layer.pattern, k, context.key, drop)

    found.append(attempt(build(), rewire_on_rank_1))
    found.append(attempt(build(), other_values))
    found.append(attempt(build(), lambda m: None, seed=rank))
    if rank == 1:
        with pytest.raises(ValueError, match="no idea"):
            attempt(build(), lambda m: None, grow=grow)
        found.append(None)
    else:
        found.append(attempt(build(), lambda m: None, grow=grow))
    found.append(_error(lambda: snack.nn.check_topology(build())))
    found.append(_error(lambda: snack.nn.check_topology(build(seed=rank))))
    found.append(attempt(build(), lambda m: None, seed=rank, group=None)[0])  # two trainings that have nothing to do with each other
    return found


def test_ranks_that_disagree_are_told_on_every_rank_and_nothing_is_edited():
    results = ranks.run(_disagreements)
    for rank, (sizes, topology, values, seeds, failed, same, different, independent) in enumerate(results):
        assert "layer '0'" in sizes and "rank 1" in sizes
        for (error, unchanged), layer in ((topology, 2), (values, 2), (seeds, 0)):
            assert f"layer '{layer}'" in error and "rank 1" in error and "\n" not in error and unchanged
        if rank == 0:
            assert "rank 1 failed: ValueError: no idea where" in failed[0] and failed[1]
        assert same is None and independent is None
        assert "layer '0'" in different


# ---- sizes that change under DistributedDataParallel; options ----


def _resizes(rank, world):
    """By hand, by loading, and with a communication hook, which stays."""
    model = build()
    wrapped = DistributedDataParallel(model)
    calls = []

    def hook(state, bucket):
        calls.append(bucket.buffer().numel())
        return dist.all_reduce(bucket.buffer().div_(world), async_op=True).get_future().then(lambda f: f.value()[0])

    wrapped.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    small = build(sparsity=0.9)
    sizes = []
    last = None
    for step, x in enumerate(data()):
        if step == 2:
            model[0].rewire(torch.arange(10), optimizer=optimizer)
            model[2].rewire(torch.arange(4), optimizer=optimizer)
        if step == 4:
            model.load_state_dict(small.state_dict())
            optimizer.state.clear()
        optimizer.zero_grad()
        last = loss_of(wrapped(x.chunk(world)[rank]))  # the loss before stays alive
        last.backward()
        optimizer.step()
        sizes.append(sum(p.numel() for p in model.parameters()))
    return sizes, calls, described(model), copy.deepcopy(model)[0].nnz


def test_buckets_follow_the_number_of_connections():
    (sizes, calls, first, nnz), (_, _, second, _) = ranks.run(_resizes)
    assert len(set(sizes)) == 3 and sum(calls) == sum(sizes) and first[0] == second[0] and torch.equal(first[1], second[1])
    assert nnz == build(sparsity=0.9)[0].nnz


def test_group_must_be_a_process_group():
    model = build()
    with pytest.raises(snack.SnackError, match="must be a torch.distributed.ProcessGroup"):
        dst.SET(model, torch.optim.SGD(model.parameters(), lr=0.1), group="all")
    with pytest.raises(snack.SnackError, match="no process group"):
        snack.nn.check_topology(model)


def test_pytorch_79542_data_parallel_of_a_sparse_layer():
    """DataParallel and DistributedDataParallel failed with a sparse parameter (the latter: all tests above)."""
    model = build()
    x = data()[0]
    assert torch.equal(nn.DataParallel(model)(x), model(x))


def test_hash_tells_topologies_apart():
    layer = SparseLinear(300, 200, sparsity=0.9)
    seen = {topology_hash(layer)}
    assert topology_hash(copy.deepcopy(layer)) in seen
    for number in range(50):
        layer.rewire(torch.tensor([number]), snack.ops.grow_uniform(layer.pattern, 1, number))
        seen.add(topology_hash(layer))
    assert len(seen) == 51
    with torch.no_grad():
        layer.values.add_(1)
    assert topology_hash(layer) in seen


# ---- scripts ----

ROOT = Path(__file__).resolve().parents[2]


def torchrun(world, script, *arguments, folder):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [*launcher, str(ROOT / script), *map(str, arguments)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_resumes_on_another_number_of_processes(tmp_path):
    stopped = torchrun(2, "examples/train_ddp.py", "--steps", 200, folder=tmp_path)
    resumed = torchrun(1, "examples/train_ddp.py", "--steps", 300, folder=tmp_path)
    assert "step 100" in stopped and "step 200" in stopped and "step 100" not in resumed and "step 300" in resumed
    assert "2 processes, 30,003 connections" in stopped and "1 processes, 30,003 connections" in resumed
    assert float(resumed.split("accuracy ")[1].split()[0]) > 60.0


@pytest.mark.slow
def test_scaling_is_measured(tmp_path):
    torchrun(2, "tools/ddp_scaling.py", "--tiny", "--cycles", 1, "--warm-up", 1, "--every", 3, "--out", "ddp.json", folder=tmp_path)
    document = records.read(tmp_path / "ddp.json")
    assert document["suite"] == "ddp" and [(r["model"], r["contender"]) for r in document["records"]] == [
        ("mlp-3x64", "dense"), ("mlp-3x64", "RigL"), ("transformer-8x32", "dense"), ("transformer-8x32", "RigL")
    ]
    for record in document["records"]:
        assert record["world"] == 2 and record["efficiency"] == pytest.approx(record["alone"]["mean_time_us"] / record["mean_time_us"])
        assert record["gradient_bytes"] == 4 * record["params"]
    # x and dY of 16 samples: of the layers 48 -> 64 -> 64 -> 64 -> 10, in float32.
    assert document["records"][1]["update_bytes"] == 16 * 4 * (48 + 64 + 64 + 64 + 64 + 64 + 64 + 10)
