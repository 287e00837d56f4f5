"""Compiled steps: at most two variants, ordinary and armed, both made before the first update; the same edits as in eager training."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snack
from snack import dst
from snack.nn import SparseLinear
from snack.ops import recorded

EVERY, STEPS = 3, 13
METHODS = {
    "set": (dst.SET, {}),
    "rigl": (dst.RigL, {"t_end": 30}),
    "srigl": (dst.SRigL, {"t_end": 30}),
    "mest": (dst.MEST, {"t_end": 30}),
    "momentum": (dst.RigL, {"t_end": 30, "grow": dst.MomentumGrowth(window=2)}),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.set_num_threads(1)  # conftest puts it back
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def build(sizes=(20, 24, 24, 4)):
    torch.manual_seed(0)
    layers = [m for a, b in zip(sizes, sizes[1:]) for m in (SparseLinear(a, b, sparsity=0.7), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def variants():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 20, generator=generator), torch.randint(4, (8,), generator=generator)) for _ in range(count)]


def train(method, options, backend=None, seal=None, model=None):
    """(losses, updates, layers) after STEPS steps; `seal` is the step from which a recompilation is an error."""
    model = build() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    stepper = method(model, optimizer, every=EVERY, seed=2, **options)

    def loss_of(x, y):
        return F.cross_entropy(model(x), y)

    if backend:
        loss_of = torch.compile(loss_of, fullgraph=True, backend=backend)
    losses = []
    for number, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        with torch._dynamo.config.patch(error_on_recompile=seal is not None and number >= seal):
            loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        stepper.step()
        losses.append(loss.item())
    return losses, [u.layers for u in stepper.history], [m for m in model if isinstance(m, SparseLinear)]


@pytest.mark.parametrize("name", METHODS)
def test_two_variants_and_the_edits_of_eager_training(name):
    method, options = METHODS[name]
    losses, updates, layers = train(method, options, "aot_eager", seal=EVERY)
    is_recorded = name in ("rigl", "srigl", "momentum")
    assert variants() == 1 + is_recorded and not torch._dynamo.utils.counters["graph_break"]
    expected, expected_updates, expected_layers = train(method, options)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert updates == expected_updates and len(updates) == 4 and all(sum(u.values()) for u in updates)
    assert all(a.pattern.equals(b.pattern) for a, b in zip(layers, expected_layers))
    start = [m for m in build() if isinstance(m, SparseLinear)]
    assert not any(a.pattern.equals(b.pattern) for a, b in zip(layers, start))


@pytest.mark.slow
def test_two_variants_of_inductor():
    """Generated code reuses the memory of dead tensors, x and dY among them; what was recorded stays."""
    losses, updates, layers = train(dst.RigL, {"t_end": 30}, "inductor", seal=EVERY)
    assert variants() == 2
    expected, expected_updates, expected_layers = train(dst.RigL, {"t_end": 30})
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert updates == expected_updates and all(a.pattern.equals(b.pattern) for a, b in zip(layers, expected_layers))


def test_whole_step_in_one_compiled_function():
    """Forward, backward and optimiser in one function: PyTorch breaks it at backward() and in step(), and makes the optimiser's code anew once its
    state exists. Nothing is compiled for or after an update but the armed variant."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    stepper = dst.RigL(model, optimizer, every=EVERY, t_end=30)

    @torch.compile(backend="aot_eager")
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    counts = []
    for x, y in batches(10):
        step(x, y)
        stepper.step()
        counts.append(variants())
    assert stepper.steps == 10 and stepper.updates == 3 and all(u.dropped for u in stepper.history)
    assert counts[2] == counts[-1] and counts[2] == counts[1] + 1  # the armed variant, before the first update


