"""An update as one operation in place gives what lists of slots and positions give, bit for bit; the processor has both."""

import warnings

import pytest
import torch
from torch import nn

import snack
from snack.dst import history
from snack.dst import stepper as stepping
from snack.nn import SparseLinear

METHODS = {
    "SET": lambda m, o: snack.SET(m, o, every=3),
    "SET, magnitude": lambda m, o: snack.SET(m, o, every=3, drop="magnitude", drop_fraction=1.0),
    "RigL": lambda m, o: snack.RigL(m, o, every=3, t_end=40, state="mean", grow_init=0.125),
    "signed, gradient": lambda m, o: snack.DST(m, o, drop="signed", grow="gradient", every=3, state={"exp_avg_sq": "mean"}),
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2, history_size=2),
    "fused": lambda p: snack.optim.SGD(p, 0.05, momentum=0.9, fused_grad=True),
}


def train(method, optimizer, in_place, monkeypatch, dtype=torch.float32):
    monkeypatch.setattr(stepping, "_is_on_card", lambda layer: in_place)
    torch.manual_seed(0)
    model = nn.Sequential(SparseLinear(1100, 24, sparsity=0.9), nn.ReLU(), SparseLinear(24, 40, sparsity=0.6), nn.ReLU(), nn.Linear(40, 3)).to(dtype)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    dst = METHODS[method](model, optimizer)
    for _ in range(12):
        x = torch.randn(4, 1100, dtype=dtype)

        def closure(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        dst.step()
    return model, optimizer, dst


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_in_place_is_as_by_lists(method, optimizer, monkeypatch):
    lists = train(method, optimizer, False, monkeypatch)
    in_place = train(method, optimizer, True, monkeypatch)
    assert in_place[2].updates == 4 and in_place[2].history[0].dropped > 0
    assert [u.as_dict() | {"seconds": 0} for u in lists[2].history] == [u.as_dict() | {"seconds": 0} for u in in_place[2].history]
    for ours, theirs in zip(in_place[0].state_dict().values(), lists[0].state_dict().values()):
        assert torch.equal(ours, theirs)
    for a, b in zip(in_place[1].state.values(), lists[1].state.values()):
        assert all(torch.equal(x, b[key]) if isinstance(x, torch.Tensor) else key in b for key, x in a.items())


def test_the_stepper_takes_the_operation_in_place(monkeypatch):
    calls = []
    original = SparseLinear.exchange
    monkeypatch.setattr(SparseLinear, "exchange", lambda layer, *args, **kwargs: calls.append(args) or original(layer, *args, **kwargs))
    train("RigL", "SGD", True, monkeypatch)
    assert calls == [("magnitude", "gradient")] * 8


def test_what_does_not_fit_is_refused_with_nothing_changed():
    layer = SparseLinear(30, 20, sparsity=0.5)
    layer.values.square().sum().backward()
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    layer.values.grad = layer.values.grad.repeat_interleave(2)[::2]
    with pytest.raises(snack.SnackError, match="one is not contiguous; use rewire"):
        layer.exchange(k=3)
    layer.values.grad = None
    wrong = (({"k": 301}, "k"), ({"k": 3, "drop": "largest"}, "drop rule 'largest' is unknown"), ({"k": 3, "state": "max"}, "state='max' is unknown"))
    for options, sentence in wrong:
        with pytest.raises(snack.SnackError, match=sentence):
            layer.exchange(**options)
    assert all(torch.equal(tensor, before[key]) for key, tensor in layer.state_dict().items())


def test_a_backward_pass_prepared_before_an_exchange_fails():
    layer = SparseLinear(30, 20, sparsity=0.5)
    loss = layer(torch.randn(4, 30)).sum()
    layer.exchange(k=3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_numbers_of_old_updates_are_fetched_though_nobody_looks(monkeypatch):
    """Those of the last `MOST_PENDING` updates at most stay where the layers are."""
    monkeypatch.setattr(stepping, "_is_on_card", lambda layer: True)
    layer = SparseLinear(40, 30, sparsity=0.8)
    optimizer = torch.optim.SGD(layer.parameters(), 0.01)
    dst = snack.SET(layer, optimizer, every=1)
    pending = []
    for _ in range(2 * history.MOST_PENDING + 1):
        layer(torch.randn(2, 40)).square().sum().backward()
        optimizer.step()
        dst.step()
        pending.append(sum(update.is_pending for update in dst.history))
    assert max(pending) == history.MOST_PENDING - 1 and pending[history.MOST_PENDING - 1] == 0 and pending[-1] == 1
    assert all(0 < update.dropped == update.grown <= 0.3 * layer.nnz for update in dst.history) and not dst.history[-1].is_pending


def test_a_diverged_run_on_a_card_is_told_when_numbers_are_fetched(monkeypatch):
    monkeypatch.setattr(stepping, "_is_on_card", lambda layer: True)
    layer = SparseLinear(40, 30, sparsity=0.8)
    optimizer = torch.optim.SGD(layer.parameters(), torch.nan)
    dst = snack.SET(layer, optimizer, every=1)

    def run(steps):
        for _ in range(steps):
            layer(torch.randn(2, 40)).square().sum().backward()
            optimizer.step()
            dst.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(history.MOST_PENDING - 1)
    with pytest.warns(UserWarning, match=f"SET: after the update at step {history.MOST_PENDING} layer '' has weights that are NaN") as said:
        run(history.MOST_PENDING + 1)
    assert len(said) == 1
