"""Each method's published rule in numbers that can be checked by hand; schedules; what the history says. (Trajectories: test_paired.)"""

import json
import math
import warnings

import pytest
import torch
from torch import nn

import snack
from checks import fails, same, snapshot
from snack import dst, ops
from snack.dst import schedules
from snack.nn import SparseLinear


@pytest.fixture(autouse=True)
def one_thread():
    """These layers are tiny: threads would only wait for each other."""
    torch.set_num_threads(1)  # conftest puts it back


def matrix(rows):
    """A layer without bias whose connections are the entries that are not None."""
    at = [(r, c, v) for r, row in enumerate(rows) for c, v in enumerate(row) if v is not None]
    r, c, v = zip(*at)
    return SparseLinear.from_coo(r, c, torch.tensor(v, dtype=torch.float64), (len(rows), len(rows[0])))


def sgd(model, momentum=0.0):
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=momentum)


def row(*numbers):
    return torch.tensor([numbers], dtype=torch.float64)


def backward(layer, x, dy):
    """Makes the gradient dY^T X of a layer."""
    layer.values.grad = None
    (layer(x) * dy).sum().backward()


def advance(stepper, layers, steps=1):
    """Optimiser steps with random gradients and learning rate 0; returns the last update."""
    for _ in range(steps):
        for layer in layers:
            backward(layer, *(torch.randn(3, n, dtype=torch.float64) for n in (layer.in_features, layer.out_features)))
        stepper.optimizer.step()
        record = stepper.step()
    return record


def connected(layer):
    return set(zip(layer.pattern.rows.tolist(), layer.pattern.cols.tolist()))


def dense_layer(out=10, in_=10):
    """All connections, of values 1 to out * in in row-major order."""
    return SparseLinear.from_dense(nn.Linear(in_, out, bias=False, dtype=torch.float64), mask=torch.ones(out, in_))


# ---- GMP ----


@pytest.mark.filterwarnings("ignore:GMP. .* begin more than half full")
def test_gmp_follows_the_cubic():
    """From 0 to 90 % in four updates: 0.9 * (1 - (1 - t/4)^3) of 100 positions leaves 47.97, 21.25, 11.41 and 10."""
    layer = dense_layer()
    with torch.no_grad():
        layer.values.copy_(torch.arange(1.0, 101.0) * torch.tensor([1.0, -1.0]).repeat(50))
    stepper = dst.GMP(layer, sgd(layer), sparsity=0.9, every=1, t_end=4)
    seen = []
    for _ in range(7):
        record = advance(stepper, [layer])
        seen.append((layer.nnz, record and round(record.fraction, 4)))
    assert seen == [(48, 0.5203), (21, 0.7875), (11, 0.8859), (10, 0.9), (10, None), (10, None), (10, None)]
    assert sorted(layer.values.abs().tolist()) == list(range(91, 101))  # the largest of all
    assert [u.dropped for u in stepper.history] == [52, 27, 10, 1] and all(u.grown == 0 for u in stepper.history)


@pytest.mark.filterwarnings("ignore:GMP. .* begin more than half full")
@pytest.mark.parametrize(
    ("every", "start", "t_end", "steps"), [(3, 0, 10, [3, 6, 9]), (3, 4, 10, [6, 9]), (5, 5, 20, [5, 10, 15, 20]), (1, 0, 1, [1])]
)
def test_gmp_ends_at_the_sparsity_whatever_the_steps(every, start, t_end, steps):
    layer = dense_layer()
    stepper = dst.GMP(layer, sgd(layer), sparsity=0.8, every=every, start=start, t_end=t_end)
    advance(stepper, [layer], 25)
    assert [u.step for u in stepper.history] == steps and layer.nnz == 20 and stepper.history[-1].fraction == 0.8


def test_gmp_prunes_a_sparse_network_further_and_never_grows_it():
    layers = nn.ModuleList([SparseLinear(20, 10, sparsity=0.5, dtype=torch.float64), SparseLinear(20, 10, sparsity=0.95, dtype=torch.float64)])
    with pytest.warns(UserWarning, match="GMP: the sparsity is above 0.9 already, of '1' \\(0.95\\), so nothing will be dropped there") as said:
        stepper = dst.GMP(layers, sgd(layers), sparsity=0.9, every=2, t_end=6)
    assert len(said) == 1
    advance(stepper, layers, 6)
    assert [layer.nnz for layer in layers] == [20, 10]  # the second was sparser already
    assert [u.layers["1"] for u in stepper.history] == [0, 0, 0]


