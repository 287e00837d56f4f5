"""Dynamic sparse training beside what else a training loop does: loss scaling, autocast, clipping, averaged weights, double backward."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import snack
from snack import dst
from snack.dst import capture, processes
from snack.errors import SnackError
from snack.nn import SparseLinear


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # conftest puts it back


def build(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(SparseLinear(20, 24, sparsity=0.7, dtype=dtype), nn.ReLU(), SparseLinear(24, 4, sparsity=0.5, dtype=dtype))


def batches(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 20, generator=generator).to(dtype), torch.randint(4, (16,), generator=generator)) for _ in range(count)]


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, SparseLinear)]


def positions(model):
    return [torch.stack(layer.pattern.coordinates()).clone() for layer in layers_of(model)]


def as_matrix(layer):
    return snack.formats.to_dense(layer.pattern, layer.values.detach())


METHODS = [(dst.SET, {}), (dst.RigL, {"t_end": 100})]
OPTIMIZERS = [lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), lambda p: torch.optim.Adam(p, 1e-3, fused=True)]


# ---- GradScaler ----


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["sgd", "adam-fused"])
@pytest.mark.parametrize(("method", "options"), METHODS, ids=["set", "rigl"])
def test_steps_that_the_scaler_skips_neither_count_nor_edit(method, options, make):
    """Infinite gradients at the steps before an update and elsewhere: the run is the one without these batches."""

    def run(with_bad_batches):
        model = build()
        optimizer = make(model.parameters())
        stepper = method(model, optimizer, every=3, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6, backoff_factor=1.0 - 1e-9)
        for number, (x, y) in enumerate(batches(9)):
            for factor in (torch.inf, 1.0) if with_bad_batches and number in (0, 2, 5, 6) else (1.0,):
                optimizer.zero_grad()
                scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                record = stepper.step()
                assert (record is not None) == (factor == 1.0 and number % 3 == 2)
        assert stepper.steps == 9 and stepper.updates == 3 and all(u.dropped for u in stepper.history)
        return model

    for a, b in zip(layers_of(run(True)), layers_of(run(False))):
        assert a.pattern.equals(b.pattern)
        torch.testing.assert_close(a.values, b.values, rtol=1e-4, atol=1e-6)


class Scaled:
    """SNFS with a loss that a scaler, told to the stepper or not, scales by powers of two; in float64 that changes no bit of a gradient."""

    def __init__(self, scaler=None, is_told=True):
        self.model = build(torch.float64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        told = {"scaler": scaler} if is_told else {}
        rule = dst.MomentumGrowth(window=4, decay=0.9)
        self.stepper = dst.SNFS(self.model, self.optimizer, every=5, t_end=100, grow=rule, **told)

    def run(self, data, bad=()):
        for number, (x, y) in enumerate(data):
            for factor in (torch.inf, 1.0) if number in bad else (1.0,):
                self.optimizer.zero_grad()
                self.scaler.scale(F.cross_entropy(self.model(x), y) * factor).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.stepper.step()
        return self

    def equals(self, other):
        return all(torch.equal(a, b) for a, b in zip(self.model.state_dict().values(), other.model.state_dict().values()))


def growing_scaler():
    """Eight times as much after every second step, a thousandth after a bad one."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_factor=8.0, backoff_factor=2.0**-10, growth_interval=2)


@pytest.mark.parametrize("bad", [(), (3, 7)])
def test_recorded_steps_weigh_alike_where_the_scale_changes(bad):
    data = batches(20, torch.float64)
    plain = Scaled().run(data)
    assert plain.stepper.updates == 4
    assert Scaled(growing_scaler()).run(data, bad).equals(plain)
    assert not Scaled(growing_scaler(), is_told=False).run(data, bad).equals(plain)


def test_recorded_steps_weigh_alike_after_a_resume_in_their_midst(tmp_path):
    data, path = batches(20, torch.float64), tmp_path / "a.safetensors"
    plain, first, second = Scaled().run(data), Scaled(growing_scaler()).run(data[:8]), Scaled(growing_scaler()).run(data[:3])
    snack.save_training(path, first.model, first.optimizer, first.stepper, scaler=first.scaler)
    assert len(first.stepper._recorded) == 2
    snack.load_training(path, second.model, second.optimizer, second.stepper, scaler=second.scaler)
    assert second.run(data[8:]).equals(plain)


