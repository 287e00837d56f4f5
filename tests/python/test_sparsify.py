"""sparsify and densify: exact budgets, what is converted and what not and why, transformers, pruned models, stale optimisers."""

import copy
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import snack
from checks import fails, mlp
from snack.nn import SparseLinear, densify, select, sparsify
from snack.nn.distribution import allocate, share

pytestmark = pytest.mark.filterwarnings("error:snack.sparsify left dense:UserWarning")  # a layer that is left dense unasked warns


def numel(model):
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))


def connections(model):
    return sum(
        m.nnz if isinstance(m, SparseLinear) else m.weight.numel() for m in model.modules() if isinstance(m, (nn.Linear, SparseLinear))
    )


def kinds(model):
    return {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, (nn.Linear, SparseLinear))}


# ---- the budget ----


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=8),
    st.floats(0, 0.9999),
    st.sampled_from(["uniform", "er", "erk"]),
)
def test_budget_is_exact(shapes, sparsity, distribution):
    counts, overflows = allocate(shapes, sparsity, distribution)
    positions = [out * in_ for out, in_ in shapes]
    assert sum(counts) == round((1.0 - sparsity) * sum(positions))
    assert all(0 <= count <= limit for count, limit in zip(counts, positions))
    assert all(count == limit for count, limit, over in zip(counts, positions, overflows) if over)
    if distribution == "uniform":
        assert not any(overflows) and all(abs(count - sum(counts) * p / max(1, sum(positions))) < 1 for count, p in zip(counts, positions))
        return
    # Below overflow, densities are proportional to (out + in) / (out * in), to one connection.
    rest = [i for i, over in enumerate(overflows) if not over and positions[i]]
    weights = [sum(shapes[i]) for i in rest]
    left = sum(counts[i] for i in rest)
    assert all(abs(counts[i] - left * w / sum(weights)) < 1 for i, w in zip(rest, weights))
    # A layer overflows only if its share asks for all it has.
    scale = left / sum(weights) if rest else float("inf")
    assert all(scale * sum(shapes[i]) >= positions[i] - len(rest) for i, over in enumerate(overflows) if over)


def test_largest_remainder():
    assert share(10, [1, 1, 1]) == [4, 3, 3] and share(5, [3, 3, 1]) == [2, 2, 1] and share(0, [1]) == [0] and share(3, [0, 0]) == [0, 0]


@pytest.mark.parametrize("distribution", ["uniform", "er", "erk"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.987])
@pytest.mark.parametrize("how", ["random", "magnitude"])
def test_models_have_the_budget(distribution, sparsity, how):
    model = mlp()
    total = numel(model)
    sparsify(model, sparsity, distribution, how)
    assert connections(model) == round((1 - sparsity) * total) == model.sparsify_report.nnz
    if distribution == "uniform":
        assert set(kinds(model).values()) == {"SparseLinear"}


def test_known_er_densities():
    """LeNet-300-100 at 90 %: the output layer overflows and stays dense; the others have density as (out + in) / (out * in)."""
    model = sparsify(mlp(), 0.9, "erk")
    assert kinds(model) == {"0": "SparseLinear", "2": "SparseLinear", "4": "Linear"}
    assert abs(model[0].density / model[2].density - ((784 + 300) / (784 * 300)) / ((300 + 100) / (300 * 100))) < 1e-3
    kept = model.sparsify_report.kept_dense
    assert [layer.name for layer in kept] == ["4"] and "erk" in kept[0].reason and kept[0].nnz == 1000


# ---- which weights ----


