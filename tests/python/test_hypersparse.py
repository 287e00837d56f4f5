"""Layers whose dense matrix could not exist: nothing may cost O(out * in), neither memory nor time, and every number is still right."""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import snack
from snack import ops
from snack.nn import SparseLinear, load, read_header, save, summary

MAX = 2**31 - 1


def index_bound(layer):
    """The promise: bytes of all indices, for both directions."""
    return 12 * layer.nnz + 8 * (layer.out_features + layer.in_features)


def product(rows, cols, values, x, out):
    """y (batch, out) = x W^T in float64 by scatter-add: O(nnz) a sample."""
    y = torch.zeros(x.shape[0], out, dtype=torch.float64)
    for b in range(x.shape[0]):
        y[b].index_add_(0, rows.long(), values.double() * x[b, cols.long()].double())
    return y


def check_step(layer, optimizer, batch):
    """One training step whose output and gradients are checked against scatter-adds."""
    rows, cols, values = layer.to_coo()
    x = torch.randn(batch, layer.in_features, requires_grad=True)
    y = layer(x)
    target = torch.randn_like(y)
    torch.testing.assert_close(
        y.detach().double(), product(rows, cols, values, x.detach(), layer.out_features) + layer.bias.detach(), rtol=1e-4, atol=1e-4
    )
    optimizer.zero_grad()
    (y * target).sum().backward()
    expected = sum(target[b, rows.long()].double() * x.detach()[b, cols.long()].double() for b in range(batch))
    torch.testing.assert_close(layer.values.grad.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), product(cols, rows, values, target, layer.in_features), rtol=1e-4, atol=1e-4)
    optimizer.step()


def set_edit(layer, optimizer, fraction, key):
    """An edit as SET makes it (Mocanu et al. 2018): the weakest positive and negative connections go, as many random ones come."""
    values = layer.values.detach()
    weakest = [
        ops.select_smallest(values, int(fraction * int(mask.sum())), sign)
        for sign, mask in (("positive", values >= 0), ("negative", values < 0))
    ]
    drop = torch.cat(weakest)
    grow = ops.grow_uniform(layer.pattern, len(drop), key, drop)
    before, nnz = values.clone(), layer.nnz
    slots = layer.rewire(drop, grow, optimizer=optimizer)
    assert layer.nnz == nnz and len(slots.grown) == len(drop)
    kept = slots.source >= 0
    assert torch.equal(layer.values.detach()[kept], before[slots.source[kept]]) and not bool(layer.values.detach()[~kept].any())
    momentum = optimizer.state[layer.values]["momentum_buffer"]
    assert not bool(momentum[~kept].any()) and bool(momentum[kept].any())
    rows, cols = layer.pattern.coordinates()
    distinct = (rows.long() * layer.in_features + cols.long()).unique().numel()
    assert distinct == nnz, "a position is listed twice"


def life(extent, nnz, batch, folder):
    """Construct, train a step, edit, train on, save, load, summarise."""
    layer = SparseLinear(extent, extent, sparsity=1 - nnz / extent**2)
    assert abs(layer.nnz - nnz) <= 1 and layer.pattern.nbytes <= index_bound(layer)
    optimizer = torch.optim.SGD(layer.parameters(), 0.01, momentum=0.9)
    check_step(layer, optimizer, batch)
    set_edit(layer, optimizer, 0.3, ops.random_key(0, 1))
    check_step(layer, optimizer, batch)
    path = Path(folder) / "layer.safetensors"
    save(layer, path)
    assert path.stat().st_size <= 12 * layer.nnz + 4 * extent + 4096
    header = read_header(path)["layers"][0]
    assert header["shape"] == (extent, extent) and header["nnz"] == layer.nnz
    other = load(path, SparseLinear(extent, extent, sparsity=1 - nnz / 2 / extent**2))
    assert other.pattern.equals(layer.pattern) and torch.equal(other.values, layer.values) and torch.equal(other.bias, layer.bias)
    assert summary(layer, optimizer).total("nnz") == layer.nnz