def test_gmp_over_all_layers_together():
    """scope='global': the smallest of all go, and the sparsity is that of all together, after every update."""
    a, b = SparseLinear(20, 10, sparsity=0.5, dtype=torch.float64), SparseLinear(20, 10, sparsity=0.5, dtype=torch.float64)
    with torch.no_grad():
        b.values.mul_(100)
    layers = nn.ModuleList([a, b])
    stepper = dst.GMP(layers, sgd(layers), sparsity=0.75, every=1, t_end=3, scope="global")
    for aimed_at in (0.75 - 0.25 * (2 / 3) ** 3, 0.75 - 0.25 * (1 / 3) ** 3, 0.75):
        assert advance(stepper, layers).fraction == pytest.approx(aimed_at)
        assert a.nnz + b.nnz == round((1 - aimed_at) * 400)
    assert b.nnz > 95 and a.nnz < 5


@pytest.mark.filterwarnings("ignore:GMP. .* begin more than half full")
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_gmp_by_a_rule_that_looks_at_gradients(scope):
    """A full layer is recorded, too: there is nothing to grow in it, but something to drop."""

    @dst.needs_gradient
    class ByInput:
        def scores(self, layer, context):
            return context.x.abs().mean(0)[layer.pattern.cols.long()]

        def __call__(self, layer, k, context):
            return ops.select_smallest(self.scores(layer, context), k)

    layer = dense_layer(4, 5)
    stepper = dst.GMP(layer, sgd(layer), drop=ByInput(), sparsity=0.4, every=1, t_end=1, scope=scope)
    backward(layer, row(3, 1, 5, 2, 4), torch.ones(1, 4, dtype=torch.float64))
    stepper.optimizer.step()
    assert stepper.step().dropped == 8 and set(layer.pattern.cols.tolist()) == {0, 2, 4}


def test_gmp_says_what_storing_costs():
    with pytest.warns(UserWarning, match="GMP: '' begin more than half full.* MiB with the index, against .* MiB as dense"):
        dst.GMP(layer := dense_layer(), sgd(layer), every=3, t_end=9)


@pytest.mark.parametrize(
    ("scope", "sparsities", "words"),
    [
        ("layer", (0.9, 0.95), "the sparsity is 0.9 or more already, of '0' (0.9), '1' (0.95), so nothing will be dropped at all"),
        ("layer", (0.5, 0.9), None),
        ("global", (0.92, 0.9), "of all layers together (0.91), so nothing will be dropped at all"),
        ("global", (0.5, 0.95), None),
    ],
)
def test_gmp_says_that_nothing_will_be_dropped(scope, sparsities, words):
    layers = nn.ModuleList([SparseLinear(20, 10, sparsity=sparsity) for sparsity in sparsities])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dst.GMP(layers, sgd(layers), sparsity=0.9, t_end=1000, scope=scope)
    assert len(said) == (words is not None) and all(words in str(warning.message) for warning in said)


@pytest.mark.filterwarnings("ignore:GMP. .* begin more than half full")
@pytest.mark.parametrize(("built", "loaded"), [(0.0, 0.5), (0.5, 0.0)])
def test_gmp_begins_at_the_sparsity_of_a_model_loaded_before_its_first_update(built, loaded):
    """From where the model is then: an eighth of the way is left after half of the time."""
    layer = SparseLinear(20, 10, sparsity=built, dtype=torch.float64)
    stepper = dst.GMP(layer, sgd(layer), sparsity=0.9, every=1, t_end=4)
    layer.load_state_dict(SparseLinear(20, 10, sparsity=loaded, dtype=torch.float64).state_dict())
    assert stepper.state_dict()["initial"] == {"": layer.nnz}
    record = advance(stepper, [layer], 2)
    assert record.fraction == pytest.approx(0.9 - (0.9 - loaded) / 8) and layer.nnz == round((1 - record.fraction) * 200)
    advance(stepper, [layer], 2)
    assert layer.nnz == 20


def pruning(goal=0.9):
    layer = SparseLinear(20, 10, sparsity=0.0, dtype=torch.float64)
    return layer, dst.GMP(layer, sgd(layer), sparsity=goal, every=1, t_end=4)


