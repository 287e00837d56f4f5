"""Optimiser state follows its connection, whichever optimiser it is; what grown connections begin with; what cannot be followed is said."""

import math
import warnings

import pytest
import torch
from torch import nn

import snack
from checks import fails, same, snapshot
from snack import dst
from snack.nn import SparseLinear, optimizer_state


@pytest.fixture(autouse=True)
def one_thread():
    """These layers are tiny: threads would only wait for each other."""
    torch.set_num_threads(1)  # conftest puts it back


OPTIM = torch.optim
OPTIMIZERS = {
    "SGD": lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD nesterov foreach": lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: OPTIM.Adam(p, lr=0.1, amsgrad=True),
    "Adam foreach": lambda p: OPTIM.Adam(p, lr=0.1, foreach=True),
    "Adam fused": lambda p: OPTIM.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "AdamW": lambda p: OPTIM.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: OPTIM.AdamW(p, lr=0.1, fused=True),
    "Adamax": lambda p: OPTIM.Adamax(p, lr=0.1),
    "NAdam": lambda p: OPTIM.NAdam(p, lr=0.1),
    "RAdam": lambda p: OPTIM.RAdam(p, lr=0.1),
    "Adagrad": lambda p: OPTIM.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "Adagrad fused": lambda p: OPTIM.Adagrad(p, lr=0.1, fused=True),
    "Adadelta": lambda p: OPTIM.Adadelta(p, lr=1.0),
    "RMSprop": lambda p: OPTIM.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: OPTIM.Rprop(p, lr=0.1),
    "ASGD": lambda p: OPTIM.ASGD(p, lr=0.1, t0=1),
    "snack SGD": lambda p: snack.optim.SGD(p, lr=0.1, momentum=0.9),
    "snack AdamW": lambda p: snack.optim.AdamW(p, lr=0.1),
}
# Adafactor scales a tensor's update by its length and LBFGS sees all parameters at once: there, connections do not go their ways alone.
NOT_ELEMENTWISE = {"Adafactor", "LBFGS"}
# Muon refuses 1-D parameters itself, SparseAdam dense gradients; neither can train `values`.
NOT_FOR_VALUES = {"Muon", "SparseAdam", "Optimizer"}


def test_no_optimiser_of_torch_is_forgotten():
    there = {name for name in dir(OPTIM) if isinstance(getattr(OPTIM, name), type) and issubclass(getattr(OPTIM, name), OPTIM.Optimizer)}
    assert there == {name.split()[0] for name in OPTIMIZERS if "snack" not in name} | NOT_ELEMENTWISE | NOT_FOR_VALUES


def make_layer(in_features=12, out_features=9, sparsity=0.6):
    torch.manual_seed(0)
    return SparseLinear(in_features, out_features, sparsity=sparsity, dtype=torch.float64)


def positions(layer):
    return layer.pattern.rows.long() * layer.in_features + layer.pattern.cols.long()


def gradient(number, size):
    """The gradient at every position in step `number`, whether it is connected or not."""
    return torch.sin(torch.arange(size, dtype=torch.float64) * 1.7 + number * 0.9) + 0.1


def step_both(layer, optimizer, dense, dense_optimizer, number):
    whole = gradient(number, dense.numel())
    layer.values.grad, layer.bias.grad = whole[positions(layer)], None
    dense.grad = whole.clone()
    optimizer.step()
    dense_optimizer.step()


