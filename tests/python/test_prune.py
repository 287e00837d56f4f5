"""One-shot pruning and rewinding: scores against their definitions, exact budgets, and errors that change nothing."""

import copy
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import snack
from checks import fails, mlp, same, snapshot
from snack.nn import SparseLinear, densify, sparsify
from snack.prune.oneshot import best


def small(dtype=torch.float64):
    return nn.Sequential(nn.Linear(6, 5, dtype=dtype), nn.Tanh(), nn.BatchNorm1d(5, dtype=dtype), nn.Linear(5, 3, dtype=dtype))


def batch(dtype=torch.float64):
    return torch.randn(8, 6, dtype=dtype), torch.randint(3, (8,))


def loss_on(x, y):
    return lambda model: F.cross_entropy(model(x), y)


def masks(model):
    """Where the connections of every converted layer are."""
    return [snack.formats.to_dense(m.pattern, torch.ones(m.nnz)) != 0 for m in model.modules() if isinstance(m, SparseLinear)]


def top(scores, count):
    """The masks of the `count` largest of all scores, by a stable sort."""
    flat = torch.cat([s.flatten() for s in scores])
    keep = torch.zeros(flat.numel(), dtype=torch.bool)
    keep[flat.sort(descending=True, stable=True).indices[:count]] = True
    return [part.view(s.shape) for part, s in zip(keep.split([s.numel() for s in scores]), scores)]


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


# ---- the budget ----


@given(st.lists(st.lists(st.integers(-2, 2), min_size=1, max_size=6), min_size=1, max_size=4), st.floats(0, 1))
def test_best_is_exact_with_ties(scores, fraction):
    """Few different numbers, so ties everywhere: exactly so many, the largest, the first of the equal ones."""
    scores = [torch.tensor(s, dtype=torch.float32)[None] for s in scores]
    count = round(fraction * sum(s.numel() for s in scores))
    assert equal(best(scores, count), top(scores, count))


@pytest.mark.parametrize("method", ["magnitude", "snip", "grasp"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.987])
@pytest.mark.filterwarnings("ignore:snack.prune:UserWarning")
def test_the_budget_is_exact(method, sparsity):
    torch.manual_seed(1)
    model, (x, y) = small(), batch()
    dense = copy.deepcopy(model)
    if method == "magnitude":
        assert snack.prune.magnitude(model, sparsity, scope="global") is model
    else:
        assert getattr(snack.prune, method)(model, loss_on(x, y), sparsity) is model
    layers = [m for m in model if isinstance(m, SparseLinear)]
    assert len(layers) == 2 and sum(m.nnz for m in layers) == round((1 - sparsity) * 45) == model.sparsify_report.nnz
    for ours, theirs in ((model[0], dense[0]), (model[3], dense[3])):
        rows, cols, values = ours.to_coo()
        assert torch.equal(values, theirs.weight.detach()[rows.long(), cols.long()]) and torch.equal(ours.bias, theirs.bias)


# ---- the scores ----


def test_magnitude_by_layer_is_sparsify():
    a, b = mlp(), mlp()
    b.load_state_dict(a.state_dict())
    snack.prune.magnitude(a, 0.9, "erk", exclude="2")
    sparsify(b, 0.9, "erk", "magnitude", exclude="2")
    assert same(a.state_dict(), b.state_dict()) and a.sparsify_report == b.sparsify_report


def test_global_magnitude():
    model = small()
    with torch.no_grad():
        model[3].weight.mul_(2)
    expected = top([model[i].weight.detach().abs() for i in (0, 3)], 18)
    snack.prune.magnitude(model, 0.6, scope="global")
    assert equal(masks(model), expected) and model[3].density > model[0].density > 0


def test_snip_is_gradient_times_weight():
    model, (x, y) = small(), batch()
    twin = copy.deepcopy(model)
    loss_on(x, y)(twin).backward()
    expected = top([(twin[i].weight * twin[i].weight.grad).detach().abs() for i in (0, 3)], 14)
    snack.prune.snip(model, loss_on(x, y), 1 - 14 / 45)
    assert equal(masks(model), expected)


