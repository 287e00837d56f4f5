"""Dynamic sparse training of replayed CUDA graphs: edits between replays, armed steps run eagerly or replayed from a second graph.

An eager twin takes the same steps. Its kernels are the graph's, so its topologies are the same, not only similar.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snack import dst
from snack.bench import training
from snack.cli.main import main
from snack.data import Dataset
from snack.nn import SparseLinear

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
EVERY, STEPS, ROWS = 4, 26, 32
METHODS = {
    "set": (dst.SET, {}),
    "rigl": (dst.RigL, {"t_end": 40}),
    "srigl": (dst.SRigL, {"t_end": 40}),
    "momentum": (dst.RigL, {"t_end": 40, "grow": dst.MomentumGrowth(window=2)}),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "sgd-fused": lambda p: torch.optim.SGD(p, torch.tensor(0.05, device=DEVICE), momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-3, capturable=True),
}


def build():
    torch.manual_seed(0)
    sizes = (200, 300, 300, 10)
    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (SparseLinear(a, b, sparsity=0.8, device=DEVICE), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(1)
    draws = [(torch.randn(ROWS, 200, generator=generator), torch.randint(10, (ROWS,), generator=generator)) for _ in range(count)]
    return [(x.to(DEVICE), y.to(DEVICE)) for x, y in draws]


class Training:
    """A model, its optimiser and stepper, and one step on static tensors x and y."""

    def __init__(self, method, make_optimizer, **options):
        self.model = build()
        self.optimizer = make_optimizer(self.model.parameters())
        self.x, self.y = (t.clone() for t in batches(1)[0])
        for _ in range(3):  # before there is a stepper: state of the optimiser, libraries
            self.on_a_side_stream(self.one_step)
        self.stepper = method(self.model, self.optimizer, every=EVERY, seed=5, **options)
        self.ordinary = self.armed = self.recording = None

    def on_a_side_stream(self, function):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream().wait_stream(side)

    def one_step(self):
        self.optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()

    def capture(self, both):
        self.ordinary = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.ordinary):
            self.one_step()
        if both:
            self.armed = torch.cuda.CUDAGraph()
            with self.stepper.recording() as self.recording, torch.cuda.graph(self.armed):
                self.one_step()

    def iterate(self, x, y):
        self.x.copy_(x)
        self.y.copy_(y)
        if self.ordinary is None or (self.stepper.armed and self.armed is None):
            self.one_step()
        elif self.stepper.armed:
            self.armed.replay()
            self.stepper.count_step(self.recording)
        else:
            self.ordinary.replay()
            self.stepper.count_step()
        return self.stepper.step()

    def layers(self):
        return [m for m in self.model if isinstance(m, SparseLinear)]

    def addresses(self):
        state = [t.data_ptr() for s in self.optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
        return state + [t.data_ptr() for m in self.layers() for t in (m.values, m.values.grad, m.index, m.tile_ptr)]


@pytest.mark.parametrize("both", [False, True], ids=["armed-eager", "armed-captured"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_replayed_training_equals_eager_training(method, optimizer, both):
    method, options = METHODS[method]
    ours, twin = (Training(method, OPTIMIZERS[optimizer], **options) for _ in range(2))
    assert all(a.pattern.equals(b.pattern) for a, b in zip(ours.layers(), twin.layers()))
    ours.capture(both)
    assert ours.stepper.steps == 0
    start, addresses = [m.pattern.to("cpu") for m in ours.layers()], ours.addresses()
    for x, y in batches():
        record, expected = ours.iterate(x, y), twin.iterate(x, y)
        assert (record is None) == (expected is None)
        if record is not None:
            assert record.step == expected.step and record.layers == expected.layers and record.dropped > 0
            assert all(a.pattern.equals(b.pattern) for a, b in zip(ours.layers(), twin.layers()))
    assert ours.stepper.updates == STEPS // EVERY and ours.addresses() == addresses
    assert not any(a.pattern.to("cpu").equals(b) for a, b in zip(ours.layers(), start))
    for a, b in zip(ours.model.parameters(), twin.model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_recorded_operands_are_those_of_the_replay():
    """After each replay of the armed graph, dY^T X of what was recorded is the gradient that the graph wrote."""
    training = Training(dst.RigL, OPTIMIZERS["sgd"], t_end=40)
    training.capture(both=True)
    for x, y in batches(3):
        training.x.copy_(x)
        training.y.copy_(y)
        training.armed.replay()
        for layer, snapshot in training.recording.snapshot().items():
            xs, dys = snapshot.operands()
            assert xs.shape == (ROWS, layer.in_features) and dys.shape == (ROWS, layer.out_features)
            rows, cols = (t.long() for t in layer.pattern.coordinates())
            torch.testing.assert_close((dys.T @ xs)[rows, cols], layer.values.grad, rtol=1e-3, atol=1e-5)


def test_an_armed_step_without_its_recording_is_told():
    training = Training(dst.RigL, OPTIMIZERS["sgd"], t_end=40)
    training.capture(both=False)
    for _ in range(EVERY):
        training.ordinary.replay()
        training.stepper.count_step()
    with pytest.warns(UserWarning, match="took no part .* dst.recording\\(\\)"):
        assert training.stepper.step().dropped == 0


def test_a_captured_scaled_step():
    """Autocast and a fixed loss scale inside of the graph: master weights and edits in float32."""
    training = Training(dst.RigL, OPTIMIZERS["adam"], t_end=40)

    def one_step():
        training.optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            y = training.model(training.x)
        F.cross_entropy(y.float(), training.y).backward()
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        training.optimizer.step()

    training.one_step = one_step
    training.on_a_side_stream(one_step)
    steps = training.stepper.steps
    training.capture(both=True)
    for x, y in batches():
        training.iterate(x, y)
    assert training.stepper.steps == steps + STEPS and training.stepper.updates >= STEPS // EVERY
    assert all(u.dropped for u in training.stepper.history)
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in training.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_on_a_card(mode):
    """Two variants, and the edits of eager training, with inductor's own CUDA graphs too."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    patterns = []
    for compiled in (False, True):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        stepper = dst.RigL(model, optimizer, every=EVERY, t_end=40, seed=5)

        def loss_of(x, y, model=model):
            return F.cross_entropy(model(x), y)

        if compiled:
            loss_of = torch.compile(loss_of, fullgraph=True, mode=mode)
        for number, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            with torch._dynamo.config.patch(error_on_recompile=compiled and number >= EVERY):
                loss_of(x, y).backward()
            optimizer.step()
            stepper.step()
        assert all(u.dropped for u in stepper.history) and stepper.updates == STEPS // EVERY
        patterns.append([m.pattern.to("cpu").coordinates() for m in model if isinstance(m, SparseLinear)])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    for (rows, cols), (other_rows, other_cols) in zip(*patterns):  # inductor rounds differently: a near tie may fall the other way
        ours, theirs = (set(zip(r.tolist(), c.tolist())) for r, c in ((rows, cols), (other_rows, other_cols)))
        assert len(ours & theirs) >= 0.98 * len(ours)
    torch._dynamo.reset()


