"""Bad input to the steppers: one sentence each that names what was given and what to do, and nothing half-changed."""

import math

import pytest
import torch
from torch import nn

import snack
from snack import dst, ops
from snack.errors import SnackError
from snack.nn import SparseLinear, state


def build():
    torch.manual_seed(0)
    return nn.Sequential(SparseLinear(20, 16, sparsity=0.8), nn.ReLU(), SparseLinear(16, 8, sparsity=0.5))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"drop_fraction": 1.5}, r"drop_fraction 1.5 is not a number between 0 and 1"),
        ({"drop_fraction": -0.1}, r"drop_fraction -0.1 is not a number between 0 and 1"),
        ({"zeta": math.nan}, r"drop_fraction nan is not a number between 0 and 1"),
        ({"drop_fraction": "0.3"}, r"drop_fraction '0.3' is not a number"),
        ({"every": 0}, r"every=0 must be a whole number of at least 1"),
        ({"delta_t": 2.5}, r"every=2.5 must be a whole number of at least 1"),
        ({"every": True}, r"every=True must be a whole number"),
        ({"start": -1}, r"start=-1 must be a whole number of at least 0"),
        ({"start": 100, "t_end": 50}, r"t_end=50 lies before start=100"),
        ({"t_end": math.inf}, r"t_end=inf must be a number of optimiser steps"),
        ({"t_end": "end"}, r"t_end='end' must be a number of optimiser steps"),
        ({"seed": -1}, r"seed=-1 must be a whole number of at least 0"),
        ({"seed": "x"}, r"seed='x' must be a whole number"),
        ({"grow_init": math.nan}, r"grow_init=nan must be a finite number or a function"),
        ({"grow_init": "he"}, r"grow_init='he' must be a finite number or a function"),
        ({"frequency": 10}, r"option 'frequency' is unknown; the options are .*drop_fraction, every"),
        ({"zeta": 0.2, "drop_fraction": 0.1}, r"zeta is another name of drop_fraction; give one of them once"),
        ({"zeta": 0.2, "alpha": 0.1}, r"alpha is another name of drop_fraction"),
        ({"drop": "smallest"}, r"drop rule 'smallest' is unknown; choose one of magnitude, signed, sensitivity, or give a function"),
        ({"drop": 3}, r"drop rule 3 is unknown"),
        ({"grow": "random"}, r"grow rule 'random' is unknown; choose one of uniform, gradient, momentum, or give a function"),
        ({"candidates": 8}, r"candidates=8 belongs to grow='gradient' and 'momentum'"),
        ({"grow": "gradient", "candidates": 0}, r"candidates=0 is neither a number of at least 1"),
        ({"grow": "gradient", "candidates": "some"}, r"candidates='some' is neither"),
    ],
)
def test_options(options, sentence):
    model = build()
    optimizer = sgd(model)
    with pytest.raises(SnackError, match="^(SET|RigL): " + sentence) as error:
        dst.SET(model, optimizer, **options)
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
    assert not optimizer._optimizer_step_post_hooks


def test_plain_stepper_needs_both_rules():
    model = build()
    with pytest.raises(SnackError, match="DST: drop rule None is unknown; choose one of magnitude, signed"):
        dst.DST(model, sgd(model), grow="uniform")
    with pytest.raises(SnackError, match="DST: grow rule None is unknown"):
        dst.DST(model, sgd(model), drop="signed")


def test_cosine_needs_an_end():
    model = build()
    with pytest.raises(SnackError, match="RigL: the drop fraction falls to 0 at t_end, which is missing; give t_end"):
        dst.RigL(model, sgd(model))
    dst.RigL(model, sgd(model), drop_fraction=dst.Constant(0.3))


@pytest.mark.parametrize("method", [dst.SET, dst.RigL, dst.Static])
def test_model_and_optimizer(method):
    model = build()
    with pytest.raises(SnackError, match="the model has no sparse layers; call snack.sparsify"):
        method(nn.Linear(3, 3), sgd(nn.Linear(3, 3)), t_end=9)
    with pytest.raises(SnackError, match="the model is a list, expected a torch.nn.Module"):
        method([model], sgd(model), t_end=9)
    with pytest.raises(SnackError, match="the optimizer is a str, expected a torch.optim.Optimizer"):
        method(model, "adam", t_end=9)
    with pytest.raises(SnackError, match="the optimizer is a type"):
        method(model, torch.optim.Adam, t_end=9)