@pytest.mark.slow
def test_a_million_squared(tmp_path):
    """10^12 positions, 10 M connections."""
    life(1_000_000, 10_000_000, 1, tmp_path)


@pytest.mark.slow
def test_under_a_4_gb_address_limit():
    """200,000 squared with 1 M connections does all of it where the dense matrix (160 GB) is out of the question.

    The limit counts everything mapped, PyTorch's libraries and thread stacks too.
    """
    code = "import test_hypersparse; test_hypersparse.limited()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def limited():
    """Runs in a process of its own."""
    resource.setrlimit(resource.RLIMIT_AS, (4 * 10**9, 4 * 10**9))
    with pytest.raises((RuntimeError, MemoryError)):
        torch.empty(200_000, 200_000)  # the limit is real
    with tempfile.TemporaryDirectory() as folder:
        life(200_000, 1_000_000, 4, folder)
    by_gradient(200_000, 1_000_000, 4)


def by_gradient(extent, nnz, batch):
    """RigL grows the best of sampled candidates, and says what exact growth would cost."""
    layer = SparseLinear(extent, extent, sparsity=1 - nnz / extent**2)
    optimizer = torch.optim.Adam(layer.parameters())
    dst = snack.RigL(layer, optimizer, every=1, t_end=2)
    before = layer.pattern.clone()
    layer(torch.randn(batch, extent)).square().mean().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=r"Exact growth would compute.*multiply-adds"):
        update = dst.step()
    moved = int(update.fraction * nnz)
    assert update.dropped == moved > 0 and layer.nnz == nnz and not layer.pattern.equals(before)


@pytest.mark.parametrize("shape", [(MAX, 3), (3, MAX)])
def test_the_longest_shapes(shape):
    """Construction, edits and state at the limit of a 31-bit extent; products have no batch here, as one sample is 8 GB."""
    out, in_ = shape
    pattern = snack.Pattern.random(shape, 100_000, seed=1)
    rows, cols = pattern.coordinates()
    positions = rows.long() * in_ + cols.long()
    assert positions.unique().numel() == 100_000 and int(rows.min()) >= 0 and int(cols.min()) >= 0
    assert int(rows.max()) < out and int(cols.max()) < in_
    assert int((rows if out > in_ else cols).max()) > MAX * 0.999  # the far end is reached
    layer = SparseLinear.from_coo(rows, cols, torch.randn(100_000), shape)
    assert layer.pattern.equals(pattern) and layer.pattern.nbytes <= index_bound(layer)
    layer.rewire(torch.arange(30_000), ops.grow_uniform(pattern, 30_000, 7))
    assert layer.nnz == 100_000
    twin = SparseLinear.from_coo([], [], torch.empty(0), shape)
    twin.load_state_dict(layer.state_dict())
    assert twin.pattern.equals(layer.pattern) and torch.equal(twin.values, layer.values)
    assert layer(torch.empty(0, in_)).shape == (0, out)
    row = summary(layer).layers[0]
    assert row.dead_rows == out - layer.pattern.rows.unique().numel() and row.dead_cols == in_ - layer.pattern.cols.unique().numel()
    corner = SparseLinear.from_coo([out - 1, 0], [in_ - 1, 0], [1.0, 2.0], shape)
    assert corner.to_coo()[0].tolist() == [0, out - 1] and corner.to_coo()[1].tolist() == [0, in_ - 1]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(20_000_000, 3), (3, 20_000_000)])
def test_products_of_long_shapes(shape):
    out, in_ = shape
    pattern = snack.Pattern.random(shape, 50_000, seed=1)
    rows, cols = pattern.coordinates()
    values, x, dy = torch.randn(50_000), torch.randn(1, in_), torch.randn(1, out)
    torch.testing.assert_close(ops.spmm(pattern, values, x).double(), product(rows, cols, values, x, out), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ops.spmm_t(pattern, values, dy).double(), product(cols, rows, values, dy, in_), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ops.sddmm(pattern, dy, x), dy[0, rows.long()] * x[0, cols.long()])