def test_grasp_is_the_hessian_times_the_gradient():
    """Against the whole Hessian, written down: the largest of -w * (H g) go."""
    torch.manual_seed(3)
    model, (x, y) = small(), batch()
    names = ["0.weight", "3.weight"]
    shapes = [model.get_parameter(n).shape for n in names]

    def loss(flat):
        parts = flat.split([s.numel() for s in shapes])
        return F.cross_entropy(torch.func.functional_call(model, {n: p.view(s) for n, p, s in zip(names, parts, shapes)}, x), y)

    flat = torch.cat([model.get_parameter(n).detach().flatten() for n in names])
    twin = copy.deepcopy(model)
    gradient = torch.autograd.functional.jacobian(loss, flat)
    hessian = torch.autograd.functional.hessian(loss, flat)
    removal = -flat * (hessian @ gradient)
    model.load_state_dict(twin.state_dict())
    expected = top([p.view(s) for p, s in zip((-removal).split([s.numel() for s in shapes]), shapes)], 18)
    snack.prune.grasp(model, loss_on(x, y), 0.6)
    assert equal(masks(model), expected)


@pytest.mark.parametrize("method", ["snip", "grasp"])
def test_a_score_leaves_no_trace(method):
    """Gradients and the statistics of BatchNorm are those before; the loss is called once."""
    model, (x, y), calls = small(), batch(), []
    F.cross_entropy(model(x), y).backward()
    bias = model[0].bias
    before, gradient = {k: v.clone() for k, v in model[2].state_dict().items()}, bias.grad.clone()

    def loss(m):
        calls.append(m)
        return F.cross_entropy(m(x), y).reshape(1)

    getattr(snack.prune, method)(model, loss, 0.5)
    assert calls == [model] and same(before, model[2].state_dict()) and torch.equal(bias.grad, gradient) and model[0].bias is bias


def test_an_unused_layer_has_score_zero_and_empty_layers_are_told():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x)

    for method in (snack.prune.snip, snack.prune.grasp):
        with pytest.warns(UserWarning, match=f"snack.prune.{method.__name__} left no connection in 'b', where only biases act") as caught:
            model = method(Half(), lambda m: m(torch.ones(1, 4)).square().sum(), 0.75)
        assert caught[0].filename == __file__ and model.b.nnz == 0 and model.a.nnz == 8
    with pytest.warns(UserWarning, match="snack.prune.magnitude left no connection in '1'") as caught:
        snack.prune.magnitude(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), 0.99)
    assert caught[0].filename == __file__


def test_layers_that_cannot_be_pruned_are_told():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, batch_first=True), "head": nn.Linear(8, 3)})
    x = torch.randn(2, 3, 8)
    with pytest.warns(UserWarning, match="snack.prune.snip left dense 'attention.out_proj'") as caught:
        snack.prune.snip(model, lambda m: m["head"](m["attention"](x, x, x)[0]).square().mean(), 0.5)
    assert caught[0].filename == __file__ and model["head"].nnz == 12 and type(model["attention"].out_proj) is not SparseLinear


def test_include_exclude_and_a_bare_layer():
    model, (x, y) = small(), batch()
    snack.prune.snip(model, loss_on(x, y), 0.5, exclude="3")
    assert model[0].nnz == 15 and type(model[3]) is nn.Linear
    layer = snack.prune.snip(nn.Linear(4, 5), lambda m: m(torch.ones(1, 4)).square().sum(), 0.5)
    assert isinstance(layer, SparseLinear) and layer.nnz == 10


