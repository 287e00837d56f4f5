"""SparseLinear.rewire: everything moves with its connection, memory stays where it is, and an error changes nothing."""

import itertools

import pytest
import torch
from torch import nn

import snack
from checks import fails, layer, real, same, snapshot

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.mark.parametrize("in_features, out_features, sparsity", [(70, 33, 0.8), (2100, 130, 0.9), (2100, 1300, 0.9999)])
def test_rewire_moves_everything_with_its_connection(in_features, out_features, sparsity):
    """Values, gradient and Adam's moments tagged with the coordinate still sit at it; grown ones start as asked."""
    a = layer(in_features, out_features, sparsity=sparsity, dtype=real())  # one tile, many, another packing
    nnz = a.nnz
    optimizer = torch.optim.Adam(a.parameters())
    a(torch.randn(2, in_features, dtype=real())).sum().backward()
    optimizer.step()

    def tags():
        return (a.pattern.rows * 10_000 + a.pattern.cols + 1).to(real())  # below 2^24: exact in float32 too

    state = optimizer.state[a.values]
    with torch.no_grad():
        for tensor in (a.values, a.values.grad, state["exp_avg"], state["exp_avg_sq"]):
            tensor.copy_(tags())
    addresses = [t.data_ptr() for t in (a.values, a.values.grad, state["exp_avg"], a.index, a.tile_ptr)]
    step = float(state["step"])
    drop = torch.arange(0, 100, 7)
    rows, cols = snack.ops.grow_uniform(a.pattern, len(drop), 11)
    old_rows, old_cols = a.pattern.rows, a.pattern.cols
    slots = a.rewire(drop, (rows, cols), torch.arange(len(drop)) + 0.5, optimizer)
    assert a.nnz == nnz and [t.data_ptr() for t in (a.values, a.values.grad, state["exp_avg"], a.index, a.tile_ptr)] == addresses
    is_grown = torch.zeros(nnz, dtype=torch.bool)
    is_grown[slots.grown] = True
    for tensor in (a.values.detach(), a.values.grad, state["exp_avg"], state["exp_avg_sq"]):
        assert torch.equal(tensor[~is_grown], tags()[~is_grown])
    assert not bool(state["exp_avg"][is_grown].any()) and not bool(a.values.grad[is_grown].any()) and float(state["step"]) == step
    at = {(int(r), int(c)): i + 0.5 for i, (r, c) in enumerate(zip(rows, cols))}
    new = list(zip(a.pattern.rows[slots.grown].tolist(), a.pattern.cols[slots.grown].tolist()))
    assert set(new) == set(at) and a.values.detach()[slots.grown].tolist() == [at[p] for p in new]
    # The slot map in both directions.
    survivors = slots.old_to_new >= 0
    assert torch.equal(survivors.logical_not().nonzero().flatten(), drop)
    assert torch.equal(a.pattern.rows[slots.old_to_new[survivors]], old_rows[survivors]) and torch.equal(
        a.pattern.cols[slots.old_to_new[survivors]], old_cols[survivors]
    )
    assert torch.equal(slots.apply(torch.arange(float(nnz)), -1.0)[slots.grown], torch.full((len(drop),), -1.0))


def test_rewire_to_another_nnz():
    a = layer()
    optimizer = torch.optim.SGD(a.parameters(), 0.1, momentum=0.9)
    a(torch.randn(2, 70)).sum().backward()
    optimizer.step()
    parameter, kept = a.values, a.values.detach().clone()
    a.rewire(drop=[0, 1, 2], optimizer=optimizer)
    assert a.values is parameter and a.nnz == 459 and torch.equal(a.values, kept[3:])
    assert a.values.grad.shape == optimizer.state[parameter]["momentum_buffer"].shape == (459,)
    a.rewire(grow=snack.ops.grow_uniform(a.pattern, 10, 1), values=0.25, optimizer=optimizer)
    assert a.nnz == 469 and int((a.values == 0.25).sum()) == 10
    a(torch.randn(2, 70)).sum().backward()
    optimizer.step()
    assert a.rewire().source.tolist() == list(range(469))