def test_random_keeps_the_sampled_weights_scaled_to_the_effective_fan_in():
    model = nn.Sequential(nn.Linear(400, 300), nn.Linear(300, 10))
    dense = copy.deepcopy(model)
    sparsify(model, 0.75, generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(model, dense):
        rows, cols, values = ours.to_coo()
        torch.testing.assert_close(values, theirs.weight.detach()[rows.long(), cols.long()] * (1 / ours.density) ** 0.5)
        assert torch.equal(ours.bias, theirs.bias)
    assert abs(float(model[0].values.detach().std()) / (1 / 100**0.5 / 3**0.5) - 1) < 0.02  # as an nn.Linear of 100 inputs
    again = sparsify(copy.deepcopy(dense), 0.75, generator=torch.Generator().manual_seed(1))
    assert all(a.pattern.equals(b.pattern) for a, b in zip(model, again))


def test_rescale_can_be_chosen():
    dense = nn.Linear(20, 30)
    plain = sparsify(copy.deepcopy(dense), 0.5, rescale=False, generator=torch.Generator().manual_seed(1))
    rows, cols, values = plain.to_coo()
    assert torch.equal(values, dense.weight.detach()[rows.long(), cols.long()])
    scaled = sparsify(copy.deepcopy(dense), 0.75, how="magnitude", rescale=True)
    rows, cols, values = scaled.to_coo()
    torch.testing.assert_close(values, dense.weight.detach()[rows.long(), cols.long()] * 2)


def test_magnitude_keeps_the_largest():
    dense = nn.Linear(20, 30)
    layer = sparsify(copy.deepcopy(dense), 0.9, how="magnitude")
    assert isinstance(layer, SparseLinear) and layer.nnz == 60
    assert float(layer.values.detach().abs().min()) == float(dense.weight.detach().abs().flatten().sort(descending=True).values[59])


def test_nonzero_imports_a_model_pruned_elsewhere():
    model = mlp()
    with torch.no_grad():
        for m in (model[0], model[2], model[4]):
            m.weight.mul_(torch.rand_like(m.weight) < 0.2)
    dense = copy.deepcopy(model)
    x = torch.randn(5, 784)
    sparsify(model, how="nonzero")
    torch.testing.assert_close(model(x), dense(x))
    assert connections(model) == sum(int((p != 0).sum()) for n, p in dense.named_parameters() if n.endswith("weight"))
    fails(["nonzero", "leave `sparsity` out"], sparsify, mlp(), 0.5, how="nonzero")


def test_default_sparsity():
    assert sparsify(nn.Linear(20, 30)).nnz == 60


# ---- in place ----


def test_bare_linear_returns_the_layer():
    dense = nn.Linear(20, 30, bias=False).eval()
    layer = sparsify(dense, 0.9)
    assert isinstance(layer, SparseLinear) and not layer.training and layer.bias is None
    assert layer.sparsify_report.converted[0].name == "(model)"


def test_in_place_and_bias_is_the_same_parameter():
    model = mlp()
    bias = model[0].bias
    assert sparsify(model, 0.9) is model and model[0].bias is bias


@pytest.mark.parametrize(
    "container",
    [
        lambda a, b: nn.Sequential(a, b),
        lambda a, b: nn.ModuleList([a, b]),
        lambda a, b: nn.ModuleDict({"a": a, "b": b}),
        lambda a, b: nn.Sequential(nn.Sequential(a), nn.ModuleList([nn.ModuleDict({"x": b})])),
    ],
)
def test_containers(container):
    model = sparsify(container(nn.Linear(3, 4), nn.Linear(4, 5)), 0.5)
    assert set(kinds(model).values()) == {"SparseLinear"} and len(kinds(model)) == 2


def test_shared_module_is_converted_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = nn.ModuleList([self.a, nn.Linear(8, 8)])

    model = sparsify(Twice(), 0.5)
    assert model.a is model.b[0] and isinstance(model.a, SparseLinear) and model.a is not model.b[1]
    assert [r.name for r in model.sparsify_report.layers] == ["a = b.0", "b.1"]
    assert connections(model) == 64


def test_dtype_frozen_and_mode_stay():
    model = nn.Sequential(nn.Linear(8, 8, dtype=torch.float64)).eval()
    model[0].weight.requires_grad_(False)
    sparsify(model, 0.5)
    assert (
        model[0].values.dtype == torch.float64
        and not model[0].values.requires_grad
        and model[0].bias.requires_grad
        and not model[0].training
    )


def test_hooks_go_along():
    model, seen = mlp(), []
    handle = model[0].register_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    model[2].register_forward_pre_hook(lambda module, args, kwargs: seen.append("pre"), with_kwargs=True)
    sparsify(model, 0.9)
    model(torch.randn(1, 784))
    assert seen == ["SparseLinear", "pre"]
    handle.remove()
    model(torch.randn(1, 784))
    assert seen == ["SparseLinear", "pre", "pre"]


def test_meta_model():
    with torch.device("meta"):
        model = mlp()
    sparsify(model, 0.9)
    assert model[0].values.is_meta and connections(model) == round(0.1 * 266200)
    model.to_empty(device="cpu")
    assert snack.nn.summary(model).total("nnz") == connections(model) and model(torch.zeros(1, 784)).shape == (1, 10)
    with torch.device("meta"):
        model = mlp()
    with pytest.warns(UserWarning, match="meta"):
        sparsify(model, 0.9, how="magnitude")
    assert set(kinds(model).values()) == {"Linear"}


def test_empty_layers():
    model = sparsify(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1, bias=False)), 0.95)
    assert connections(model) == round(0.05 * 25) == 1 and model(torch.randn(2, 4)).shape == (2, 1)
    assert [r.nnz for r in model.sparsify_report.layers] == [1, 0] and "no connections" in model.sparsify_report.layers[1].reason