def test_bad_input_changes_nothing():
    x, y = batch()
    loss = loss_on(x, y)
    nan = loss_on(x * float("nan"), y)
    frozen = small()
    frozen[0].weight.requires_grad_(False)
    cases = [
        (["sparsity 1.0"], loss, {"sparsity": 1.0}),
        (["'lots'"], loss, {"sparsity": "lots"}),
        (["{", "sparsity"], loss, {"sparsity": {"*": 0.5}}),
        (["int", "function of the model"], 3, {}),
        (["float", "scalar"], lambda m: 1.0, {}),
        (["(8, 3)", "scalar"], lambda m: m(x), {}),
        (["no gradient"], lambda m: F.cross_entropy(m(x), y).detach(), {}),
        (["'0'", "not all finite"], nan, {}),
        (["'head'"], loss, {"exclude": "head"}),
        (["'head'"], loss, {"include": "head"}),
    ]
    for method in (snack.prune.snip, snack.prune.grasp):
        for words, function, options in cases:
            model = small()
            before = snapshot(model)
            fails([f"prune.{method.__name__}", *words], method, model, function, **({"sparsity": 0.5} | options))
            assert same(before, snapshot(model)) and type(model[0]) is nn.Linear
        fails(["'0' is frozen"], method, frozen, loss, 0.5)
        method(frozen, loss, 0.5, exclude="0")
        frozen = small()
        frozen[0].weight.requires_grad_(False)
        fails(["no nn.Linear"], method, nn.ReLU(), loss, 0.5)
        fails(["list"], method, [], loss, 0.5)
    fails(["'best'", "layer"], snack.prune.magnitude, small(), 0.5, scope="best")
    fails(["no distribution"], snack.prune.magnitude, small(), 0.5, "erk", scope="global")
    fails(["no second derivative"], snack.prune.grasp, nn.Linear(3, 2), lambda m: m(torch.ones(1, 3)).sum(), 0.5)
    model = small()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError):  # the user's own error comes through; the forward pass before it left nothing
        snack.prune.snip(model, lambda m: m(x).sum() * (1 // 0), 0.5)
    assert same(before, snapshot(model))


# ---- rewinding ----


def train(model, x, y, steps, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def test_lottery_ticket():
    """Train, prune by magnitude, rewind: the ticket has the connections of the trained and the values of the early network."""
    model, (x, y) = small(), batch()
    early = snack.prune.snapshot(model)
    train(model, x, y, 20)
    snack.prune.magnitude(model, 0.5)
    found = masks(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    assert snack.prune.rewind(model, early) is model
    assert equal(masks(model), found) and [p.data_ptr() for p in model.parameters()] == addresses
    for name in ("0", "3"):
        rows, cols, values = model.get_submodule(name).to_coo()
        assert torch.equal(values, early[f"{name}.weight"][rows.long(), cols.long()])
    state = model.state_dict()
    assert all(torch.equal(state[key], early[key]) for key in early if not key.endswith("weight") or key.startswith("2."))
    train(model, x, y, 3)
    assert not torch.equal(early["0.bias"], model[0].bias)  # the snapshot is a copy


def test_rewind_to_a_sparse_snapshot():
    """Late rewinding: the snapshot is of a sparser search that went on; only connections that it knows have a value."""
    model, (x, y) = sparsify(small(), 0.5), batch()
    early = snack.prune.snapshot(model)
    train(model, x, y, 5)
    model[0].rewire(drop=snack.ops.select_smallest(model[0].values, 7))
    model[3].rewire(drop=torch.arange(model[3].nnz))  # nothing left, and nothing to look for
    kept = list(zip(*(c.tolist() for c in model[0].pattern.coordinates())))
    snack.prune.rewind(model, early)
    values = dict(zip(zip(early["0.rows"].tolist(), early["0.cols"].tolist()), early["0.values"].tolist()))
    assert model[0].values.tolist() == [values[position] for position in kept] and model[3].nnz == 0
    assert torch.equal(model[0].bias, early["0.bias"])


def test_explicit_zeros_of_the_snapshot_stay_connections():
    model = small()
    early = snack.prune.snapshot(model)
    early["0.weight"].zero_()
    sparsify(model, 0.5)
    nnz = model[0].nnz
    snack.prune.rewind(model, early)
    assert model[0].nnz == nnz and not model[0].values.any()


def test_rewind_refuses_what_does_not_fit():
    model = sparsify(small(), 0.5)
    early = snack.prune.snapshot(model)
    grown = copy.deepcopy(model)
    occupied = set(zip(*(c.tolist() for c in grown[0].pattern.coordinates())))
    empty = [(r, c) for r in range(5) for c in range(6) if (r, c) not in occupied][:2]
    grown[0].rewire(grow=([r for r, _ in empty], [c for _, c in empty]))
    dense = snack.prune.snapshot(densify(copy.deepcopy(model)))
    for target, change, words in (
        (grown, lambda s: None, ["2 of the 17 connections of layer '0'", "did not exist"]),
        (model, lambda s: s.pop("3.bias"), ["'3.bias' is not in the file", "unchanged"]),
        (model, lambda s: s.pop("2.running_mean"), ["running_mean"]),
        (model, lambda s: s.update({"x": torch.ones(1)}), ["'x'", "unknown"]),
        (model, lambda s: [s.pop(f"3.{k}") for k in ("values", "rows", "cols", "shape", "slot_order")], ["'3' is not in the snapshot"]),
        (model, lambda s: s.update({"0.rows": s["0.rows"] + 5}), ["prune.rewind", "'0'", "row"]),
        (model, lambda s: s.update({"2.weight": torch.ones(9)}), ["(9,)", "(5,)"]),
    ):
        state = dict(early)
        change(state)
        before = snapshot(target)
        fails(words, snack.prune.rewind, target, state)
        assert same(before, snapshot(target))
    dense["0.weight"] = dense["0.weight"].t()
    fails(["'0'", "(6, 5)", "(5, 6)"], snack.prune.rewind, model, dense)
    fails(["list"], snack.prune.rewind, model, [])
    fails(["int"], snack.prune.rewind, 3, early)
    fails(["int"], snack.prune.snapshot, 3)


# ---- reports of users of other libraries ----


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def test_rigl_12_a_trained_network_is_pruned_by_magnitude():
    """google-research/rigl#12: a trained network pruned at random is stuck at chance; by magnitude it still works."""
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    dense = accuracy(model, x, y)
    kept = {scope: accuracy(snack.prune.magnitude(copy.deepcopy(model), 0.6, scope=scope), x, y) for scope in ("layer", "global")}
    random = accuracy(sparsify(copy.deepcopy(model), 0.6, how="random"), x, y)
    assert dense > 0.95 and min(kept.values()) > 0.9 and random < 0.7, (dense, kept, random)


class Mixer(nn.Module):
    """One block of an MLP-Mixer: a layer over the patches, one over the channels, and the classifier."""

    def __init__(self):
        super().__init__()
        self.patches, self.channels, self.head = nn.Linear(12, 12), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x):
        x = x + self.patches(x.transpose(1, 2)).transpose(1, 2)
        return self.head((x + self.channels(x)).mean(1))


def test_condensed_sparsity_76_mlp_mixer():
    """calgaryml/condensed-sparsity#76: both kinds of layers of a mixer are pruned and learn, and the classifier keeps every output."""
    x, y = torch.randn(20, 12, 16), torch.randint(5, (20,))
    for method in (snack.prune.snip, snack.prune.grasp):
        model = Mixer()
        method(model, loss_on(x, y), 0.5, exclude="head")
        assert model.patches.nnz + model.channels.nnz == 200 and type(model.head) is nn.Linear
        dense = densify(copy.deepcopy(model))
        torch.testing.assert_close(model(x), dense(x))
        before = float(loss_on(x, y)(model).detach())
        train(model, x, y, 30, 0.05)
        assert float(loss_on(x, y)(model).detach()) < 0.8 * before


def test_no_warning_without_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, (x, y) = small(), batch()
        snack.prune.snip(model, loss_on(x, y), 0.3)