def test_rewire_may_grow_what_it_drops():
    a = layer()
    row, col = int(a.pattern.rows[5]), int(a.pattern.cols[5])
    with torch.no_grad():
        a.values[5] = 7.0
    slots = a.rewire(drop=[5], grow=([row], [col]))
    assert a.values[5] == 0.0 and slots.grown.tolist() == [5] and slots.source[5] == -1


def test_rewire_is_atomic():
    a = layer()
    optimizer = torch.optim.Adam(a.parameters())
    a(torch.randn(2, 70)).sum().backward()
    optimizer.step()
    before = snapshot(a, optimizer)
    row, col = int(a.pattern.rows[0]), int(a.pattern.cols[0])
    free = [t.tolist() for t in snack.ops.grow_uniform(a.pattern, 2, 1)]
    stale = torch.optim.Adam([nn.Parameter(torch.ones(3))])
    fails(["462"], a.rewire, drop=[462])
    fails(["-1"], a.rewire, drop=[-1])
    fails(["twice"], a.rewire, drop=[3, 3])
    fails([f"({row}, {col})"], a.rewire, drop=[1], grow=([row], [col]))
    fails(["33"], a.rewire, grow=([33], [0]))
    fails(["70"], a.rewire, grow=([0], [70]))
    fails(["twice"], a.rewire, grow=([free[0][0]] * 2, [free[1][0]] * 2))
    fails(["2", "1"], a.rewire, grow=(free[0], free[1][:1]))
    fails(["(3,)", "2 grown"], a.rewire, drop=[0, 1], grow=free, values=torch.ones(3))
    fails(["optimiser", "sparsify"], a.rewire, drop=[0, 1], grow=free, optimizer=stale)
    fails(["integers"], a.rewire, drop=[0.5])
    assert same(snapshot(a, optimizer), before)


@pytest.mark.parametrize("call", range(1, 5))
def test_out_of_memory_leaves_the_layer_as_it_was(monkeypatch, call):
    """Whichever of the carried tensors (values, gradient, two moments) there is no memory for."""
    a = layer()
    optimizer = torch.optim.Adam(a.parameters())
    a(torch.randn(2, 70)).sum().backward()
    optimizer.step()
    before, count = snapshot(a, optimizer), itertools.count(1)
    apply = snack.nn.SlotMap.apply

    def failing(self, *args):
        if next(count) == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nmore")
        return apply(self, *args)

    grow = snack.ops.grow_uniform(a.pattern, 3, 1)
    with monkeypatch.context() as patch:
        patch.setattr(snack.nn.SlotMap, "apply", failing)
        fails(["rewire", "out of memory", "as they were"], a.rewire, [0, 1, 2], grow, optimizer=optimizer)
        assert next(count) == call + 1
    assert same(snapshot(a, optimizer), before)
    a.rewire([0, 1, 2], grow, optimizer=optimizer)
    assert not same(snapshot(a, optimizer), before)


def test_rewire_outside_of_autograd():
    """Allowed between forward and backward of other tensors, with gradients enabled, on frozen values."""
    a = layer()
    a.values.requires_grad_(False)
    a.rewire(drop=[0], grow=snack.ops.grow_uniform(a.pattern, 1, 1))
    assert a.nnz == 462 and not a.values.requires_grad


def test_backward_after_resize_while_the_last_loss_is_alive():
    """The node that adds gradients to `values` lives as long as an older loss, and knew their old length."""
    sparse = layer()
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(4, sparse.in_features)
    counted = []
    stale = sparse(x).sum()
    sparse.values.register_post_accumulate_grad_hook(lambda values: counted.append(values.grad.numel()))
    losses = []
    for dropped in (10, 5, 0):
        losses.append(sparse(x).square().sum())
        losses[-1].backward()
        optimizer.step()
        sparse.rewire(torch.arange(dropped), optimizer=optimizer)
    smaller = layer(sparsity=0.9)
    sparse.load_state_dict(smaller.state_dict())
    optimizer.zero_grad()
    sparse(x).square().sum().backward()
    smaller(x).square().sum().backward()
    assert torch.equal(sparse.values.grad, smaller.values.grad)
    assert len(counted) == 4 and counted[0] - counted[1] == 10 and counted[-1] == smaller.nnz
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
