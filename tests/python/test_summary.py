"""summary and param_groups: every byte that exists is counted once, nothing is estimated; connections decay, biases and norms do not."""

import json

import pytest
import torch
from torch import nn

import snack
from snack.errors import SnackError
from snack.nn import SparseLinear, param_groups, sparsify, summary


def model():
    return nn.Sequential(SparseLinear(70, 33, sparsity=0.8), nn.BatchNorm1d(33), nn.ReLU(), nn.Linear(33, 5))


def step(m, optimizer):
    m(torch.randn(4, 70)).square().sum().backward()
    optimizer.step()


def by_name(m, *arguments):
    return {layer.name: layer for layer in summary(m, *arguments).layers}


def test_rows():
    m = model()
    rows = by_name(m)
    assert list(rows) == ["0", "1", "3"]
    sparse, norm, dense = rows.values()
    assert (sparse.kind, sparse.shape, sparse.nnz, sparse.density) == ("SparseLinear", (33, 70), 462, 0.2)
    assert sparse.value_bytes == 4 * (462 + 33) and sparse.index_bytes == m[0].pattern.nbytes
    assert (dense.kind, dense.shape, dense.nnz, dense.density) == ("Linear", (5, 33), 165, 1.0)
    assert dense.value_bytes == 4 * 170 and dense.index_bytes == 0 and dense.dead_rows is None
    assert norm.shape == (33,) and norm.value_bytes == 4 * 66 and norm.index_bytes == 4 * 66 + 8  # running mean, variance, count
    assert all(layer.gradient_bytes is None and layer.optimizer_bytes is None for layer in rows.values())


def test_gradients_and_optimiser_state_are_what_exists():
    m = model()
    optimizer = torch.optim.Adam(m.parameters())
    assert by_name(m, optimizer)["0"].optimizer_bytes == 0
    step(m, optimizer)
    rows = by_name(m, optimizer)
    for layer in rows.values():
        assert layer.gradient_bytes == layer.value_bytes
    assert rows["0"].optimizer_bytes == 2 * 4 * (462 + 33) + 2 * 4  # two moments, and a step counter a parameter
    sgd = torch.optim.SGD(m.parameters(), 0.1)
    step(m, sgd)
    assert by_name(m, sgd)["0"].optimizer_bytes == 0
    optimizer.zero_grad()
    assert by_name(m)["0"].gradient_bytes is None


def test_totals_are_the_memory_of_training():
    m = model()
    optimizer = torch.optim.Adam(m.parameters())
    step(m, optimizer)
    s = summary(m, optimizer)
    everything = [*m.parameters(), *m.buffers(), *(p.grad for p in m.parameters())]
    everything += [t for state in optimizer.state.values() for t in state.values()]
    assert s.total_bytes == sum(t.nbytes for t in everything)
    assert s.total("nnz") == 462 + 33 + 165


def test_training_memory_against_dense():
    """The claim: at 90 %, fp32, with Adam, everything counted, at most 13 % of the dense layer's."""

    def bytes_of(m):
        optimizer = torch.optim.Adam(m.parameters())
        m(torch.randn(1, 2048)).sum().backward()
        optimizer.step()
        return summary(m, optimizer).total_bytes

    assert bytes_of(SparseLinear(2048, 2048, sparsity=0.9)) <= 0.13 * bytes_of(nn.Linear(2048, 2048))


def test_dead_rows_and_columns():
    layer = SparseLinear.from_coo([0, 0, 4], [1, 2, 1], [1.0, 2.0, 0.0], (6, 5))
    row = by_name(layer)[""]
    assert (row.dead_rows, row.dead_cols) == (4, 3)  # a connection of value 0 is alive
    wide = SparseLinear.from_coo([0, 3, 3], [0, 7, 9999], [1.0, 2.0, 3.0], (5, 10_000))
    row = by_name(wide)[""]
    assert (row.dead_rows, row.dead_cols) == (3, 9997)
    assert by_name(SparseLinear(70, 33, sparsity=0.0))[""].dead_rows == 0


def test_shared_parameters_count_once():
    layer = nn.Linear(8, 8, bias=False)
    tied = nn.Embedding(8, 8)
    tied.weight = layer.weight
    m = nn.ModuleDict({"a": layer, "b": layer, "c": tied})
    assert summary(m).total("value_bytes") == 256 and list(by_name(m)) == ["a"]


def test_printing_and_json():
    m = sparsify(nn.Sequential(nn.Linear(784, 300), nn.Linear(300, 10)), 0.9)
    s = summary(m, torch.optim.SGD(m.parameters(), 0.1))
    text = str(s)
    assert "300 x 784" in text and "23,520" in text and "SparseLinear" in text and "in all" in text
    table = s.as_dict()
    assert json.loads(json.dumps(table)) == table and table["total"]["nnz"] == 23520 + 300
    assert (
        table["layers"][0]["shape"] == [300, 784]
        and "gradient_bytes" not in table["layers"][0]
        and table["layers"][0]["optimizer_bytes"] == 0
    )
    assert "gradients" in str(summary(m)) and "optimizer_bytes" not in summary(m).as_dict()["total"]


def test_meta_and_empty_models():
    assert by_name(SparseLinear(70, 33, sparsity=0.8, device="meta"))[""].dead_rows is None
    assert str(summary(nn.ReLU())) and summary(nn.ReLU()).total_bytes == 0


# ---- param_groups ----


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 70)
        self.sparse = SparseLinear(70, 33, sparsity=0.8)
        self.norm = nn.LayerNorm([3, 33])
        self.batch = nn.BatchNorm1d(33)
        self.dense = nn.Linear(33, 5)
        self.twice = self.dense
        self.scale = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(5, 5), requires_grad=False)


def names(m, group):
    lookup = {id(p): name for name, p in m.named_parameters()}
    return {lookup[id(p)] for p in group["params"]}


def test_connections_decay():
    m = Everything()
    decayed, rest = param_groups(m, 0.05)
    assert names(m, decayed) == {"embedding.weight", "sparse.values", "dense.weight"} and decayed["weight_decay"] == 0.05
    assert (
        names(m, rest) == {"sparse.bias", "norm.weight", "norm.bias", "batch.weight", "batch.bias", "dense.bias", "scale"}
        and rest["weight_decay"] == 0.0
    )
    assert len(decayed["params"]) + len(rest["params"]) == sum(p.requires_grad for p in m.parameters())


def test_no_decay_by_glob():
    m = Everything()
    assert names(m, param_groups(m, 0.05, no_decay="embedding.*")[0]) == {"sparse.values", "dense.weight"}
    assert names(m, param_groups(m, 0.05, no_decay=["embedding.*", "twice.weight"])[0]) == {"sparse.values"}


def test_the_optimiser_decays_them():
    m = SparseLinear(70, 33, sparsity=0.8)
    with torch.no_grad():
        m.values.fill_(1.0)
        m.bias.fill_(1.0)
    optimizer = torch.optim.SGD(param_groups(m, 0.5), lr=0.1)
    for p in m.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.allclose(m.values, torch.tensor(0.95)) and torch.equal(m.bias, torch.ones(33))


@pytest.mark.parametrize("decay", [-0.1, float("nan"), float("inf"), "much", None])
def test_bad_weight_decay(decay):
    with pytest.raises(SnackError, match="weight_decay"):
        param_groups(Everything(), decay)


def test_unmatched_glob():
    with pytest.raises(SnackError, match="'head.*'.*embedding.weight"):
        param_groups(Everything(), 0.1, no_decay="head.*")


def test_public_names():
    assert snack.nn.summary is summary and snack.nn.param_groups is param_groups