# ---- globs ----


def test_include_and_exclude():
    assert kinds(sparsify(mlp(), 0.9, exclude=["4"])) == {"0": "SparseLinear", "2": "SparseLinear", "4": "Linear"}
    assert kinds(sparsify(mlp(), 0.9, exclude="[24]")) == {"0": "SparseLinear", "2": "Linear", "4": "Linear"}
    model = sparsify(mlp(), 0.9, include="0")
    assert kinds(model) == {"0": "SparseLinear", "2": "Linear", "4": "Linear"} and model[0].nnz == 23520
    assert [(r.status, r.reason) for r in model.sparsify_report.layers] == [
        ("converted", ""),
        ("skipped", "not included"),
        ("skipped", "not included"),
    ]


def test_sparsity_by_glob():
    """The first glob that matches counts; each glob has a budget of its own; the rest stays dense."""
    model = sparsify(mlp(), {"0": 0.98, "[02]": 0.8})
    assert model[0].nnz == round(0.02 * 235200) and model[2].nnz == 6000 and isinstance(model[4], nn.Linear)
    assert "no glob" in model.sparsify_report.layers[2].reason
    model = sparsify(mlp(), {"[02]": 0.9, "4": 0.0}, "erk")
    assert connections(model) == round(0.1 * 265200) + 1000


def test_globs_that_match_nothing():
    before = kinds(mlp())
    for arguments in ({"exclude": ["head"]}, {"include": ["head"]}, {"sparsity": {"head": 0.5, "*": 0.9}}):
        model = mlp()
        fails(["'head'", "'0', '2', '4'"], sparsify, model, **arguments)
        assert kinds(model) == before and not hasattr(model, "sparsify_report")


# ---- the report ----


def test_report():
    model = sparsify(mlp(), 0.9, "erk", exclude="2")
    report = model.sparsify_report
    assert [(r.name, r.shape, r.status) for r in report.layers] == [
        ("0", (300, 784), "converted"),
        ("2", (100, 300), "skipped"),
        ("4", (10, 100), "kept dense"),
    ]
    assert report.nnz == round(0.1 * 236200) and abs(report.sparsity - 0.9) < 1e-5
    text = str(report)
    assert "300 x 784" in text and "skipped: excluded" in text and "1 of 3 linear layers converted" in text
    assert json.loads(json.dumps(report.as_dict()))["layers"][0]["nnz"] == model[0].nnz
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.sparsify_report == report
    assert "sparsify_report" not in " ".join(model.state_dict())


# ---- densify ----


def test_densify():
    model = sparsify(mlp(), 0.9).eval()
    shared = nn.ModuleDict({"a": model, "b": model[0]})
    x = torch.randn(3, 784)
    expected, nnz, bias = model(x), model[0].nnz, model[0].bias
    assert densify(shared) is shared and set(kinds(shared).values()) == {"Linear"} and shared["b"] is model[0]
    torch.testing.assert_close(model(x), expected)
    assert int((model[0].weight != 0).sum()) == nnz and model[0].bias is bias and not model[0].training
    assert densify(model) is model
    assert type(densify(sparsify(nn.Linear(3, 4), 0.5))) is nn.Linear


def test_there_and_back_keeps_the_topology():
    model = sparsify(mlp(), 0.9)
    before = [m.pattern.clone() for m in model if isinstance(m, SparseLinear)]
    sparsify(densify(model), how="nonzero")
    assert all(m.pattern.equals(p) for m, p in zip((m for m in model if isinstance(m, SparseLinear)), before))


# ---- bad input ----


@pytest.mark.parametrize("sparsity", [float("nan"), -0.1, 1.0, 2, "lots", {"*": 1.0}, {}])
def test_bad_sparsity(sparsity):
    model = mlp()
    fails(["sparsity"], sparsify, model, sparsity)
    assert set(kinds(model).values()) == {"Linear"}