@pytest.mark.filterwarnings("ignore:GMP. .* begin more than half full")
@pytest.mark.parametrize("model_first", [True, False])
def test_gmp_continues_from_a_checkpoint_to_its_sparsity(model_first):
    layer, stepper = pruning()
    advance(stepper, [layer], 2)
    model, state = layer.state_dict(), json.loads(json.dumps(stepper.state_dict()))
    rest = [advance(stepper, [layer]).nnz[""] for _ in range(2)]
    layer, stepper = pruning(goal=0.8)
    if model_first:
        layer.load_state_dict(model)
    stepper.load_state_dict(state)
    if not model_first:
        layer.load_state_dict(model)
    assert [advance(stepper, [layer]).nnz[""] for _ in range(2)] == rest and stepper.sparsity == 0.9 and layer.nnz == 20


@pytest.mark.filterwarnings("ignore:GMP. .* begin more than half full")
def test_gmp_refuses_to_continue_in_a_model_that_was_not_loaded():
    """It would drop all at once what the model has too many of."""
    layer, stepper = pruning()
    advance(stepper, [layer], 2)
    then, state = layer.nnz, stepper.state_dict()
    layer, stepper = pruning()
    stepper.load_state_dict(state)
    before = snapshot(layer)
    words = [f"GMP: layer '' has 200 connections and had {then} when the stepper's state was saved", "load the model's state"]
    for _ in range(2):  # it does not give in
        fails(words, advance, stepper, [layer])
    assert layer.nnz == 200 and torch.equal(before["values"], layer.values) and stepper.updates == 2 and not stepper.history


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"initial": {"": 201}}, ["of another model", "layer '' had 201 connections, and it has 200 positions"]),
        ({"initial": {"": -1}}, ["initial of layer ''=-1 must be a whole number"]),
        ({"initial": {"0": 100}}, ["of another model: its layers are 0"]),
        ({"initial": None}, ["of another model"]),
        ({"connections": {"": "many"}}, ["connections of layer ''='many' must be a whole number"]),
        ({"t_end": None}, ["no t_end"]),
        ({"sparsity": 1.5}, ["sparsity", "1.5"]),
    ],
)
def test_gmp_refuses_states_of_other_models(change, words):
    layer = SparseLinear(20, 10, sparsity=0.6)
    stepper = dst.GMP(layer, sgd(layer), sparsity=0.9, t_end=1000)
    state = stepper.state_dict()
    fails(["GMP", *words], stepper.load_state_dict, state | change)
    assert stepper.state_dict() == state


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frequency": 3}, ["option 'frequency' is unknown; the options are sparsity, drop, every, start, t_end, seed, scope, track, on_resize"]),
        ({"state": "mean"}, ["state has no meaning, as nothing grows"]),
        ({"t_end": None}, ["t_end is missing"]),
        ({"t_end": 0}, ["t_end=0 must lie after start=0"]),
        ({"start": 50, "t_end": 40}, ["t_end=40 lies before start=50"]),
        ({"every": 100, "start": 110, "t_end": 150}, ["no step from start=110 to t_end=150 is a multiple of every=100"]),
        ({"sparsity": 1.0}, ["GMP", "sparsity", "1.0"]),
        ({"grow": "uniform"}, ["grow has no meaning"]),
        ({"zeta": 0.2}, ["zeta has no meaning"]),
        ({"redistribute": "momentum"}, ["redistribute has no meaning"]),
        ({"scope": "row"}, ["scope='row' has no meaning without growth"]),
    ],
)
def test_gmp_refuses(options, words):
    layer = SparseLinear(20, 10, sparsity=0.6)
    fails(words, dst.GMP, layer, sgd(layer), **({"t_end": 1000} | options))


# ---- SNFS ----


def test_snfs_grows_where_the_momentum_of_absent_connections_is_largest():
    """Gradients of three steps at (0, 1..3); with decay 0.5 and a window of 2 the momenta are 4, 5, 3: column 2. A window of 3 adds 100/4
    to column 3, and the last step alone would take column 1."""
    steps = [row(0, 0, 0, 100), row(0, 2, 8, 4), row(0, 3, 1, 1)]
    for window, grown in ((1, 1), (2, 2), (3, 3)):
        layer = matrix([[0.1, None, None, None]])
        stepper = dst.SNFS(layer, sgd(layer), grow=dst.MomentumGrowth(window, decay=0.5), every=3, t_end=100, drop_fraction=dst.Constant(1.0))
        for x in steps:
            backward(layer, x, row(1))
            stepper.optimizer.step()
            stepper.step()
        assert stepper.updates == 1 and connected(layer) == {(0, grown)}


