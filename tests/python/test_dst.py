"""Dynamic sparse training: what a training loop can rely on. (RigL's gradients: test_dst_gradient; bad input: test_dst_errors.)"""

import copy
import importlib.util
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from checks import real
from snack import dst, ops
from snack.nn import SparseLinear

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(autouse=True)
def one_thread():
    """These layers are tiny: threads would only wait for each other."""
    torch.set_num_threads(1)  # conftest puts it back


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def build(sparsity=0.8, sizes=(30, 20, 10), dtype=torch.float32):
    torch.manual_seed(0)
    layers = []
    for in_features, out_features in zip(sizes, sizes[1:]):
        layers += [SparseLinear(in_features, out_features, sparsity=sparsity, dtype=dtype), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def sparse_layers(model):
    return [m for m in model.modules() if isinstance(m, SparseLinear)]


def take_step(model, optimizer, batch=8):
    """One ordinary iteration up to and with the optimiser's step."""
    layer = sparse_layers(model)[0]
    x = torch.randn(batch, layer.in_features, dtype=layer.values.dtype)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def coordinates(layer):
    """row * in + col of every slot."""
    rows, cols = layer.pattern.coordinates()
    return rows.long() * layer.in_features + cols


def topology(model):
    return [coordinates(layer).tolist() for layer in sparse_layers(model)]


def per_slot_tensors(layer, optimizer):
    state = optimizer.state[layer.values]
    return [layer.values.grad, *(t for t in state.values() if torch.is_tensor(t) and t.shape == layer.values.shape)]


# ---- invariants of every update ----


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("method", [dst.SET, dst.RigL])
def test_state_follows_its_connection(method, optimizer_name):
    """Every tensor of the optimiser is filled with the coordinates of its slots, and has them after every update too."""
    model = build()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    stepper = method(model, optimizer, every=1, t_end=10**6)
    moved = 0
    for _ in range(40):
        take_step(model, optimizer)
        before = {}
        for layer in sparse_layers(model):
            tensors = per_slot_tensors(layer, optimizer)
            assert len(tensors) >= 2
            for tensor in tensors:
                tensor.copy_(coordinates(layer) + 1)
            before[layer] = (set(coordinates(layer).tolist()), [t.data_ptr() for t in tensors])
        update = stepper.step()
        for (layer, (old, addresses)), k in zip(before.items(), update.layers.values()):
            tensors, now = per_slot_tensors(layer, optimizer), coordinates(layer)
            assert [t.data_ptr() for t in tensors] == addresses
            is_new = torch.tensor([c not in old for c in now.tolist()])
            for tensor in tensors:
                # A connection dropped and grown again in one update has started anew, so it is 0 as well.
                assert torch.all((tensor == now + 1) | (tensor == 0)) and torch.all(tensor[is_new] == 0)
                assert int((tensor == 0).sum()) == k
            moved += int(is_new.sum())
        for layer in before:  # the optimiser goes on with numbers it can use
            for tensor in per_slot_tensors(layer, optimizer):
                tensor.fill_(1e-3)
    assert moved > 300


@pytest.mark.parametrize("method", [dst.SET, dst.RigL])
def test_a_thousand_updates_keep_nnz(method):
    model = build(sparsity=0.7, sizes=(15, 12, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    stepper = method(model, optimizer, every=1, drop_fraction=0.4, t_end=10**9)
    counts = [layer.nnz for layer in sparse_layers(model)]
    addresses = [layer.values.data_ptr() for layer in sparse_layers(model)]
    for number in range(1000):
        take_step(model, optimizer, batch=2)
        values = [layer.values.detach().clone() for layer in sparse_layers(model)]
        update = stepper.step()
        assert update.number == number and update.step == number + 1
        for layer, old, k, nnz in zip(sparse_layers(model), values, update.layers.values(), counts):
            positions = coordinates(layer)
            assert layer.nnz == nnz == positions.unique().numel() and int(positions.max()) < layer.in_features * layer.out_features
            if method is dst.SET:
                negative = int((old < 0).sum())
                assert k == int(0.4 * negative) + int(0.4 * (nnz - negative))
            else:
                assert k == int(update.fraction * nnz)
            assert int((layer.values == 0).sum()) >= k > 0
    assert [layer.values.data_ptr() for layer in sparse_layers(model)] == addresses
    assert stepper.updates == len(stepper.history) == 1000


def test_survivors_are_the_largest_and_grown_start_at_grow_init():
    model = build(sizes=(40, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = dst.SET(model, optimizer, drop="magnitude", every=1, drop_fraction=0.25, grow_init=-7.0)
    (layer,) = sparse_layers(model)
    take_step(model, optimizer)
    old = dict(zip(coordinates(layer).tolist(), layer.values.tolist()))
    k = stepper.step().dropped
    new = dict(zip(coordinates(layer).tolist(), layer.values.tolist()))
    assert k == int(0.25 * len(old)) == sum(v == -7.0 for v in new.values())
    kept = sorted(old, key=lambda c: abs(old[c]))[k:]
    assert {c: v for c, v in new.items() if v != -7.0} == {c: old[c] for c in kept}


def test_set_drops_the_same_fraction_of_both_signs():
    layer = SparseLinear(40, 30, sparsity=0.8)
    with torch.no_grad():
        layer.values.copy_(torch.cat([torch.arange(1.0, 41.0), -1e-3 * torch.arange(1.0, 201.0)]))  # 40 large positives, 200 tiny negatives
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    stepper = dst.SET(layer, optimizer, every=1, zeta=0.5)
    layer(torch.randn(2, 40)).sum().backward()
    optimizer.step()
    assert stepper.step().dropped == 120
    values = layer.values
    assert int((values > 0).sum()) == 20 and values[values > 0].min() == 21
    assert int((values < 0).sum()) == 100 and values[values < 0].max() < -0.1


def test_ties_go_to_the_lower_slot():
    layer = SparseLinear(2000, 3, sparsity=0.9)
    with torch.no_grad():
        layer.values.fill_(0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    before = coordinates(layer)
    stepper = dst.DST(layer, optimizer, drop="magnitude", grow="gradient", every=1, drop_fraction=0.1)
    layer(torch.ones(4, 2000)).sum().backward()  # every gradient is equal as well
    optimizer.step()
    k = stepper.step().dropped
    grown = coordinates(layer)[layer.values == 0]
    taken = set(before[k:].tolist())  # the first k slots are gone
    order = sorted(range(6000), key=lambda p: (p % 2000 // 1024, p // 2000, p % 2000))
    assert sorted(grown.tolist()) == sorted([p for p in order if p not in taken][:k])
    assert sorted(coordinates(layer)[layer.values != 0].tolist()) == sorted(taken)


# ---- the schedule ----


def test_schedule_of_steps_and_fractions():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stepper = dst.RigL(model, optimizer, delta_t=10, start=25, t_end=60, alpha=0.4)
    steps = []
    for step in range(1, 81):
        take_step(model, optimizer)
        if stepper.step() is not None:
            steps.append(step)
    assert steps == [30, 40, 50] == [u.step for u in stepper.history]
    expected = torch.tensor([0.2 * (1 + torch.cos(torch.tensor(torch.pi * t / 60))) for t in steps])
    assert torch.allclose(torch.tensor([u.fraction for u in stepper.history]), expected)
    assert stepper.steps == 80 and stepper.updates == 3
    assert all(u.dropped == u.grown == sum(int(u.fraction * layer.nnz) for layer in sparse_layers(model)) for u in stepper.history)


def test_schedule_may_be_a_function():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stepper = dst.SET(model, optimizer, every=2, drop_fraction=lambda step, t_end: 1.0 / step)
    for _ in range(8):
        take_step(model, optimizer)
        stepper.step()
    assert [u.fraction for u in stepper.history] == [1 / 2, 1 / 4, 1 / 6, 1 / 8]


def test_static_never_moves():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stepper = dst.Static(model, optimizer, every=1, drop_fraction=0.5, t_end=10, seed=3)
    before = topology(model)
    for _ in range(20):
        take_step(model, optimizer)
        assert stepper.step() is None
    assert topology(model) == before and stepper.history == [] and stepper.steps == 20


def test_step_without_an_optimiser_step_does_nothing():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stepper = dst.SET(model, optimizer, every=1)
    assert stepper.step() is None
    take_step(model, optimizer)
    assert stepper.step() is not None and stepper.step() is None
    assert stepper.updates == 1


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("method", [dst.SET, dst.RigL])
def test_a_step_that_grad_scaler_skips_does_not_count(method, is_fused):
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=is_fused)
    stepper = method(model, optimizer, every=2, t_end=100)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=8.0, growth_interval=10**6)
    seen = []
    for iteration in range(8):
        is_bad = iteration in (1, 2, 5)
        x = torch.randn(4, 30)
        if is_bad:
            x[0, 0] = torch.inf
        optimizer.zero_grad()
        values = [layer.values.detach().clone() for layer in sparse_layers(model)]
        before = topology(model)
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        update = stepper.step()
        seen.append((stepper.steps, update is not None))
        if is_bad:
            assert topology(model) == before and all(torch.equal(a, b.values) for a, b in zip(values, sparse_layers(model)))
    assert seen == [(1, False), (1, False), (1, False), (2, True), (3, False), (3, False), (4, True), (5, False)]
    assert all(torch.isfinite(layer.values).all() for layer in sparse_layers(model))


# ---- determinism, several models ----


def run(method, seed, model=None, steps=12, **options):
    model = build() if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    stepper = method(model, optimizer, every=2, t_end=100, seed=seed, **options)
    torch.manual_seed(1)
    for _ in range(steps):
        take_step(model, optimizer)
        stepper.step()
    return model, stepper


@pytest.mark.parametrize("method", [dst.SET, dst.RigL])
def test_same_seed_same_topology(method):
    assert topology(run(method, 5)[0]) == topology(run(method, 5)[0])


def test_seeds_layers_and_updates_have_streams_of_their_own():
    assert topology(run(dst.SET, 5)[0]) != topology(run(dst.SET, 6)[0])
    keys = []

    def grow(layer, k, drop, context):
        keys.append((context.update, context.number, context.key))
        return ops.grow_uniform(layer.pattern, k, context.key, drop)

    model, _ = run(dst.DST, 5, drop="signed", grow=grow)
    assert topology(model) == topology(run(dst.SET, 5)[0])
    assert keys == [(u, n, ops.random_key(5, u, n)) for u in range(6) for n in range(2)]


def test_layer_numbers_count_frozen_layers():
    model = build(sizes=(30, 20, 15, 10))
    sparse_layers(model)[1].values.requires_grad_(False)
    frozen = topology(model)[1]
    numbers = []

    def grow(layer, k, drop, context):
        numbers.append((context.name, context.number))
        return ops.grow_uniform(layer.pattern, k, context.key, drop)

    _, stepper = run(dst.DST, 0, model, steps=2, drop="magnitude", grow=grow)
    assert numbers == [("0", 0), ("4", 2)] and list(stepper.history[0].layers) == ["0", "4"]
    assert topology(model)[1] == frozen


def test_moved_and_copied_models():
    original = build()
    model = copy.deepcopy(original)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    stepper = dst.RigL(model, optimizer, every=1, t_end=100)
    model.to(real())  # keeps the Parameter objects
    take_step(model, optimizer)
    assert stepper.step().dropped > 0
    assert topology(model) != topology(original)
    model.train(False)
    with torch.no_grad():
        model(torch.randn(3, 30, dtype=real()))


def test_layers_that_cannot_move():
    """Full, empty, nearly full, one column, one row: k is at most the number of empty positions, and nothing fails."""
    layers = nn.ModuleList(
        [
            SparseLinear(8, 5, sparsity=0.0),
            SparseLinear.from_coo([], [], torch.empty(0), (5, 8)),
            SparseLinear.from_dense(nn.Linear(8, 5), mask=torch.arange(40).view(5, 8) > 1),
            SparseLinear(1, 20, sparsity=0.5),
            SparseLinear(20, 1, sparsity=0.5),
            SparseLinear(8, 5, sparsity=0.97),
        ]
    )
    for method, options in ((dst.SET, {}), (dst.SET, {"drop": "magnitude"}), (dst.RigL, {})):
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
        stepper = method(layers, optimizer, every=1, t_end=10, drop_fraction=0.9, **options)
        for _ in range(3):
            before = [coordinates(layer).tolist() for layer in layers]
            sum(layer(torch.randn(4, layer.in_features)).square().sum() for layer in layers).backward()
            optimizer.step()
            moved = list(stepper.step().layers.values())
            after = [coordinates(layer).tolist() for layer in layers]
            assert after[:2] == before[:2] and moved[:2] == [0, 0]
            assert moved[2] in (1, 2) and len(after[2]) == 38
            assert 0 < moved[3] <= 9 and 0 < moved[4] <= 9 and moved[5] == 0  # floor(0.9 * 1) connection cannot move


# ---- nothing is left behind ----


def hooks_on(model, optimizer):
    layers = sparse_layers(model)
    return (
        sum(len(layer._recorder or ()) for layer in layers),
        sum(len(layer.values._post_accumulate_grad_hooks or ()) for layer in layers),
        len(optimizer._optimizer_step_post_hooks),
    )


def test_ordinary_steps_carry_no_hooks():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stepper = dst.RigL(model, optimizer, every=5, t_end=15)
    for step in range(1, 21):
        is_due = step in (5, 10)
        assert stepper.armed == is_due and stepper.is_update(step) == is_due
        assert hooks_on(model, optimizer) == ((2, 2, 1) if is_due else (0, 0, 1))
        take_step(model, optimizer)
        assert (stepper.step() is not None) == is_due
    plain = dst.SET(model, optimizer, every=1)
    assert hooks_on(model, optimizer) == (0, 0, 2)
    del plain


def test_a_forgotten_stepper_takes_its_hooks_along():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stepper = dst.RigL(model, optimizer, every=1, t_end=15)
    assert hooks_on(model, optimizer) == (2, 2, 1)
    del stepper
    assert hooks_on(model, optimizer) == (0, 0, 0)


def test_copies_of_an_armed_model_do_not_record():
    def outcome(with_copies):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        plain_bytes = len(pickle.dumps(model))
        stepper = dst.RigL(model, optimizer, every=1, t_end=15)
        torch.manual_seed(1)
        x = torch.randn(500, 30)
        model(x).square().mean().backward()
        if with_copies:
            buffer = io.BytesIO(pickle.dumps(model))
            assert len(buffer.getvalue()) < plain_bytes + 10_000 < x.nbytes  # nothing of what was recorded is in there
            for other in (copy.deepcopy(model), pickle.load(buffer)):
                other(torch.full((3, 30), 100.0)).sum().backward()
                assert [layer._recorder for layer in sparse_layers(other)] == [None, None]
        optimizer.step()
        assert stepper.step().dropped > 0
        return topology(model)

    assert outcome(True) == outcome(False)


# ---- saving ----


@pytest.mark.parametrize("method", [dst.SET, dst.RigL])
def test_state_dict_continues_the_run(method):
    straight, straight_stepper = run(method, 5, steps=24)
    model, first = run(method, 5, steps=11)  # stops with an update due after the next step
    source = torch.random if torch.get_default_device().type == "cpu" else torch.cuda
    random = source.get_rng_state()
    optimizer = first.optimizer
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert state["steps"] == 11 and state["updates"] == 5
    second = method(model, optimizer, every=999, t_end=1000, seed=1, drop_fraction=0.1)
    second.load_state_dict(state)
    assert second.state_dict() == state
    del first
    source.set_rng_state(random)
    for _ in range(13):
        take_step(model, optimizer)
        second.step()
    assert topology(model) == topology(straight)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), straight.parameters()))
    assert [u.fraction for u in second.history] == [u.fraction for u in straight_stepper.history[5:]]
    assert second.updates == straight_stepper.updates == 12


# ---- methods of one's own ----


def test_own_rules_get_what_they_are_promised():
    calls = []

    def drop(layer, k, context):
        assert context.x is None and context.dy is None and not torch.is_grad_enabled()
        assert context.optimizer.state[layer.values]["momentum_buffer"].shape == (layer.nnz,)
        calls.append(("drop", context.name, context.step, k))
        return torch.arange(k - 1)  # fewer than asked for is fine

    def grow(layer, k, drop, context):
        calls.append(("grow", context.name, k, drop.tolist(), context.empty))
        rows, cols = layer.pattern.coordinates()
        return rows[drop], cols[drop]  # where they were: given up in the same edit, so free

    def init(layer, rows, cols, context):
        return (rows * 1000 + cols).to(real())

    model = build(sizes=(10, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    stepper = dst.DST(model, optimizer, drop=drop, grow=grow, every=3, drop_fraction=0.5, grow_init=init)
    (layer,) = sparse_layers(model)
    before = coordinates(layer)
    for _ in range(3):
        take_step(model, optimizer)
        update = stepper.step()
    assert calls == [("drop", "0", 3, 8), ("grow", "0", 7, list(range(7)), 64)]
    assert update.layers == {"0": 7} and torch.equal(coordinates(layer), before)
    rows, cols = layer.pattern.coordinates()
    assert torch.equal(layer.values[:7], (rows * 1000 + cols)[:7].float())
    assert torch.equal(optimizer.state[layer.values]["momentum_buffer"] == 0, torch.arange(16) < 7)


def test_the_example_of_an_own_method():
    path = Path(__file__).parents[2] / "examples" / "own_method.py"
    spec = importlib.util.spec_from_file_location("own_method", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    result = example.main(steps=120)
    assert result["updates"] == 4 and result["connections"] == 384
    assert result["unconnected inputs after"] < result["unconnected inputs before"]
    assert result["last loss"] < result["first loss"]
    source = path.read_text().split("# ---- the method: ten lines ----\n")[1].split("\n# ----")[0]
    assert len([line for line in source.splitlines() if line.strip()]) <= 10