# ---- snack train --graph ----


def blobs():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (960,), generator=generator)
    x = torch.randn(960, 64, generator=generator) + 2.0 * torch.randn(3, 64, generator=generator)[y]
    zero, one = torch.zeros(64), torch.ones(64)
    return Dataset("blobs", x[:768], y[:768], x[768:], y[768:], None, 3, zero, one)


@pytest.mark.parametrize("method", training.METHODS)
def test_training_by_replays_is_training_step_by_step(method):
    """Captured steps, eager armed ones and graphs captured anew after a change of nnz: the curves of the ordinary loop on the card."""
    config = training.Config(hidden=(128, 64), sparsity=0.8, method=method, every=8, batch_size=32, epochs=6, lr=0.02, device="cuda")
    ours, expected = (training.train(replace(config, graph=graph), blobs()) for graph in (True, False))
    for a, b in zip(ours.contenders, expected.contenders):
        assert a.name == b.name and a.steps == b.steps == 144 and a.updates == b.updates
        assert a.updates > 10 or method == "static" or a.kind == "dense"
        torch.testing.assert_close([y for _, y, _ in a.curve], [y for _, y, _ in b.curve], atol=0.06, rtol=0)
        torch.testing.assert_close([z for _, _, z in a.curve], [z for _, _, z in b.curve], atol=0.03, rtol=0.05)
        assert len(a.step_times) > 1 and min(a.step_times) > 0
    assert training.connections(ours.of("snack").model) == training.connections(expected.of("snack").model)


def test_replays_with_dropout_adam_and_several_methods():
    config = training.Config(
        hidden=(128, 64), sparsity=0.8, compare=("set", "rigl", "gmp"), every=8, batch_size=32, epochs=6, optimizer="adam", lr=3e-3,
        weight_decay=0.0, dropout=0.2, schedule="step", lr_steps=60, device="cuda", graph=True,
    )  # fmt: skip
    run = training.train(config, blobs())
    assert [c.name for c in run.contenders][:3] == ["dense", "dense_mask:set", "snack:set"] and len(run.contenders) == 7
    assert all(c.accuracy > 0.8 for c in run.contenders) and not run.interrupted
    again = training.train(config, blobs())
    for a, b in zip(run.contenders, again.contenders):  # dropout draws from the seed
        torch.testing.assert_close([z for _, _, z in a.curve], [z for _, _, z in b.curve], atol=1e-3, rtol=1e-2)


def test_squared_error_can_be_captured():
    config = training.Config(hidden=(64,), sparsity=0.8, loss="mse", batch_size=32, epochs=4, lr=0.3, device="cuda", graph=True)
    assert all(c.accuracy > 0.8 for c in training.train(config, blobs()).contenders)


def test_train_command_replays(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = blobs()
    np.savez("blobs.npz", x=data.x_train.numpy(), y=data.y_train.numpy())
    wanted = ["train", "--data", "blobs.npz", "--hidden", "64,32", "--epochs", "4", "--compare", "static,rigl", "--seeds", "2", "--no-figure"]
    assert main([*wanted, "--device", "cuda", "--graph", "--json", "r.json"]) == 0
    assert "mean ± standard error of 2 seeds" in capsys.readouterr().out
    records = json.loads((tmp_path / "r.json").read_text())["records"]
    assert len(records) == 10 and all(r["graph"] and r["accuracy"] > 0.7 for r in records)