def test_snfs_gives_layers_with_more_momentum_more_connections():
    """Mean |momentum| 3 and 1, five dropped of each: 7.5 and 2.5 of the ten, by largest remainder 8 and 2."""
    layers = nn.ModuleList([SparseLinear(20, 10, sparsity=0.9, dtype=torch.float64) for _ in range(2)])
    optimizer = sgd(layers, momentum=1.0)
    stepper = dst.SNFS(layers, optimizer, every=1, t_end=100, drop_fraction=dst.Constant(0.25))
    for layer in layers:
        backward(layer, torch.zeros(1, 20, dtype=torch.float64), torch.ones(1, 10, dtype=torch.float64))
    optimizer.step()
    for layer, momentum in zip(layers, (3.0, 1.0)):
        optimizer.state[layer.values]["momentum_buffer"].fill_(momentum)
    record = stepper.step()
    assert record.layers == {"0": 5, "1": 5} and record.grown_layers == {"0": 8, "1": 2} and record.nnz == {"0": 23, "1": 17}


def test_snfs_takes_candidates_and_every_stepper_has_a_rule_of_its_own():
    layers = nn.ModuleList([SparseLinear(20, 10, sparsity=0.9, dtype=torch.float64) for _ in range(2)])
    one, two = (dst.SNFS(layers, sgd(layers), every=1, t_end=9, candidates=c) for c in (4, None))
    assert one._grow.candidates == 4 and two._grow.candidates is None and one._grow is not two._grow
    assert advance(one, layers).grown == 10


@pytest.mark.parametrize(
    ("options", "words"),
    [({"window": 0}, ["window=0"]), ({"window": 1.5}, ["window=1.5"]), ({"decay": 1.1}, ["decay=1.1"]), ({"decay": math.nan}, ["decay=nan"])],
)
def test_momentum_growth_refuses(options, words):
    fails(["SNFS", *words], dst.MomentumGrowth, **options)


# ---- MEST, SRigL, ITOP ----


def test_mest_drops_where_value_and_gradient_are_small():
    """|w| + |g| = 1 + 9, 2 + 0, 3 + 1, 4 + 0: -2 goes, and of 3 and -4, a tie, the lower slot; with twice the gradient -4."""
    for rule, left in ((dst.SensitivityDrop(), {1.0, -4.0}), (dst.SensitivityDrop(2.0), {1.0, 3.0})):
        layer = matrix([[1.0, -2.0, 3.0, -4.0, None, None]])
        stepper = dst.MEST(layer, sgd(layer), drop=rule, every=1, t_end=100, drop_fraction=dst.Constant(0.5), grow_init=9.0)
        backward(layer, row(9, 0, -1, 0, 5, 5), row(1))
        stepper.optimizer.step()
        assert stepper.step().dropped == 2
        assert {v for v in layer.values.tolist() if v != 9.0} == left


def test_mest_needs_the_gradient():
    layer = matrix([[1.0, -2.0, 3.0, None]])
    stepper = dst.MEST(layer, sgd(layer), every=1, t_end=100)
    backward(layer, row(1, 1, 1, 1), row(1))
    stepper.schedule = dst.Constant(0.5)
    stepper.optimizer.step()
    stepper.optimizer.zero_grad()
    before = snapshot(layer)
    fails(["MEST", "values.grad", "call zero_grad() after step()"], stepper.step)
    assert same(snapshot(layer), before)


def test_srigl_from_rows_of_one_length_keeps_constant_fan_in():
    torch.manual_seed(0)
    model = snack.sparsify(nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10)).double(), 0.8, how="row")
    stepper = dst.SRigL(model, sgd(model), every=1, t_end=100)
    layers = [model[0], model[2]]
    before = [connected(layer) for layer in layers]
    for _ in range(10):
        assert advance(stepper, layers).dropped > 0
        for layer, fan_in in zip(layers, (6, 4)):
            assert torch.bincount(layer.pattern.rows.long()).tolist() == [fan_in] * layer.out_features
            with torch.no_grad():
                layer.values.copy_(torch.randn(layer.nnz))
    assert all(connected(layer) != old for layer, old in zip(layers, before))


def test_itop_explores_half_of_the_connections_every_1500_steps():
    layer = SparseLinear(20, 10, sparsity=0.8, dtype=torch.float64)
    stepper = dst.ITOP(layer, sgd(layer))
    assert stepper.every == 1500 and stepper.schedule == dst.Constant(0.5)
    stepper.every = 1
    record = advance(stepper, [layer])
    assert record.dropped == 20 and record.explored is not None