@pytest.mark.parametrize("resize", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_survivors_go_on_as_if_nothing_had_happened(name, resize):
    """A dense parameter that no edit ever touches takes the same steps; connections that survive all edits end where its entries do."""
    layer = make_layer()
    dense = nn.Parameter(torch.zeros(layer.out_features * layer.in_features, dtype=torch.float64))
    with torch.no_grad():
        dense[positions(layer)] = layer.values
    optimizer, dense_optimizer = OPTIMIZERS[name]([layer.values, layer.bias]), OPTIMIZERS[name]([dense])
    survivors = set(positions(layer).tolist())
    random = torch.Generator().manual_seed(1)
    for number in range(9):
        step_both(layer, optimizer, dense, dense_optimizer, number)
        drop = torch.randperm(layer.nnz, generator=random)[:3]
        grow = snack.ops.grow_uniform(layer.pattern, 5 if resize else 3, number)
        survivors -= set(positions(layer)[drop].tolist())
        layer.rewire(drop, grow, 0.5, optimizer)
    step_both(layer, optimizer, dense, dense_optimizer, 9)
    is_survivor = torch.tensor([p in survivors for p in positions(layer).tolist()])
    assert int(is_survivor.sum()) >= 15
    torch.testing.assert_close(layer.values.detach()[is_survivor], dense.detach()[positions(layer)[is_survivor]], rtol=1e-12, atol=1e-14)
    assert torch.isfinite(layer.values).all()


def tag(layer, optimizer):
    """Fill every tensor with one entry a connection with the coordinates; returns their keys."""
    slots = optimizer_state.per_slot(layer, optimizer)
    with torch.no_grad():
        for slot in slots:
            slot.tensor.copy_(positions(layer) + 1)
    return sorted({slot.key for slot in slots})


@pytest.mark.parametrize("grows", [4, 6])
def test_adafactor(grows):
    layer = make_layer()
    optimizer = OPTIM.Adafactor([layer.values, layer.bias])
    layer(torch.randn(3, 12, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert tag(layer, optimizer) == ["variance"]
    slots = layer.rewire([0, 5, 6, 7], snack.ops.grow_uniform(layer.pattern, grows, 1), None, optimizer)
    expected = (positions(layer) + 1.0).index_fill(0, slots.grown, 0.0)
    assert torch.equal(optimizer.state[layer.values]["variance"], expected)
    layer.values.grad = torch.ones_like(layer.values)
    optimizer.step()
    assert torch.isfinite(layer.values).all()


def lbfgs_after_some_steps():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12, dtype=torch.float64), make_layer())
    optimizer = OPTIM.LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=5)
    x, y = torch.randn(20, 6, dtype=torch.float64), torch.randn(20, 9, dtype=torch.float64)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        first = optimizer.step(closure)
    return model, optimizer, closure, first.item()


def test_lbfgs_keeps_its_history_at_constant_nnz():
    model, optimizer, closure, before = lbfgs_after_some_steps()
    layer = model[1]
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    vectors = [state["d"], state["prev_flat_grad"], *state["old_dirs"], *state["old_stps"]]
    assert len(vectors) >= 6 and tag(layer, optimizer) == ["d", "old_dirs", "old_stps", "prev_flat_grad"]
    begin = 6 * 12 + 12
    others = [(v[:begin].clone(), v[begin + layer.nnz :].clone()) for v in vectors]
    slots = layer.rewire([0, 5, 6], snack.ops.grow_uniform(layer.pattern, 3, 1), None, optimizer)
    expected = (positions(layer) + 1.0).index_fill(0, slots.grown, 0.0)
    for vector, (head, tail) in zip(vectors, others):
        assert torch.equal(vector[begin : begin + layer.nnz], expected)
        assert torch.equal(vector[:begin], head) and torch.equal(vector[begin + layer.nnz :], tail)


def test_lbfgs_goes_on_after_edits_and_begins_anew_at_another_nnz():
    model, optimizer, closure, before = lbfgs_after_some_steps()
    layer = model[1]
    state = optimizer.state[model[0].weight]
    layer.rewire([0], snack.ops.grow_uniform(layer.pattern, 1, 1), None, optimizer)
    assert optimizer.step(closure).item() < 2 * before and len(state["old_dirs"]) > 0
    layer.rewire([0, 1], snack.ops.grow_uniform(layer.pattern, 7, 1), None, optimizer)
    assert "old_dirs" not in state and state["n_iter"] == 0
    losses = [optimizer.step(closure).item() for _ in range(10)]
    assert losses[-1] < losses[0]