def test_recorded_steps_are_brought_to_the_smallest_scale():
    """Never to a larger one, where 16-bit numbers could overflow; and what is joined of all ranks stays so."""
    x, dy = torch.ones(1, 2, dtype=torch.float16), torch.full((1, 3), 60000.0, dtype=torch.float16)
    one, two = (capture.Saved(processes.Joined((x, dy)), torch.tensor(scale)) for scale in (2.0**10, 2.0**16))
    first, missing, second = capture.alike([one, None, two])
    assert missing is None and type(first) is type(second) is processes.Joined
    assert first[1].tolist() == dy.tolist() and second[1].tolist() == (dy / 2**6).tolist() and second[1].dtype == torch.float16


@pytest.mark.parametrize("method", [dst.SNFS, dst.RigL])
def test_steps_in_float16_without_a_scaler_are_told_once(method):
    """Where several steps are recorded; growth by the gradient of one step does not mind."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    stepper = method(model, optimizer, every=2, t_end=100)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for x, y in batches(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                logits = model(x)
            F.cross_entropy(logits.float(), y).backward()
            optimizer.step()
            stepper.step()
    told = [str(warning.message) for warning in said if "scaler=" in str(warning.message)]
    assert len(told) == (method is dst.SNFS) and stepper.updates == 3 and all(text.startswith("SNFS: gradients of several steps") for text in told)
    with pytest.raises(SnackError, match="scaler='amp' must be the torch.amp.GradScaler"):
        method(model, optimizer, t_end=100, scaler="amp")


# ---- autocast and clipping ----


@pytest.mark.parametrize(("method", "options"), METHODS, ids=["set", "rigl"])
def test_autocast_with_clipping_trains_float32_values(method, options):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stepper = method(model, optimizer, every=5, **options)
    x, y = batches(1)[0]
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        assert logits.dtype == torch.bfloat16
        loss = F.cross_entropy(logits.float(), y)
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm.isfinite()
        optimizer.step()
        stepper.step()
        losses.append(loss.item())
    assert stepper.updates == 12 and losses[-1] < 0.7 * losses[0] and all(p.dtype == torch.float32 for p in model.parameters())


def test_clipping_scales_all_candidates_alike():
    """A clipped gradient grows what the unclipped one does: the candidates' scores are compared with each other only."""

    def grown(limit):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        stepper = dst.RigL(model, optimizer, every=1, t_end=100)
        x, y = batches(1)[0]
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        stepper.step()
        return layers_of(model)

    assert all(a.pattern.equals(b.pattern) for a, b in zip(grown(1e-3), grown(1e9)))


# ---- averaged weights ----