# ---- schedules ----


def test_schedules_in_numbers():
    for schedule, numbers in [
        (dst.Constant(0.3), [0.3, 0.3, 0.3]),
        (dst.Cosine(0.4), [0.4, 0.2, 0.0]),
        (dst.Linear(0.4), [0.4, 0.2, 0.0]),
        (dst.Linear(0.4, power=3), [0.4, 0.05, 0.0]),
        (dst.Exponential(0.4, half_life=50), [0.4, 0.2, 0.1]),
    ]:
        assert [schedule(step, 100) for step in (0, 50, 100)] == pytest.approx(numbers)
        state = json.loads(json.dumps(schedules.to_state(schedule)))
        assert schedules.from_state(state, "x") == schedule and repr(schedule).startswith(type(schedule).__name__)
    assert dst.Linear(0.4)(150, 100) == 0.0
    assert [schedules.cubic(0.5, 0.9, step, 100, 200) for step in (0, 100, 150, 200, 900)] == pytest.approx([0.5, 0.5, 0.85, 0.9, 0.9])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dst.Exponential(0.3, 0), ["half_life 0", "above 0"]),
        (lambda: dst.Exponential(0.3, math.inf), ["half_life inf"]),
        (lambda: dst.Linear(0.3, -1.0), ["power -1.0"]),
        (lambda: dst.Linear(1.3), ["1.3"]),
        (lambda: dst.Cosine("x"), ["'x'"]),
    ],
)
def test_schedules_refuse(make, words):
    fails(words, make)


@pytest.mark.parametrize("schedule", [dst.Cosine(0.3), dst.Linear(0.3)])
def test_what_decays_to_the_end_needs_one(schedule):
    layer = SparseLinear(20, 10, sparsity=0.8)
    fails(["SET", "t_end, which is missing"], dst.SET, layer, sgd(layer), drop_fraction=schedule)
    dst.SET(layer, sgd(layer), drop_fraction=dst.Exponential(0.3, 100))


# ---- the history ----


@pytest.mark.parametrize(("kind", "options"), [(dst.SET, {}), (dst.RigL, {"t_end": 100}), (dst.SNFS, {"t_end": 100})])
def test_overlap_and_exploration_by_brute_force(kind, options):
    layers = nn.ModuleList([SparseLinear(15, 8, sparsity=0.8, dtype=torch.float64), SparseLinear(8, 6, sparsity=0.6, dtype=torch.float64)])
    stepper = kind(layers, sgd(layers, momentum=0.5), every=1, track=True, **options)
    seen = [connected(layer) for layer in layers]
    for number in range(12):
        before = [connected(layer) for layer in layers]
        if number == 5:  # what somebody else edits counts as explored, too
            layers[0].rewire([0, 1], ops.grow_uniform(layers[0].pattern, 2, 99), 1.0, stepper.optimizer)
            before[0] = connected(layers[0])
            seen[0] |= before[0]
        record = advance(stepper, layers)
        for i, (layer, old) in enumerate(zip(layers, before)):
            now = connected(layer)
            seen[i] |= now
            assert record.overlap[str(i)] == pytest.approx(len(old & now) / len(old))
            assert record.explored[str(i)] == pytest.approx(len(seen[i]) / (layer.in_features * layer.out_features))
        with torch.no_grad():
            for layer in layers:
                layer.values.copy_(torch.randn(layer.nnz))
    assert 0.3 < record.explored["0"] <= 1.0


def test_static_tracks_that_nothing_moves(tmp_path):
    """A record wherever another method would move connections, so that it is drawn and logged beside the others."""
    layer = SparseLinear(15, 8, sparsity=0.8, dtype=torch.float64)
    stepper = dst.Static(layer, sgd(layer), every=2, start=3, t_end=9, track=True, drop_fraction=0.3)
    before = snapshot(layer)
    advance(stepper, [layer], 10)
    assert torch.equal(layer.rows, before["rows"]) and torch.equal(layer.cols, before["cols"])
    assert [u.step for u in stepper.history] == [4, 6, 8] and stepper.updates == 3
    for update in stepper.history:
        assert update.dropped == update.grown == update.fraction == 0 and update.nnz == {"": 24}
        assert update.overlap == {"": 1.0} and update.explored == {"": pytest.approx(0.2)}
    other = dst.Static(layer, stepper.optimizer, every=2, start=3, t_end=9, track=True)
    snack.save_training(tmp_path / "a.safetensors", layer, stepper.optimizer, stepper)
    snack.load_training(tmp_path / "a.safetensors", layer, stepper.optimizer, other)
    assert [u.as_dict() for u in other.history] == [u.as_dict() for u in stepper.history]