def test_lbfgs_that_has_taken_no_step():
    layer = make_layer()
    optimizer = OPTIM.LBFGS(layer.parameters(), max_iter=2)
    layer.rewire([0], None, None, optimizer)
    x = torch.randn(5, 12, dtype=torch.float64)

    def closure():
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        return loss

    before = layer(x).square().mean().item()
    optimizer.step(closure)
    assert layer(x).square().mean().item() < before


# ---- optimisers that nobody here knows ----


class Lion(OPTIM.Optimizer):
    """Chen et al. 2023: one momentum, the sign of its mean with the gradient."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
            p.sub_((momentum * 0.9 + p.grad * 0.1).sign() * self.param_groups[0]["lr"])
            momentum.mul_(0.99).add_(p.grad, alpha=0.01)


class Factored(Lion):
    """Keeps, besides, what is no entry a connection: a factor over blocks, a list, and counters."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p] |= {"blocks": torch.full((7,), 3.0), "past": [p.grad.clone()], "step": torch.tensor(4.0), "count": 2, "mark": "x"}


def after_one_step(kind):
    layer = make_layer()
    optimizer = kind(layer.parameters())
    layer(torch.randn(3, 12, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize("grows", [4, 9])
def test_an_unknown_optimiser_is_followed_without_a_word(grows):
    layer, optimizer = after_one_step(Lion)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tag(layer, optimizer) == ["exp_avg"]
        slots = layer.rewire([1, 2, 3, 30], snack.ops.grow_uniform(layer.pattern, grows, 1), None, optimizer)
    expected = (positions(layer) + 1.0).index_fill(0, slots.grown, 0.0)
    assert torch.equal(optimizer.state[layer.values]["exp_avg"], expected)


def test_what_cannot_be_followed_is_said_once_and_stays(monkeypatch):
    monkeypatch.setattr(optimizer_state, "_warned", set())
    layer, optimizer = after_one_step(Factored)
    state = optimizer.state[layer.values]
    past = state["past"][0].clone()
    with pytest.warns(UserWarning) as caught:
        layer.rewire([1], snack.ops.grow_uniform(layer.pattern, 1, 1), None, optimizer)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 2
    assert "Factored keeps 'blocks', a tensor of shape (7,), which is not one entry a connection; it stays as it is" in texts[0]
    assert "Factored keeps 'past', a list" in texts[1]
    assert torch.equal(state["blocks"], torch.full((7,), 3.0)) and torch.equal(state["past"][0], past)
    assert float(state["step"]) == 4.0 and state["count"] == 2 and state["mark"] == "x"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.rewire([1], snack.ops.grow_uniform(layer.pattern, 1, 2), None, optimizer)


# ---- what grown connections begin with ----


def adam_with_moments():
    layer = make_layer()
    optimizer = OPTIM.Adam(layer.parameters(), lr=0.1)
    layer(torch.randn(3, 12, dtype=torch.float64)).sum().backward()
    optimizer.step()
    state = optimizer.state[layer.values]
    with torch.no_grad():
        for i, key in enumerate(("exp_avg", "exp_avg_sq")):
            state[key].copy_(torch.arange(layer.nnz) + 100 * i)
    return layer, optimizer, state


@pytest.mark.parametrize("grows", [3, 8])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("zero", (0.0, 0.0)),
        ("mean", (21.0, 121.0)),  # 43 connections: the mean of 0 to 42
        (lambda key, tensor: float(len(key)), (7.0, 10.0)),
        (lambda key, tensor: tensor.max(), (42.0, 142.0)),
        ({"exp_avg_sq": "mean"}, (0.0, 121.0)),
        ({"exp_avg_sq": lambda key, tensor: 5, "exp_avg": "mean"}, (21.0, 5.0)),
        ({}, (0.0, 0.0)),
    ],
)
def test_state_policies(policy, expected, grows):
    layer, optimizer, state = adam_with_moments()
    assert layer.nnz == 43
    slots = layer.rewire([0, 1, 2], snack.ops.grow_uniform(layer.pattern, grows, 1), None, optimizer, state=policy)
    for key, value in zip(("exp_avg", "exp_avg_sq"), expected):
        assert state[key][slots.grown].tolist() == [value] * grows
    assert float(state["step"]) == 1.0