@pytest.mark.parametrize(
    ("method", "options"),
    [*METHODS, (dst.GMP, {"t_end": 30, "sparsity": 0.9}), (dst.SNFS, {"t_end": 100, "grow": dst.MomentumGrowth(window=2)})],
    ids=["set", "rigl", "gmp", "snfs"],
)
def test_an_averaged_model_follows_the_edits(method, options):
    """The averages are those of dense matrices, where a dropped connection is forgotten and a grown one begins anew."""
    decay = 0.8
    model = build(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    stepper = method(model, optimizer, every=3, **options)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    stepper.follow(averaged)
    expected, before = None, positions(model)
    for x, y in batches(14, torch.float64):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        averaged.update_parameters(model)
        now = [as_matrix(layer) for layer in layers_of(model)]
        expected = now if expected is None else [decay * e + (1 - decay) * m for e, m in zip(expected, now)]
        old = [dict.fromkeys(zip(*(t.tolist() for t in layer.pattern.coordinates()))) for layer in layers_of(model)]
        kept = [layer.values.detach().clone() for layer in layers_of(model)]
        if stepper.step():
            for layer, matrix, places, values in zip(layers_of(model), expected, old, kept):
                survivors = {p: v for p, v in zip(places, values.tolist())}
                at = list(zip(*(t.tolist() for t in layer.pattern.coordinates())))
                stays = torch.zeros_like(matrix, dtype=torch.bool)
                for p, v in zip(at, layer.values.tolist()):
                    stays[p] = p in survivors and v == survivors[p]  # one that was dropped and grown at once begins at 0
                matrix[~stays] = 0.0
        for mine, layer, matrix in zip(layers_of(averaged), layers_of(model), expected):
            assert mine.pattern.equals(layer.pattern)
            torch.testing.assert_close(as_matrix(mine), matrix)
    assert stepper.updates == 4 and not any(torch.equal(a, b) for a, b in zip(positions(model), before))
    assert averaged(x).shape == (16, 4)


def test_follow_refuses_what_cannot_follow():
    model = build()
    stepper = dst.SET(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    with pytest.raises(SnackError, match="use_buffers=False"):
        stepper.follow(AveragedModel(model, use_buffers=True))
    with pytest.raises(SnackError, match="no sparse layer '0'"):
        stepper.follow(nn.Linear(2, 2))
    with pytest.raises(SnackError, match="trained one itself"):
        stepper.follow(model)
    with pytest.raises(SnackError, match="expected a torch.nn.Module"):
        stepper.follow(model.state_dict())
    other = copy.deepcopy(model)
    other[0].rewire([0], snack.ops.grow_uniform(other[0].pattern, 1, 3))
    with pytest.raises(SnackError, match="'0' has other connections"):
        stepper.follow(other)


@pytest.mark.parametrize("method", ["SET", "RigL", "SNFS"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))], ids=["copied", "pickled"])
def test_a_copied_training_goes_on_alike(method, copied):
    model = build(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    stepper = getattr(dst, method)(model, optimizer, every=12, t_end=100)
    trainings = [(model, optimizer, stepper)]
    for number, (x, y) in enumerate(batches(27, torch.float64)):
        for m, o, s in trainings:
            o.zero_grad()
            F.cross_entropy(m(x), y).backward()
            o.step()
            s.step()
        if number == 12:  # nothing is recorded for the second update yet, or for SNFS it has its window to come
            trainings.append(copied(trainings[0]))
    (_, _, first), (twin, _, second) = trainings
    assert second.steps == 27 and second.updates == first.updates == 2 and len(second.history) == 2
    assert all(torch.equal(a, b) for a, b in zip(positions(model), positions(twin)))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


def test_a_model_that_holds_its_stepper_is_copied():
    model = build()
    model.stepper = dst.RigL(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2, t_end=9)
    twin = copy.deepcopy(model)
    assert twin.stepper.model is twin and twin.stepper.optimizer.param_groups[0]["params"][0] is next(twin.parameters())
    x, y = batches(1)[0]
    for _ in range(2):
        F.cross_entropy(twin(x), y).backward()
        twin.stepper.optimizer.step()
        update = twin.stepper.step()
    assert update.dropped and model.stepper.steps == 0


def test_a_copy_that_was_edited_since_stops_the_update():
    """Slots of the model are others in such a copy; nothing is changed then, in the model neither."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper, averaged = dst.SET(model, optimizer, every=1), AveragedModel(model)
    stepper.follow(averaged)
    last = layers_of(averaged)[-1]
    last.rewire([0])
    before = positions(model)
    x, y = batches(1)[0]
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(SnackError, match="other connections than in the copy that follows it"):
        stepper.step()
    assert stepper.updates == 0 and all(torch.equal(a, b) for a, b in zip(positions(model), before))


# ---- double backward ----


def penalised_step(model, x, y):
    """A gradient penalty: the loss and the squared norm of its gradient with respect to x."""
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()


def test_double_backward_works_with_uniform_growth():
    model = build(torch.float64)
    dense = snack.densify(copy.deepcopy(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stepper = dst.SET(model, optimizer, every=1)
    (x, y), (later, labels) = batches(2, torch.float64)
    penalised_step(model, x, y)
    penalised_step(dense, x, y)
    rows, cols = (t.long() for t in model[0].pattern.coordinates())
    torch.testing.assert_close(model[0].values.grad, dense[0].weight.grad[rows, cols])
    optimizer.step()
    assert stepper.step().dropped > 0
    optimizer.zero_grad()
    penalised_step(model, later, labels)


def test_double_backward_in_an_armed_step_is_a_clear_error():
    """Growth by gradient sees dY and x of the first order only, and must not pretend otherwise; ordinary steps may do as they like."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stepper = dst.RigL(model, optimizer, every=2, t_end=100)
    before = positions(model)
    for x, y in batches(2):
        optimizer.zero_grad()
        penalised_step(model, x, y)
        optimizer.step()
        if not stepper.steps % 2:
            with pytest.raises(SnackError, match="RigL: layer '0': the gradient of this step was made by differentiating twice.*if not dst.armed"):
                stepper.step()
    assert all(torch.equal(a, b) for a, b in zip(positions(model), before))


def test_a_graph_of_the_gradient_alone_is_no_second_order():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stepper = dst.RigL(model, optimizer, every=1, t_end=100)
    x, y = batches(1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of the reference cycle that is cut below
        F.cross_entropy(model(x), y).backward(create_graph=True)
    for parameter in model.parameters():
        parameter.grad = parameter.grad.detach()
    optimizer.step()
    assert stepper.step().dropped > 0