@pytest.mark.parametrize("method", [dst.SET, dst.RigL, dst.Static])
def test_optimizer_built_before_the_model_was_sparse(method):
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = sgd(model)
    model[0] = SparseLinear.from_dense(model[0], sparsity=0.8)
    with pytest.raises(SnackError, match="does not hold the values of '0'; it was built before the model was made sparse.* Build it from"):
        method(model, optimizer, t_end=9)
    method(model, sgd(model), t_end=9)


def test_parameters_replaced_later():
    model = build()
    optimizer = sgd(model)
    stepper = dst.SET(model, optimizer, every=1)
    model[2].values = nn.Parameter(model[2].values.detach().clone())
    model(torch.randn(2, 20)).sum().backward()
    optimizer.step()
    before = model[0].pattern.clone()
    with pytest.raises(SnackError, match="does not hold the values of '2'"):
        stepper.step()
    assert model[0].pattern.equals(before)


def test_shared_values():
    a, b = SparseLinear(8, 8, sparsity=0.5), SparseLinear(8, 8, sparsity=0.5)
    b.values, b.index, b.tile_ptr = a.values, a.index, a.tile_ptr
    model = nn.Sequential(a, b)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SnackError, match="layers '0' and '1' share their values"):
        dst.SET(model, optimizer)
    dst.Static(model, optimizer)


# ---- rules of the user's that do not keep their promise ----


def good_drop(layer, k, context):
    return ops.select_smallest(layer.values, k)


def good_grow(layer, k, drop, context):
    return ops.grow_uniform(layer.pattern, k, context.key, drop)


def only_last(bad, good):
    """Misbehaves in the last layer only, when the first one's edit has been worked out."""
    return lambda layer, *rest: (bad if layer.in_features == 16 else good)(layer, *rest)


BAD_DROPS = {
    "twice": (lambda layer, k, context: torch.zeros(2, dtype=torch.int64), "slot 0 is named twice"),
    "outside": (lambda layer, k, context: torch.tensor([layer.nnz]), "slot 64 to drop is outside"),
    "too many": (lambda layer, k, context: torch.arange(k + 1), r"drop rule returned 20 slots, it was asked for at most 19"),
    "mask": (lambda layer, k, context: layer.values < 0, r"drop rule returned bool of shape \(64,\), expected a 1-D tensor of integers"),
    "nothing": (lambda layer, k, context: None, "drop rule returned a NoneType, expected a 1-D tensor of integers"),
}
BAD_GROWS = {
    "occupied": (
        lambda layer, k, drop, context: tuple(c[-k:] for c in layer.pattern.coordinates()),
        r"position \(.*\) to grow is occupied",
    ),
    "twice": (
        lambda layer, k, drop, context: tuple(c.repeat(k) for c in ops.grow_uniform(layer.pattern, 1, 0)),
        r"position \(.*\) to grow is occupied or named twice",
    ),
    "outside": (
        lambda layer, k, drop, context: (torch.arange(k), torch.full((k,), 16)),
        r"position \(0, 16\) to grow is outside the shape \(8, 16\)",
    ),
    "too few": (
        lambda layer, k, drop, context: ops.grow_uniform(layer.pattern, k - 1, 0),
        "grow rule returned 18 rows and 18 columns, expected 19 of each",
    ),
    "uneven": (
        lambda layer, k, drop, context: (torch.arange(k), torch.arange(0)),
        "grow rule returned 19 rows and 0 columns, expected 19 of each",
    ),
    "floats": (
        lambda layer, k, drop, context: (torch.rand(k), torch.rand(k)),
        r"grow rule returned rows that are float32 of shape \(19,\), expected a 1-D tensor of integers",
    ),
    "one tensor": (lambda layer, k, drop, context: torch.zeros(k, 2), r"grow rule returned a Tensor, expected a pair \(rows, cols\)"),
}
CASES = [
    pytest.param(only_last(bad, good_drop), good_grow, 0.0, sentence, id=f"drop {name}") for name, (bad, sentence) in BAD_DROPS.items()
]
CASES += [
    pytest.param(good_drop, only_last(bad, good_grow), 0.0, sentence, id=f"grow {name}") for name, (bad, sentence) in BAD_GROWS.items()
]
CASES += [
    pytest.param(
        "magnitude",
        "uniform",
        only_last(lambda layer, rows, cols, context: torch.ones(3), lambda layer, rows, cols, context: rows.float()),
        r"grow_init returned shape \(3,\), expected \(19,\)",
        id="grow_init",
    )
]