def test_the_stepper_passes_its_policy_on():
    layer = make_layer()
    optimizer = OPTIM.Adam(layer.parameters(), lr=0.0)
    stepper = dst.SET(layer, optimizer, every=1, state={"exp_avg_sq": lambda key, tensor: 77.0}, grow_init=9.0)
    layer(torch.randn(3, 12, dtype=torch.float64)).sum().backward()
    optimizer.step()
    k = stepper.step().dropped
    state = optimizer.state[layer.values]
    assert k > 0 and int((state["exp_avg_sq"] == 77).sum()) == k == int((layer.values == 9).sum()) and int((state["exp_avg"] == 0).sum()) == k


def test_the_first_step_of_a_grown_connection_is_as_long_as_documented():
    """(1 - beta1) / sqrt(1 - beta2) learning rates with Adam late in a run: 3.16; about 0.1 with the mean of the squares."""
    for policy, rates in (("zero", 0.1 / math.sqrt(0.001)), ({"exp_avg_sq": "mean"}, 0.1)):
        layer = make_layer()
        optimizer = OPTIM.Adam(layer.parameters(), lr=0.01)
        layer.values.grad = torch.ones_like(layer.values)
        optimizer.step()
        optimizer.state[layer.values]["step"].fill_(100_000)
        optimizer.state[layer.values]["exp_avg_sq"].fill_(1.0)
        slots = layer.rewire([0], snack.ops.grow_uniform(layer.pattern, 1, 1), None, optimizer, state=policy)
        layer.values.grad = torch.ones_like(layer.values)
        optimizer.step()
        assert layer.values[slots.grown].item() == pytest.approx(-0.01 * rates, rel=1e-3)


def test_rprop_goes_on_with_the_mean_step():
    layer = make_layer()
    optimizer = OPTIM.Rprop(layer.parameters(), lr=0.1)
    layer(torch.randn(3, 12, dtype=torch.float64)).sum().backward()
    optimizer.step()
    slots = layer.rewire([0], snack.ops.grow_uniform(layer.pattern, 1, 1), None, optimizer, state={"step_size": "mean"})
    assert optimizer.state[layer.values]["step_size"][slots.grown].item() == pytest.approx(0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_the_mean_of_other_dtypes(dtype):
    """Of 16-bit numbers it is made in float32 (60,000 sixes overflow float16); whole numbers begin at 0."""
    tensor = torch.full((60_000,), 6, dtype=dtype)
    assert float(optimizer_state.fill_of("mean", "x", tensor)) == (0.0 if dtype == torch.int64 else 6.0)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("median", ["state='median' is unknown", "'zero', 'mean', a function (key, tensor) -> number"]),
        (0.5, ["state=0.5 is unknown"]),
        ({"exp_avg": "median"}, ["state='median' is unknown"]),
        ({"exp_avg": {"a": "zero"}}, ["must name 'zero', 'mean' or a function for every key"]),
        ({1: "zero"}, ["is unknown"]),
        (lambda key, tensor: "much", ["state function returned a str for 'exp_avg'", "expected one number"]),
        (lambda key, tensor: tensor, ["returned a Tensor for 'exp_avg'", "expected one number"]),
        (lambda key, tensor: True, ["returned a bool"]),
    ],
)
def test_bad_policies_change_nothing(policy, words):
    layer, optimizer, _ = adam_with_moments()
    before = snapshot(layer, optimizer)
    fails(words, layer.rewire, [0, 1], snack.ops.grow_uniform(layer.pattern, 2, 1), None, optimizer, state=policy)
    assert same(snapshot(layer, optimizer), before)


def test_a_stale_optimiser_changes_nothing():
    layer, other = make_layer(), make_layer()
    stale = OPTIM.Adam(other.parameters())
    before = snapshot(layer)
    fails(["the optimiser does not hold this layer's values", "Build the optimiser from"], layer.rewire, [0], None, None, stale)
    assert same(snapshot(layer), before)
