"""fully_shard (FSDP2) and torch.distributed.checkpoint: values in parts, topologies as on one process; what cannot be done is told."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ranks
import snack
from checks import fails
from snack import dst
from snack.nn import SparseLinear, topology_hash
from snack.nn.sharded import whole
from test_distributed import METHODS, build, data, loss_of, single, train


def shard(model, **options):
    """Every sparse layer a unit of its own, and the rest. On the model's kind of device, whatever else the machine has."""
    options.setdefault("mesh", init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),)))
    for layer in model:
        if isinstance(layer, SparseLinear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def described(model):
    layers = [m for m in model.modules() if isinstance(m, SparseLinear)]
    return [topology_hash(m) for m in layers], torch.cat([whole(p.detach()).flatten().double() for p in model.parameters()])


def _train(rank, world):
    found = {}
    for method in ("SET", "RigL", "SRigL", "MEST"):
        found[method] = described(train(build(), method, rank, world, shard)[0])
    return found, described(_accumulated(build(), shard, rank, world))


def _accumulated(model, wrap, rank=0, world=1, kind=torch.optim.AdamW):
    """Two micro-batches a step, gradients exchanged after the second alone."""
    model = wrap(model)
    optimizer = kind(model.parameters(), lr=0.01)
    stepper = dst.RigL(model, optimizer, every=2, t_end=100)
    for x in data():
        optimizer.zero_grad()
        for number, part in enumerate(x.chunk(world)[rank].chunk(2)):
            if world > 1:
                model.set_requires_gradient_sync(number == 1)
            (loss_of(model(part)) / 2).backward()
        optimizer.step()
        stepper.step()
    return model


def test_training_with_sharded_values_equals_one_process():
    expected, accumulated = {m: single(m) for m in ("SET", "RigL", "SRigL", "MEST")}, described(_accumulated(build(), lambda m: m))
    for found, its_accumulated in ranks.run(_train):
        for (hashes, numbers), (true_hashes, true_numbers) in [(found[m], expected[m]) for m in expected] + [(its_accumulated, accumulated)]:
            assert hashes == true_hashes
            assert torch.allclose(numbers, true_numbers, rtol=1e-9, atol=1e-11)


def _accumulated_in_another_dtype(rank, world):
    """Gradients of earlier micro-batches then wait in a place of their own."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    return described(_accumulated(build(), lambda model: shard(model, mp_policy=policy), rank, world, torch.optim.SGD))


def test_growth_sees_all_micro_batches_whatever_the_dtype_of_their_sum():
    hashes, numbers = described(_accumulated(build(), lambda model: model, kind=torch.optim.SGD))
    for found, its_numbers in ranks.run(_accumulated_in_another_dtype):
        assert found == hashes and torch.allclose(numbers, its_numbers, rtol=1e-4, atol=1e-6)


def _cleared(rank, world):
    """A step that is thrown away, as by a scaler that skips it, leaves no trace in the growth."""
    hashes = []
    for is_tried in (False, True):
        model = shard(build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        stepper = dst.RigL(model, optimizer, every=1, t_end=100)
        x = data()[0].chunk(world)[rank]
        for factor in (100.0, 1.0) if is_tried else (1.0,):
            optimizer.zero_grad()
            loss_of(model(x * factor if factor == 1 else x.flip(1) * factor)).backward()
        optimizer.step()
        assert stepper.step().dropped > 0
        hashes.append(described(model)[0])
    return hashes


def test_a_cleared_gradient_of_sharded_values_is_forgotten():
    assert all(first == second for first, second in ranks.run(_cleared))


def _more_ranks_than_connections(rank, world):
    """Parts of unequal length, some empty; and 16-bit products of 32-bit values."""
    torch.manual_seed(0)
    tiny = shard(nn.Sequential(SparseLinear(6, 5, sparsity=0.9), SparseLinear(5, 4, sparsity=0.5)))
    mixed = shard(build(torch.float32), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    parts = [len(layer.values.to_local()) for layer in tiny]
    for model, width, dtype in ((tiny, 6, torch.float32), (mixed, 24, torch.float32)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        stepper = dst.RigL(model, optimizer, every=1, t_end=100, drop_fraction=0.9)
        before = described(model)[0]
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, width, dtype=dtype)).float().square().sum().backward()
            optimizer.step()
            record = stepper.step()
        assert record.dropped > 0 and described(model)[0] != before
    return parts, described(tiny), described(mixed)


def test_uneven_parts_and_mixed_precision():
    first, *others = ranks.run(_more_ranks_than_connections, 4)
    assert first[0] == [1, 3] and others[-1][0] == [0, 1]
    for other in others:
        for a, b in zip(first[1:], other[1:]):
            assert a[0] == b[0] and torch.equal(a[1], b[1])


def _refused(rank, world):
    errors = []
    for method in ("GMP", "SNFS"):
        model = shard(build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        stepper = METHODS[method][0](model, optimizer, every=2, **METHODS[method][1])
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model(torch.randn(4, 24, dtype=torch.float64))).backward()
            optimizer.step()
            before = described(model)
            try:
                stepper.step()
            except snack.SnackError as error:
                errors.append(str(error))
        after = described(model)
        assert before[0] == after[0] and torch.equal(before[1], after[1])
    fails(["sharded by fully_shard", "snack.nn.gathered"], model[0].rewire, torch.arange(3))
    fails(["'0.values' is sharded", "torch.distributed.checkpoint"], snack.save_training, "/nowhere", model, optimizer)
    with pytest.raises(RuntimeError, match="their number stays"):
        model.load_state_dict(build(sparsity=0.9).state_dict())
    # By hand, and with ranks that disagree.
    with snack.nn.gathered([model[0]], optimizer):
        model[0].rewire(torch.arange(3), snack.ops.grow_uniform(model[0].pattern, 3, 5 + rank), optimizer=optimizer)
    try:
        snack.nn.check_topology(model)
    except snack.SnackError as error:
        errors.append(str(error))
    loss_of(model(torch.randn(4, 24, dtype=torch.float64))).backward()
    return errors


def test_what_cannot_be_done_with_sharded_values_is_told():
    for gmp, snfs, topology in ranks.run(_refused):
        assert "GMP" in gmp and "layer '0'" in gmp and "sharded by fully_shard" in gmp
        assert "SNFS" in snfs and "sharded by fully_shard" in snfs
        assert "rank 1 has other connections in layer '0'" in topology


POLICIES = [
    {"param_dtype": torch.bfloat16},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    {"reduce_dtype": torch.bfloat16},
    {"param_dtype": torch.float16, "reduce_dtype": torch.float16},
]


def _with_policies(rank, world):
    found = []
    for policy in POLICIES:
        for method in ("RigL", "MEST"):
            model = shard(build(torch.float32), mp_policy=MixedPrecisionPolicy(**policy))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            stepper = METHODS[method][0](model, optimizer, every=2, **METHODS[method][1])
            before = described(model)[0]
            for x in data()[:4]:
                optimizer.zero_grad()
                model(x.chunk(world)[rank].float()).float().square().mean().backward()
                if stepper.armed:
                    dtype = policy.get("param_dtype", torch.float32)
                    assert all(t.dtype == dtype for recorder in stepper._armed.values() for t in recorder.operands())
                optimizer.step()
                stepper.step()
            values = model[0].values
            assert values.dtype == values.grad.dtype == optimizer.state[values]["momentum_buffer"].dtype == torch.float32
            found.append(described(model)[0])
            assert stepper.updates == 2 and stepper.history[-1].dropped > 0 and found[-1] != before
    return found


def test_policies_of_mixed_precision_keep_ranks_equal():
    """The layer multiplies, and growth scores, in param_dtype; values, gradient and states stay in their own dtype."""
    first, second = ranks.run(_with_policies)
    assert first == second


def _mesh_of_two_dimensions(rank, world):
    model = shard(build(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = dst.SET(model, optimizer, every=1)
    loss_of(model(torch.randn(4, 24, dtype=torch.float64))).backward()
    optimizer.step()
    return fails(["mesh of 2 dimensions"], stepper.step)


def test_a_mesh_of_two_dimensions_is_told():
    ranks.run(_mesh_of_two_dimensions, 4)


# ---- torch.distributed.checkpoint ----


def _checkpoint(rank, world, folder, kind):
    wrap = {"fsdp": shard, "ddp": DistributedDataParallel}[kind]

    def start(seed):
        model = wrap(build(seed=seed))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, dst.RigL(model, optimizer, every=2, t_end=100)

    def go(model, optimizer, stepper, xs):
        for x in xs:
            optimizer.zero_grad()
            loss_of(model(x.chunk(world)[rank])).backward()
            optimizer.step()
            stepper.step()

    def parts(model, optimizer):
        return (model.module if kind == "ddp" else model), optimizer  # of a DistributedDataParallel the model inside

    first = start(0)
    go(*first, data()[:4])
    entries, optimizer_entries = get_state_dict(*parts(*first[:2]))
    dcp.save({"model": entries, "optimizer": optimizer_entries, "dst": first[2].state_dict()}, checkpoint_id=folder / kind)
    go(*first, data()[4:])

    second = start(3)
    go(*second, data()[:1])  # so that there is state to load into
    entries, optimizer_entries = get_state_dict(*parts(*second[:2]))
    state = {"model": entries, "optimizer": optimizer_entries, "dst": second[2].state_dict()}
    dcp.load(state, checkpoint_id=folder / kind)
    set_state_dict(*parts(*second[:2]), model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    second[2].load_state_dict(state["dst"])
    go(*second, data()[4:])
    a, b = described(first[0]), described(second[0])
    assert a[0] == b[0] and torch.equal(a[1], b[1])
    whole_model = get_model_state_dict(parts(*second[:2])[0], options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        copied = build(seed=9)
        copied.load_state_dict(whole_model)
        assert described(copied)[0] == b[0] and torch.equal(described(copied)[1], b[1])
    return b


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_distributed_checkpoint_continues_the_run(kind, tmp_path):
    first, second = ranks.run(_checkpoint, 2, tmp_path, kind)
    assert first[0] == second[0] and torch.equal(first[1], second[1])


def _sparseml_1807(rank, world):
    """Wrapped after the stepper was built: what it held was stale, and its sparsity 0."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = dst.SET(model, optimizer, every=1)
    shard(model)
    loss_of(model(torch.randn(4, 24, dtype=torch.float64))).backward()
    optimizer.step()  # of parameters that nobody uses any more
    told = fails(["the optimiser does not hold the values of '0', '2'", "Build it from model.parameters()"], stepper.step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = dst.SET(copy.copy(model), optimizer, every=1)
    before = topology_hash(model[0])
    optimizer.step()
    assert stepper.step().dropped > 0 and topology_hash(model[0]) != before and model[0].sparsity > 0.6
    dist.barrier()
    return told


def test_sparseml_1807_wrapped_after_the_stepper_was_built():
    ranks.run(_sparseml_1807)