@pytest.mark.parametrize(("drop", "grow", "grow_init", "sentence"), CASES)
def test_bad_rules_change_nothing(drop, grow, grow_init, sentence):
    model = build()
    optimizer = sgd(model)
    stepper = dst.DST(model, optimizer, drop=drop, grow=grow, grow_init=grow_init, every=1)
    model(torch.randn(4, 20)).square().sum().backward()
    optimizer.step()
    layers = [model[0], model[2]]

    def everything():
        state = [optimizer.state[layer.values]["momentum_buffer"] for layer in layers]
        return [t.clone() for layer, s in zip(layers, state) for t in (layer.index, layer.tile_ptr, layer.values, layer.values.grad, s)]

    before = everything()
    with pytest.raises(SnackError, match="^DST: layer '2'.*" + sentence):
        stepper.step()
    assert all(torch.equal(a, b) for a, b in zip(before, everything()))
    assert stepper.updates == 0 and stepper.history == []


def test_gradient_that_is_not_a_number_changes_nothing():
    for candidates in (None, 2):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        stepper = dst.RigL(model, optimizer, every=1, t_end=9, candidates=candidates)
        patterns = [model[0].pattern.clone(), model[2].pattern.clone()]
        model(torch.full((4, 20), torch.nan)).sum().backward()
        optimizer.step()
        with pytest.raises(SnackError, match="gradient that is a number; the others are NaN"):
            stepper.step()
        assert model[0].pattern.equals(patterns[0]) and model[2].pattern.equals(patterns[1])


def test_schedule_of_the_user_out_of_range():
    model = build()
    optimizer = sgd(model)
    stepper = dst.SET(model, optimizer, every=1, drop_fraction=lambda step, t_end: 2.0)
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    with pytest.raises(SnackError, match="schedule: drop_fraction 2.0 is not a number between 0 and 1"):
        stepper.step()


# ---- states that do not belong ----


def test_state_of_something_else():
    model = build()
    stepper = dst.SET(model, sgd(model), every=7, t_end=70)
    good = stepper.state_dict()
    for change, sentence in [
        (None, "the state is a list"),
        ({"version": 1}, "the state has version 1, this one reads 2"),
        ({"method": "RigL"}, "the state is of RigL; continue with the method it was saved from"),
        ({"steps": -1}, "steps=-1 must be a whole number"),
        ({"every": 0}, "every=0 must be"),
        ({"schedule": {"kind": "Step"}}, "the state's schedule .* is unknown"),
        ({"schedule": {"kind": "Cosine", "end": 3}}, "the state's schedule .* does not fit Cosine"),
        ({"schedule": {"kind": "Constant", "fraction": 7}}, "drop_fraction 7 is not a number between 0 and 1"),
        ({"schedule": {"kind": "Cosine", "fraction": 0.3}, "t_end": None}, "t_end, which is missing"),
    ]:
        with pytest.raises(SnackError, match=sentence):
            stepper.load_state_dict([] if change is None else {**good, **change})
        assert stepper.state_dict() == good
    with pytest.raises(SnackError, match="the state lacks steps, updates"):
        stepper.load_state_dict({"version": 2, "method": "SET"})


def test_state_with_a_schedule_of_the_user():
    model = build()
    stepper = dst.SET(model, sgd(model), drop_fraction=lambda step, t_end: 0.1)
    state = stepper.state_dict()
    assert state["schedule"] is None
    stepper.load_state_dict({**state, "steps": 5})
    assert stepper.steps == 5 and stepper.schedule(1, None) == 0.1


def test_a_state_with_a_schedule_of_the_user_needs_one():
    model = build()
    state = dst.SET(model, sgd(model), drop_fraction=lambda step, t_end: 0.1).state_dict()
    stepper = dst.SET(model, sgd(model), every=7)
    good = stepper.state_dict()
    with pytest.raises(SnackError, match=r"SET: the state was saved with a function .* this stepper has Constant\(fraction=0.3\); give it"):
        stepper.load_state_dict(state)
    assert stepper.state_dict() == good


def test_a_saved_schedule_replaces_a_function():
    """As it replaces every other: a run continues as it began."""
    model = build()
    stepper = dst.SET(model, sgd(model), drop_fraction=lambda step, t_end: 0.1)
    stepper.load_state_dict(dst.SET(model, sgd(model), drop_fraction=0.4).state_dict())
    assert stepper.schedule == dst.Constant(0.4)


def test_a_state_function_is_heard_before_any_layer_changes():
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    seen = []  # exp_avg and exp_avg_sq of layer '0', then those of layer '2'
    stepper = dst.SET(model, optimizer, every=1, state=lambda key, tensor: seen.append(key) or (0.0 if len(seen) < 3 else "much"))
    before = [layer.to_coo() for layer in (model[0], model[2])]
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    with pytest.raises(SnackError, match="layer '2': rewire: the state function returned a str for 'exp_avg', expected one number"):
        stepper.step()
    assert stepper.updates == 0 and not stepper.history
    for layer, (rows, cols, _) in zip((model[0], model[2]), before):
        assert torch.equal(layer.rows, rows) and torch.equal(layer.cols, cols)


