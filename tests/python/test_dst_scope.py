"""Among which connections an update compares (layer, row, global), and how growth is shared out among layers."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from checks import fails, same, snapshot
from snack import dst, ops
from snack.dst import scope
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


def stack(*sizes, sparsity=0.7):
    torch.manual_seed(0)
    return nn.ModuleList([SparseLinear(in_, out, sparsity=sparsity, dtype=torch.float64) for in_, out in sizes])


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


def backward(layers, batch=6):
    """A gradient for every layer; returns the dense ones, dY^T X."""
    dense = []
    for layer in layers:
        x, dy = (torch.randn(batch, n, dtype=torch.float64) for n in (layer.in_features, layer.out_features))
        layer.values.grad = None
        (layer(x) * dy).sum().backward()
        dense.append(dy.T @ x)
    return dense


def update(stepper, layers):
    gradients = backward(layers)
    stepper.optimizer.step()
    return stepper.step(), gradients


def mask_of(layer):
    mask = torch.zeros(layer.out_features, layer.in_features, dtype=torch.bool)
    mask[layer.pattern.rows.long(), layer.pattern.cols.long()] = True
    return mask


def row_lengths(layer):
    return mask_of(layer).sum(1).tolist()


# ---- scope="row" ----


def test_rows_regrow_what_they_lost_where_their_gradient_is_largest():
    """Numbers by hand: of six connections two go, both of row 0; row 0 gets two, row 1 none, though its gradients are larger."""
    layer = matrix([[0.1, 0.2, 5.0, None, None], [None, None, 5.0, 6.0, 7.0]])
    optimizer = sgd(layer)
    stepper = dst.SRigL(layer, optimizer, every=1, t_end=100, drop_fraction=dst.Constant(0.34))
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, -5.0]], dtype=torch.float64)
    (layer(x) * torch.tensor([1.0, 100.0])).sum().backward()  # gradient of row 0: x, of row 1: 100 x
    optimizer.step()
    assert stepper.step().layers == {"": 2}
    assert mask_of(layer).int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert layer.values.tolist() == [5.0, 0.0, 0.0, 5.0, 6.0, 7.0]


def test_ties_in_a_row_go_to_the_lower_column_and_full_rows_keep_theirs():
    layer = matrix([[0.1, None, None, 9.0], [0.2, 8.0, 8.0, 8.0], [9.0, 9.0, None, None]])
    optimizer = sgd(layer)
    stepper = dst.SRigL(layer, optimizer, every=1, t_end=100, drop_fraction=dst.Constant(0.25))
    layer(torch.ones(2, 4, dtype=torch.float64)).sum().backward()  # every gradient is 2
    optimizer.step()
    assert stepper.step().dropped == 2
    # Row 0 loses (0, 0), the lowest of three ties with it; row 1 has nowhere else to go than where it was.
    assert mask_of(layer).int().tolist() == [[1, 0, 0, 1], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert layer.values[0] == 0.0 and layer.values[2] == 0.0


@pytest.mark.parametrize("grow", ["uniform", "gradient", "momentum"])
@pytest.mark.parametrize("panel", [2**22, 50])
def test_every_row_keeps_its_count(monkeypatch, grow, panel):
    """Over many updates, and equal to a search by brute force; small panels of rows give the same."""
    monkeypatch.setattr(scope, "_ROW_SCORES", panel)
    layers = stack((40, 15), (15, 8))
    optimizer = sgd(layers)
    stepper = dst.DST(layers, optimizer, drop="magnitude", grow=grow, scope="row", every=1, drop_fraction=0.4)
    with torch.no_grad():
        layers[0].values.mul_(torch.linspace(0.1, 2, layers[0].nnz))  # so that the first rows lose more
    lengths = [row_lengths(layer) for layer in layers]
    for _ in range(15):
        before = [(mask_of(layer), layer.to_coo()) for layer in layers]
        record, gradients = update(stepper, layers)
        assert [row_lengths(layer) for layer in layers] == lengths
        for layer, gradient, (mask, (rows, cols, values)), k in zip(layers, gradients, before, record.layers.values()):
            dropped = ops.select_smallest(values, k)
            kept = mask.clone()
            kept[rows[dropped].long(), cols[dropped].long()] = False
            grown = mask_of(layer) & ~kept
            assert int(grown.sum()) == k and bool((mask_of(layer) | ~kept).all())
            if grow == "gradient":
                for row in range(layer.out_features):
                    free = torch.sort(gradient[row].abs().masked_fill(kept[row], -1), descending=True).indices
                    assert set(free[: int(grown[row].sum())].tolist()) == set(grown[row].nonzero().flatten().tolist())
        with torch.no_grad():
            for layer in layers:
                layer.values.copy_(torch.randn(layer.nnz, dtype=torch.float64))


def test_uniform_growth_in_rows_is_uniform_and_repeats():
    """200 updates of one row of 2 in 20: each of the 18 or more free columns is as likely as the others (chi-square, 19 degrees: 43.8)."""

    def run(seed, updates):
        torch.manual_seed(0)
        layer = matrix([[1.0, 2.0] + [None] * 18] * 10)
        optimizer = sgd(layer)
        stepper = dst.DST(layer, optimizer, drop="magnitude", grow="uniform", scope="row", every=1, drop_fraction=0.5, seed=seed, grow_init=3.0)
        counts = torch.zeros(20, dtype=torch.float64)
        for _ in range(updates):
            update(stepper, [layer])
            counts += torch.bincount(layer.pattern.cols.long()[layer.values == 3.0], minlength=20)
            with torch.no_grad():
                layer.values.copy_(torch.rand(layer.nnz) + 0.5)
        return counts

    counts = run(1, 200)
    assert float(((counts - counts.mean()).square() / counts.mean()).sum()) < 43.8
    assert torch.equal(run(1, 30), run(1, 30)) and not torch.equal(run(1, 30), run(2, 30))


def test_a_row_may_lose_everything_and_gets_as_many_anew():
    layer = matrix([[0.1, 0.1, None, None], [9.0, 9.0, None, None]])
    stepper = dst.SRigL(layer, sgd(layer), every=1, t_end=100, drop_fraction=dst.Constant(0.5))
    update(stepper, [layer])
    assert row_lengths(layer) == [2, 2] and layer.values[:2].tolist() == [0.0, 0.0]


# ---- scope="global" ----


def test_global_drop_compares_all_layers():
    """By hand: the smallest of (0.1, 0.2, 9, 9) and (0.3, 0.15, 8, 7) are 0.1, 0.15, 0.2; the layers then keep 2 and 3 connections."""
    a, b = matrix([[0.1, 0.2, 9.0, 9.0] + [None] * 6]), matrix([[0.3, 0.15, 8.0, 7.0] + [None] * 6])
    layers = nn.ModuleList([a, b])
    stepper = dst.DST(layers, sgd(layers), drop="magnitude", grow="uniform", scope="global", every=1, drop_fraction=0.499, redistribute=lambda job: 1)
    record, _ = update(stepper, layers)  # k = 1 a layer, 2 in all
    assert record.layers == {"0": 1, "1": 1} and record.nnz == {"0": 4, "1": 4}
    assert a.values.abs().max() == 9 and 0.1 not in a.values.tolist() and 0.15 not in b.values.tolist()
    with torch.no_grad():
        a.values.copy_(torch.tensor([0.1, 0.2, 0.3, 0.4]))
        b.values.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    record, _ = update(stepper, layers)
    assert record.layers == {"0": 2, "1": 0} and record.grown_layers == {"0": 1, "1": 1} and record.nnz == {"0": 3, "1": 5}


def test_global_ties_go_to_the_earlier_layer_and_the_lower_slot():
    layers = nn.ModuleList([matrix([[1.0, 1.0, 1.0, None, None, None]]), matrix([[1.0, 1.0, 1.0, None, None, None]])])
    stepper = dst.DST(layers, sgd(layers), drop="magnitude", grow="uniform", scope="global", every=1, drop_fraction=0.67, grow_init=2.0)
    record, _ = update(stepper, layers)
    assert record.layers == {"0": 3, "1": 1}
    assert layers[1].values.tolist().count(1.0) == 2


def test_global_growth_goes_to_where_connections_are_left():
    """DSR (Mostafa and Wang 2019): in proportion to the connections a layer has left; nnz of all layers together stays."""
    layers = stack((30, 20), (20, 10), (10, 5))
    stepper = dst.DST(layers, sgd(layers), drop="magnitude", grow="gradient", scope="global", every=1, drop_fraction=0.3)
    total = sum(layer.nnz for layer in layers)
    for _ in range(10):
        before = [layer.nnz for layer in layers]
        record, _ = update(stepper, layers)
        left = [n - d for n, d in zip(before, record.layers.values())]
        quota = [record.dropped * n / sum(left) for n in left]
        assert all(abs(g - q) < 1 for g, q in zip(record.grown_layers.values(), quota))
        assert sum(layer.nnz for layer in layers) == total and record.grown == record.dropped
        with torch.no_grad():
            for layer in layers:
                layer.values.copy_(torch.randn(layer.nnz, dtype=torch.float64))


def test_scores_of_ones_own_may_be_negative():
    """Smallest first, as promised, not smallest in magnitude; NaN last."""
    layers = nn.ModuleList([matrix([[1.0, 2.0, 3.0, None, None, None]]), matrix([[4.0, 5.0, 6.0, None, None, None]])])

    class Oldest:
        def scores(self, layer, context):
            return torch.tensor([-3, 2, 0]) if layer is layers[0] else torch.tensor([math.nan, -2.0, 7.0])

        def __call__(self, layer, k, context):
            raise AssertionError("scope='global' asks for scores")

    stepper = dst.DST(layers, sgd(layers), drop=Oldest(), grow="uniform", scope="global", every=1, drop_fraction=0.4, grow_init=-1.0)
    record, _ = update(stepper, layers)
    assert record.layers == {"0": 1, "1": 1}
    assert sorted(v for layer in layers for v in layer.values.tolist() if v > 0) == [2, 3, 4, 6]


# ---- redistribution ----


def job(nnz, dropped, empty, weight):
    """As `share_growth` sees it."""
    one = scope.Job("", None, None, dropped)
    one.drop = torch.arange(dropped)
    one.context = type("Context", (), {"empty": empty})()
    one.weight = weight
    return one


@pytest.mark.parametrize(
    ("dropped", "empty", "weights", "grows"),
    [
        ((4, 4), (99, 99), (3.0, 1.0), [6, 2]),
        ((5, 2), (99, 99), (1.0, 1.0), [4, 3]),  # 3.5 each: the remainder goes to the first
        ((3, 3, 4), (99, 99, 99), (0.0, 1.0, 1e-9), [0, 10, 0]),
        ((4, 4), (0, 99), (1000.0, 1.0), [4, 4]),  # the first has room for the 4 it gave up and no more
        ((4, 4, 4), (1, 0, 99), (50.0, 50.0, 1.0), [5, 4, 3]),
        ((2, 2), (0, 99), (1.0, 0.0), [2, 2]),  # only a layer without a weight has room
        ((2, 0), (9, 9), (0.0, 0.0), [2, 0]),  # nobody has a weight: everybody grows what it lost
        ((0, 0), (9, 9), (1.0, 1.0), [0, 0]),
    ],
)
def test_shares(dropped, empty, weights, grows):
    jobs = [job(0, d, e, w) for d, e, w in zip(dropped, empty, weights)]
    scope.share_growth(jobs, lambda one: one.weight)
    assert [one.grows for one in jobs] == grows and sum(grows) == sum(dropped)


@pytest.mark.parametrize("redistribute", ["momentum", "gradient", "connections"])
def test_redistribution_by_name(redistribute):
    """Two equal layers; in the one momentum is 3 times, gradients 7 times those of the other. 12 are dropped, 6 of each."""
    layers = stack((20, 20), (20, 20), sparsity=0.95)
    optimizer = sgd(layers)
    stepper = dst.DST(layers, optimizer, drop="magnitude", grow="uniform", redistribute=redistribute, every=1, drop_fraction=0.3)
    backward(layers)
    optimizer.step()
    with torch.no_grad():
        for layer, momentum, gradient in zip(layers, (3.0, -1.0), (-7.0, 1.0)):
            optimizer.state[layer.values]["momentum_buffer"].fill_(momentum)
            layer.values.grad.fill_(gradient)
    record = stepper.step()
    assert record.layers == {"0": 6, "1": 6}
    wanted = {"momentum": {"0": 9, "1": 3}, "gradient": {"0": 11, "1": 1}, "connections": {"0": 6, "1": 6}}[redistribute]  # 10.5 : 1.5
    assert record.grown_layers == wanted and record.nnz == {name: 20 + wanted[name] - 6 for name in wanted}


def test_a_layer_fills_up_and_the_rest_goes_elsewhere():
    """All weight on a layer of 12 positions: it becomes full, never overfull, and nothing is lost on the way."""
    layers = stack((4, 3), (30, 30), sparsity=0.5)
    sizes = []
    stepper = dst.DST(
        layers, sgd(layers), drop="magnitude", grow="gradient", redistribute=lambda job: float(job.layer is layers[0]), every=1,
        drop_fraction=0.3, on_resize=lambda: sizes.append([layer.nnz for layer in layers]),
    )
    total = sum(layer.nnz for layer in layers)
    for _ in range(5):
        update(stepper, layers)
        assert sum(layer.nnz for layer in layers) == total
    assert layers[0].nnz == 12 and sizes[-1] == [12, total - 12]


def test_a_full_layer_gives_connections_up_where_another_has_all_the_weight():
    layers = stack((4, 3), (30, 30), sparsity=0.5)
    layers[0].rewire(grow=tuple(t[~layers[0].to_dense().weight.bool()] for t in torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")))
    assert layers[0].nnz == 12
    stepper = dst.DST(
        layers, sgd(layers), drop="magnitude", grow="gradient", redistribute=lambda job: float(job.layer is layers[1]), every=1, drop_fraction=0.5
    )
    update(stepper, layers)
    record = stepper.history[-1]
    assert record.layers["0"] == 6 and record.grown_layers == {"0": 0, "1": record.dropped} and layers[0].nnz == 6


# ---- bad input: one sentence, nothing changed ----


def refused(words, model, **options):
    """The update fails with these words, and nothing of model, optimiser, counters and history has changed."""
    optimizer = sgd(model)
    stepper = dst.DST(model, optimizer, **({"drop": "magnitude", "grow": "uniform", "every": 1} | options))
    layers = [m for m in model.modules() if isinstance(m, SparseLinear)]
    backward(layers)
    optimizer.step()
    before = snapshot(model, optimizer)
    text = fails(words, stepper.step)
    assert text.startswith("DST: ") and text.endswith(".")
    assert same(snapshot(model, optimizer), before) and stepper.updates == 0 and stepper.history == []


class Rule:
    """A drop and grow rule at once, whose answers are functions."""

    def __init__(self, **answers):
        for name, answer in answers.items():
            setattr(self, name, answer)

    def __call__(self, layer, k, *rest):
        return ops.select_smallest(layer.values, k) if len(rest) == 1 else ops.grow_uniform(layer.pattern, k, 1, rest[0])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda layer, context: layer.values[:-1], ["layer '0'", "scores are of shape (38,)", "one entry a connection"]),
        (lambda layer, context: layer.values[None], ["layer '0'", "scores are of shape (1, 39)"]),
        (lambda layer, context: None, ["scores are a NoneType", "expected a tensor"]),
    ],
)
def test_wrong_scores(answer, words):
    refused(words, stack((10, 13), (8, 8)), drop=Rule(scores=answer), scope="global")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda layer, rows, context: torch.zeros(len(rows), 3), ["layer '0'", "row_scores are of shape", "expected a tensor of shape"]),
        (lambda layer, rows, context: torch.zeros(13, 10)[0], ["row_scores are of shape (10,)"]),
        (lambda layer, rows, context: [[0.0] * 10] * len(rows), ["row_scores are a list"]),
        (lambda layer, rows, context: torch.full((len(rows), 10), math.nan), ["layer '0'", "the others are NaN"]),
    ],
)
def test_wrong_row_scores(answer, words):
    refused(words, stack((10, 13), (8, 8)), grow=Rule(row_scores=answer), scope="row", drop_fraction=0.2)


def test_negative_row_scores_are_scores():
    layer = matrix([[0.1, None, None, 9.0]])
    rule = Rule(row_scores=lambda layer, rows, context: torch.tensor([[-9, -5, -7, 0]]))
    stepper = dst.DST(layer, sgd(layer), drop="magnitude", grow=rule, scope="row", every=1, drop_fraction=0.5)
    update(stepper, [layer])
    assert mask_of(layer).int().tolist() == [[0, 1, 0, 1]]


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        (lambda layer, k, context: [0, 0], ["layer '0'", "slot 0 is named twice"]),
        (lambda layer, k, context: [layer.nnz], ["layer '0'", "slot 39 to drop is outside"]),
        (lambda layer, k, context: [-1], ["layer '0'", "slot -1 to drop is outside"]),
        (lambda layer, k, context: torch.arange(k + 1), ["it was asked for at most"]),
    ],
)
@pytest.mark.parametrize("options", [{"scope": "row"}, {"redistribute": "connections"}])
def test_wrong_slots(slots, words, options):
    refused(words, stack((10, 13), (8, 8)), drop=slots, **options)


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        (lambda layer, k, drop, context: (layer.pattern.rows[-k:], layer.pattern.cols[-k:]), ["is occupied"]),
        (lambda layer, k, drop, context: tuple(t.repeat(k) for t in ops.grow_uniform(layer.pattern, 1, 1)), ["named twice"]),
        (lambda layer, k, drop, context: ops.grow_uniform(layer.pattern, k - 1, 1), ["expected"]),
    ],
)
@pytest.mark.parametrize("options", [{"scope": "global"}, {"redistribute": "gradient"}])
def test_wrong_positions(positions, words, options):
    refused(["layer '0'", *words], stack((10, 13), (8, 8)), grow=positions, **options)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, None, "much", torch.ones(2)])
def test_wrong_weights_for_redistribution(weight):
    refused(["layer '0'", "weight for redistribution", "at least 0"], stack((10, 13), (8, 8)), redistribute=lambda job: weight)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scope": "column"}, ["scope='column' is unknown", "layer, row, global"]),
        ({"scope": "global", "drop": "signed"}, ["scope='global'", "drop_signed", "scores(layer, context)"]),
        ({"scope": "row", "redistribute": "gradient"}, ["redistribute", "scope='row'"]),
        ({"redistribute": "size"}, ["redistribute='size' is unknown", "connections, momentum, gradient"]),
        ({"redistribute": 3}, ["redistribute=3 is unknown"]),
        ({"state": "median"}, ["state='median' is unknown"]),
        ({"state": {"exp_avg": {"x": "zero"}}}, ["must name 'zero', 'mean' or a function for every key"]),
        ({"on_resize": "rebuild"}, ["on_resize='rebuild' must be a function"]),
    ],
)
def test_options(options, words):
    model = stack((10, 13))
    optimizer = sgd(model)
    assert fails(words, dst.DST, model, optimizer, **({"drop": "magnitude", "grow": "uniform"} | options)).startswith("DST: ")
    assert not optimizer._optimizer_step_post_hooks


def test_a_grow_rule_without_row_scores():
    refused(["layer '0'", "no row_scores", "scope='layer'"], stack((10, 13)), grow=lambda layer, k, drop, context: None, scope="row")


# ---- the example ----


@pytest.mark.parametrize("name", scope.SCOPES)
def test_the_example_of_scores_of_ones_own(name):
    path = Path(__file__).parents[2] / "examples" / "own_scores.py"
    spec = importlib.util.spec_from_file_location("own_scores", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    result = example.main(name, steps=100)
    assert result["updates"] == 3 and result["last loss"] < 0.6 * result["first loss"]
    assert sum(result["connections of the layers"]) == 640 + 205
    assert (result["connections of the layers"] == [640, 205]) == (name != "global")
    assert (result["connections of each neuron"] == [10]) == (name == "row")