def test_a_record_is_plain_numbers():
    layers = nn.ModuleList([SparseLinear(15, 8, sparsity=0.8), SparseLinear(8, 6, sparsity=0.0)]).double()
    stepper = dst.SET(layers, sgd(layers), every=1)
    record = advance(stepper, layers)
    plain = json.loads(json.dumps(record.as_dict()))
    assert plain["layers"] == plain["grown_layers"] == {"0": record.dropped, "1": 0} and plain["nnz"] == {"0": 24, "1": 48}
    assert plain["step"] == 1 and plain["number"] == 0 and plain["seconds"] > 0 and "overlap" not in plain
    assert repr(record) == f"Update(step=1, number=0, fraction=0.3, dropped={record.dropped}, grown={record.grown})"


def test_on_resize_is_called_when_the_number_of_connections_changed():
    calls = []
    layers = nn.ModuleList([SparseLinear(15, 8, sparsity=0.5, dtype=torch.float64), SparseLinear(15, 8, sparsity=0.5, dtype=torch.float64)])
    stepper = dst.SET(layers, sgd(layers), every=1, on_resize=lambda: calls.append("SET"))
    advance(stepper, layers, 3)
    assert calls == []
    stepper = dst.GMP(layers, sgd(layers), sparsity=0.9, every=1, t_end=3, on_resize=lambda: calls.append([layer.nnz for layer in layers]))
    advance(stepper, layers, 5)
    assert len(calls) == 3 and calls[-1] == [12, 12]


# ---- bad input ----


def test_more_than_there_is_room_for_moves_what_has_room():
    """90 % of 38 connections in 40 positions: two can move, in every method."""
    for kind in (dst.SET, dst.RigL, dst.MEST, dst.SRigL, dst.ITOP):
        layer = SparseLinear.from_dense(nn.Linear(8, 5), mask=torch.arange(40).view(5, 8) > 1).double()
        stepper = kind(layer, sgd(layer), every=1, t_end=10, drop_fraction=dst.Constant(0.9))
        assert advance(stepper, [layer]).dropped in (1, 2) and layer.nnz == 38


@pytest.mark.parametrize("kind", [dst.RigL, dst.SNFS, dst.SRigL])
def test_gradients_that_are_not_numbers_change_nothing(kind):
    layers = nn.ModuleList([SparseLinear(15, 8, sparsity=0.5, dtype=torch.float64), SparseLinear(15, 8, sparsity=0.5, dtype=torch.float64)])
    optimizer = sgd(layers, momentum=0.9)
    stepper = kind(layers, optimizer, every=1, t_end=10)
    for layer, scale in zip(layers, (1.0, math.nan)):
        backward(layer, torch.randn(3, 15, dtype=torch.float64) * scale, torch.randn(3, 8, dtype=torch.float64))
    optimizer.step()
    patterns = [layer.pattern.clone() for layer in layers]
    first = layers[0].values.detach().clone()
    fails([kind.__name__, "layer '1'"], stepper.step)
    assert all(layer.pattern.equals(pattern) for layer, pattern in zip(layers, patterns)) and torch.equal(layers[0].values, first)
    assert stepper.updates == 0


@pytest.mark.parametrize("kind", [dst.SNFS, dst.GMP, dst.MEST, dst.SRigL, dst.ITOP])
def test_models_and_optimisers_that_do_not_fit(kind):
    dense, sparse = nn.Linear(3, 3), SparseLinear(30, 3, sparsity=0.6)
    fails([kind.__name__, "no sparse layers", "snack.sparsify"], kind, dense, sgd(dense), t_end=2000)
    fails([kind.__name__, "the optimiser does not hold the values of ''"], kind, sparse, sgd(dense), t_end=2000)
    fails([kind.__name__, "t_end=50 lies before start=100"], kind, sparse, sgd(sparse), start=100, t_end=50)
    fails([kind.__name__, "option 'frequency' is unknown"], kind, sparse, sgd(sparse), t_end=2000, frequency=3)