def test_bad_input():
    fails(["'best'", "magnitude"], sparsify, mlp(), 0.5, how="best")
    fails(["'erdos'", "erk"], sparsify, mlp(), 0.5, "erdos")
    fails(["Conv2d", "no nn.Linear"], sparsify, nn.Conv2d(1, 1, 1), 0.5)
    fails(["sparse already"], sparsify, sparsify(mlp(), 0.5), 0.5)
    fails(["list"], sparsify, [nn.Linear(3, 4)], 0.5)
    fails(["ReLU", "include"], sparsify, mlp(), 0.5, include=[nn.ReLU])
    fails(["3", "exclude"], sparsify, mlp(), 0.5, exclude=[3])
    fails(["int"], densify, 3)


# ---- rows of one length ----


@pytest.mark.parametrize(
    ("shape", "sparsity"), [((7, 30), 0.9), ((1, 50), 0.5), ((40, 1), 0.35), ((6, 8), 0.0), ((30, 2000), 0.99), ((9, 4), 0.99)]
)
def test_rows_of_one_length(shape, sparsity):
    out, in_ = shape
    layer = sparsify(nn.Linear(in_, out), sparsity, how="row", generator=torch.Generator().manual_seed(4))
    nnz = round((1 - sparsity) * out * in_)
    lengths = torch.bincount(layer.pattern.rows.long(), minlength=out)
    assert layer.nnz == nnz and lengths.tolist() == [nnz // out + (row < nnz % out) for row in range(out)]
    dense = nn.Linear(in_, out)
    again, other = (SparseLinear.from_dense(dense, sparsity, how="row", generator=torch.Generator().manual_seed(s)) for s in (4, 5))
    assert again.pattern.equals(layer.pattern) and (in_ == 1 or nnz in (0, out * in_) or not other.pattern.equals(layer.pattern))
    rows, cols, values = again.to_coo()
    assert torch.equal(values, dense.weight.detach()[rows.long(), cols.long()])  # `from_dense` keeps them, `sparsify` scales


def test_rows_of_one_length_are_drawn_in_panels(monkeypatch):
    whole = select.equal_rows((31, 200), 200, 3)
    monkeypatch.setattr(select, "_SCORES", 900)  # four rows at a time
    assert select.equal_rows((31, 200), 200, 3).equals(whole)


def test_rows_of_one_length_are_uniform():
    """Chi-square of 400 draws of 3 in 24 columns, all rows together: 23 degrees of freedom, 49.7 is exceeded once in 1,000 times."""
    weight = nn.Linear(24, 400)
    layer = SparseLinear.from_dense(weight, 1 - 3 / 24, how="row", generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(layer.pattern.cols.long(), minlength=24).double()
    assert float(((counts - 50).square() / 50).sum()) < 49.7
    assert len({tuple(row) for row in layer.pattern.cols.view(-1, 3).tolist()}) > 300  # rows differ


def test_rows_of_one_length_without_numbers_stay_dense():
    with torch.device("meta"):
        model = mlp()
    with pytest.warns(UserWarning, match="meta device, where how='row'"):
        sparsify(model, 0.9, how="row")
    assert set(kinds(model).values()) == {"Linear"}


def test_epsilon_gives_every_layer_connections_in_proportion_to_its_units():
    """SET's own way to say how many (Mocanu et al. 2018, eq. 1); a layer that would be full stays dense."""
    model = snack.sparsify(nn.Sequential(nn.Linear(784, 300), nn.Linear(300, 100), nn.Linear(100, 10)), epsilon=11.5)
    assert [layer.nnz for layer in model[:2]] == [round(11.5 * 1084), round(11.5 * 400)]
    assert type(model[2]) is nn.Linear and "epsilon=11.5" in model.sparsify_report.layers[2].reason


@pytest.mark.parametrize(("options", "sentence"), [
    ({"epsilon": -1}, "epsilon=-1 must be a number of at least 0"),
    ({"epsilon": "x"}, "epsilon='x' must be a number"),
    ({"epsilon": 3, "sparsity": 0.9}, "leave sparsity, distribution and how='nonzero' out"),
    ({"epsilon": 3, "distribution": "er"}, "leave sparsity, distribution and how='nonzero' out"),
])
def test_epsilon_that_does_not_fit_is_refused(options, sentence):
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(snack.SnackError, match=sentence):
        snack.sparsify(model, **options)
    assert type(model[0]) is nn.Linear