def test_both_variants_can_be_made_before_training():
    """`recording()` runs the armed variant early, and leaves no trace in the training that follows."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    stepper = dst.RigL(model, optimizer, every=EVERY, t_end=30)
    loss_of = torch.compile(lambda x, y: F.cross_entropy(model(x), y), fullgraph=True, backend="aot_eager")
    x, y = batches(1)[0]
    loss_of(100 * x, y).backward()
    with stepper.recording():
        loss_of(100 * x, y).backward()
    optimizer.zero_grad()
    assert variants() == 2 and stepper.steps == 0 and not stepper.armed
    with torch.compiler.set_stance("fail_on_recompile"):
        for x, y in batches():
            optimizer.zero_grad()
            loss_of(x, y).backward()
            optimizer.step()
            stepper.step()
    layers = [m for m in model if isinstance(m, SparseLinear)]
    assert all(a.pattern.equals(b.pattern) for a, b in zip(layers, train(dst.RigL, {"t_end": 30})[2]))


def test_equal_layers_share_compiled_code():
    """Blocks compiled one by one: the layer is no constant of the code, so ten of them need two variants, too."""
    model = nn.Sequential(*(SparseLinear(16, 16, sparsity=0.5) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stepper = dst.RigL(model, optimizer, every=2, t_end=20)
    for block in model:
        block.compile(fullgraph=True, backend="aot_eager")
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
        stepper.step()
    assert all(len(u.layers) == 10 and min(u.layers.values()) > 0 for u in stepper.history)
    assert variants() <= 4  # the first block's input needs no gradient


def test_recorded_operands_are_those_of_the_gradient():
    """Shared layers, micro-batches, three dimensions: as many pairs as the gradient sums, and none of a cleared one or of autograd.grad."""
    torch.manual_seed(0)
    layer = SparseLinear(12, 12, sparsity=0.5, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    stepper = dst.RigL(layer, optimizer, every=1, t_end=9)
    twice = torch.compile(lambda x: layer(layer(x).tanh()), fullgraph=True, backend="aot_eager")
    recorder = stepper._armed[layer]
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    (twice(x) * 50).sum().backward()
    optimizer.zero_grad()
    leaf = x.clone().requires_grad_()
    torch.autograd.grad(twice(leaf).sum(), leaf)
    for part in (x, 2 * x):
        twice(part).square().sum().backward()
    xs, dys = recorder.operands()
    assert xs.shape == dys.shape == (24, 12)
    torch.testing.assert_close(snack.ops.sddmm(layer.pattern, dys, xs), layer.values.grad)


def test_autocast_in_compiled_armed_steps():
    layer = SparseLinear(12, 12, sparsity=0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    stepper = dst.RigL(layer, optimizer, every=1, t_end=9)
    f = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        y = f(torch.randn(4, 12))
    y.float().square().sum().backward()
    xs, dys = stepper._armed[layer].operands()
    assert y.dtype == xs.dtype == dys.dtype == torch.bfloat16 and layer.values.grad.dtype == torch.float32
    optimizer.step()
    assert stepper.step().dropped > 0


def test_the_armed_state_does_not_travel_with_copies():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = dst.RigL(model, optimizer, every=1, t_end=9)
    assert stepper.armed and model[0]._recorder
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[0]._recorder is None
        twin(torch.randn(4, 20)).sum().backward()
    assert stepper._armed[model[0]].operands() is None
    del stepper
    assert model[0]._recorder is None and not recorded._watchers


def test_a_layer_whose_index_moved_while_armed_is_recorded():
    """SNFS resizes layers while the next steps are recorded already; loading another sparsity does, too."""
    start = snack.sparsify(nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 4)), 0.5).state_dict()
    found = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = snack.sparsify(nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 4)), 0.7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        stepper = dst.SNFS(model, optimizer, every=2, t_end=9, grow=dst.MomentumGrowth(window=4))
        model.load_state_dict(start)
        forward = torch.compile(model, backend=backend) if backend else model
        recorded_steps = []
        for x, y in batches(5):
            optimizer.zero_grad()
            F.cross_entropy(forward(x), y).backward()
            optimizer.step()
            recorded_steps.append([step[model[0]].operands() is not None for step in stepper._recorded])
            stepper.step()
        assert all(all(step) for step in recorded_steps) and len(recorded_steps[-1]) == 4
        found.append([layer.pattern for layer in (model[0], model[2])])
    assert all(a.equals(b) for a, b in zip(*found))


def test_two_steppers_record_one_layer():
    """One that was replaced, but is still alive, takes nothing away from its successor."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (dst.RigL(model, optimizer, every=1, t_end=9) for _ in range(2))
    f = torch.compile(model, backend="aot_eager")
    for run in (model, f):
        run(torch.randn(4, 20)).sum().backward()
        optimizer.step()
        assert first.step().dropped == second.step().dropped > 0


# ---- captured steps, as far as a machine without a card can show them ----


class Replayed:
    """A step whose hooks run once, when it is "captured"; a "replay" computes the same into the same tensors, as a CUDA graph does."""

    def __init__(self, monkeypatch):
        torch.manual_seed(0)
        self.layer, self.x = SparseLinear(20, 24, sparsity=0.7), torch.zeros(8, 20)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.05)
        self.monkeypatch = monkeypatch

    def capture(self, stepper):
        monkeypatch = self.monkeypatch
        with stepper.recording() as recording, monkeypatch.context() as patch:
            self.layer(100 * torch.randn(8, 20)).square().sum().backward()  # a warm-up, which is not what the graph will compute
            patch.setattr("snack.dst.capture.is_capturing", lambda: True)
            patch.setattr("snack.dst.stepper.is_capturing", lambda: True)
            y = self.layer(self.x)
            y.register_hook(lambda dy: setattr(self, "dy", dy.detach()))
            y.square().sum().backward()
            self.optimizer.step()
        return recording

    @torch.no_grad()
    def replay(self, batch):
        self.x.copy_(batch)
        self.dy.copy_(2 * self.layer(self.x))
        self.layer.values.grad.copy_(snack.ops.sddmm(self.layer.pattern, self.dy, self.x))
        self.layer.bias.grad.copy_(self.dy.sum(0))
        for parameter in self.layer.parameters():
            parameter -= 0.05 * parameter.grad


@pytest.mark.parametrize("grow", ["gradient", dst.MomentumGrowth(window=2)], ids=["rigl", "momentum"])
def test_captured_armed_steps_edit_as_eager_ones(monkeypatch, grow):
    captured, eager = Replayed(monkeypatch), Replayed(monkeypatch)
    options = {"every": EVERY, "t_end": 30, "grow": grow}
    ours, theirs = (dst.RigL(side.layer, side.optimizer, **options) for side in (captured, eager))
    start = {key: tensor.clone() for key, tensor in eager.layer.state_dict().items()}
    recording = captured.capture(ours)
    captured.layer.load_state_dict(start)  # what the warm-up and the capture did on a CPU
    assert ours.steps == 0
    for x, _ in batches():
        captured.replay(x)
        ours.count_step(recording if ours.armed else None)
        eager.optimizer.zero_grad()
        eager.layer(x).square().sum().backward()
        eager.optimizer.step()
        record, expected = ours.step(), theirs.step()
        assert (record is None) == (expected is None) and (record is None or record.layers == expected.layers)
        assert captured.layer.pattern.equals(eager.layer.pattern)
    assert ours.updates == 4 and all(u.dropped for u in ours.history)
    torch.testing.assert_close(captured.layer.values, eager.layer.values)


def test_recording_of_a_method_that_looks_at_no_gradient_is_empty():
    model = build()
    stepper = dst.SET(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    with stepper.recording() as recording:
        assert model[0]._recorder is None
    assert recording.snapshot() == {}