def test_redistribution_by_a_gradient_that_is_gone():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stepper = dst.DST(model, optimizer, drop="magnitude", grow="uniform", redistribute="gradient", every=1)
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(SnackError, match=r"redistribution reads values.grad, and there is none; call zero_grad\(\) after step\(\)"):
        stepper.step()


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, "1", True])
def test_sensitivity_weighs_by_a_number(weight):
    with pytest.raises(SnackError, match="SensitivityDrop: weight=.* must be a finite number of at least 0"):
        dst.SensitivityDrop(weight)


@pytest.mark.filterwarnings("ignore:GMP. .* begin more than half full")
def test_gmp_without_a_step_to_prune_at():
    model = build()
    with pytest.raises(SnackError, match="no step from start=0 to t_end=50 is a multiple of every=100"):
        dst.GMP(model, sgd(model), sparsity=0.9, every=100, t_end=50)


def test_steppers_are_exported():
    for name in dst.__all__:
        assert hasattr(dst, name)
    assert snack.errors.SnackError is SnackError


def test_memory_that_runs_out_between_layers_leaves_each_layer_whole(monkeypatch):
    model = build()
    optimizer = sgd(model)
    stepper = snack.SET(model, optimizer, every=1, drop_fraction=0.5)
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    second = {k: v.clone() for k, v in model[2].state_dict().items()}
    carry, calls = state.carry, []

    def carry_once(layer, *args):
        calls.append(layer)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no more")
        carry(layer, *args)

    monkeypatch.setattr(state, "carry", carry_once)
    with pytest.raises(SnackError, match="out of memory: the layer and the optimiser are as they were"):
        stepper.step()
    assert stepper.updates == 1 and stepper.history[-1].layers["0"] > 0 and stepper.history[-1].layers["2"] == 0
    assert all(torch.equal(v, second[k]) for k, v in model[2].state_dict().items())
    monkeypatch.undo()
    optimizer.step()
    assert stepper.step().layers["2"] > 0


def test_a_stepper_on_an_optimiser_that_nobody_steps_says_so_once():
    model = build()
    stepper, used = snack.SET(model, sgd(model)), sgd(model)
    with pytest.warns(UserWarning, match="SET: step\\(\\) was called 100 times while the optimiser it was given took no step") as said:
        for _ in range(250):
            model(torch.randn(4, 20)).sum().backward()
            used.step()
            stepper.step()
    assert len(said) == 1 and stepper.steps == 0


@pytest.mark.parametrize("method", [dst.SET, dst.MEST, dst.GMP])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_diverged_run_is_told_once(method, number):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    stepper = method(model, optimizer, every=1, t_end=9)
    with torch.no_grad():
        model[2].values[3] = number

    def run():
        optimizer.zero_grad(set_to_none=False)
        for layer in (model[0], model[2]):
            layer.values.grad = torch.zeros_like(layer.values)
        optimizer.step()
        stepper.step()

    with pytest.warns(UserWarning, match=f"{method.__name__}: after the update at step 1 layer '2' has weights that are NaN or infinite") as said:
        for _ in range(3):
            run()
    assert stepper.updates == 3 and len(said) == 1


def test_mest_leaves_a_layer_alone_that_took_no_part_and_complains_where_all_gradients_are_gone():
    model = build()
    optimizer = sgd(model)
    stepper = snack.MEST(model, optimizer, every=1, t_end=9)
    model[0](torch.randn(4, 20)).sum().backward()
    optimizer.step()
    record = stepper.step()
    assert record.layers["0"] > 0 and record.layers["2"] == 0
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(SnackError, match="MEST: the drop rule reads values.grad, and no layer has one; call zero_grad"):
        stepper.step()


def test_rprop_steps_of_grown_connections_are_of_the_layers_length():
    torch.manual_seed(0)
    layer = SparseLinear(20, 10, sparsity=0.5)
    optimizer = torch.optim.Rprop(layer.parameters(), lr=0.05)
    layer(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    mean = optimizer.state[layer.values]["step_size"].mean()
    empty = (~layer.to_dense().weight.bool()).nonzero()[0]
    moved = layer.rewire([0], (empty[:1], empty[1:]), optimizer=optimizer)
    assert torch.allclose(optimizer.state[layer.values]["step_size"][moved.grown], mean)
