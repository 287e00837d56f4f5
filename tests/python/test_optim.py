"""snack.optim: what torch.optim computes, step by step, and the same states; fused where it says so, never wrong where it cannot be."""

import copy
import io
import re

import pytest
import torch
from torch import nn

import snack
from snack.errors import SnackError
from snack.ops.deferred import is_pending

SGD = [
    dict(lr=0.1), dict(lr=0.1, weight_decay=0.01), dict(lr=0.05, momentum=0.9), dict(lr=0.05, momentum=0.9, dampening=0.3),
    dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1), dict(lr=0.01, momentum=0.5, maximize=True),
]
ADAMW = [dict(lr=0.01), dict(lr=0.01, betas=(0.8, 0.95), weight_decay=0.2, eps=1e-6), dict(lr=0.01, maximize=True)]
RULES = [("SGD", options) for options in SGD] + [("AdamW", options) for options in ADAMW]
KINDS = [("SGD", dict(lr=0.05, momentum=0.9)), ("AdamW", dict(lr=0.01))]


def raises(text):
    return pytest.raises(SnackError, match=re.escape(text))


def network(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    where = dict(sparsity=0.4, device=device, dtype=dtype, generator=generator)
    return nn.Sequential(snack.SparseLinear(70, 90, **where), nn.Tanh(), snack.SparseLinear(90, 40, **where))


def pair(device, kind, options, dtype=torch.float32):
    """(model, torch's optimiser), (the same model, the fused one)."""
    model = network(device, dtype)
    twin = copy.deepcopy(model)
    plain = getattr(torch.optim, kind)(model.parameters(), **options)
    return (model, plain), (twin, getattr(snack.optim, kind)(twin.parameters(), fused_grad=True, **options))


def backward(model, batch, step, factor=1.0):
    generator = torch.Generator().manual_seed(step)
    like = model[0].values
    x, target = (torch.randn(batch, n, generator=generator, dtype=torch.float64).to(like) for n in (70, 40))
    loss = factor * (model(x) - target).square().mean()
    loss.backward()
    return loss


def train(model, optimizer, batch, steps=20, after_backward=lambda: None, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, batch, step)
        after_backward()
        optimizer.step()


def check_same(one, other, tolerance=None):
    tolerance = tolerance or (1e-12 if one[0].values.dtype == torch.float64 else 1e-4)
    for a, b in zip(one.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def check_same_state(one, other, tolerance=1e-4):
    a, b = one.state_dict(), other.state_dict()
    assert a["param_groups"] == b["param_groups"] and a["state"].keys() == b["state"].keys()
    for number in a["state"]:
        x, y = a["state"][number], b["state"][number]
        assert x.keys() == y.keys()
        for key in x:
            assert (x[key] is None) == (y[key] is None)
            if x[key] is not None:
                assert x[key].dtype == y[key].dtype and x[key].device == y[key].device
                torch.testing.assert_close(x[key], y[key], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("kind", "options"), RULES)
def test_twenty_steps_equal_torch(device, dtype, kind, options):
    for batch in (1, 2, 3, 4, 8, 13):
        one, other = pair(device, kind, options, dtype)
        train(*one, batch)
        train(*other, batch)
        check_same(one[0], other[0])
        check_same_state(one[1], other[1])
        assert other[1].fused_updates == 40 and one[0][0].values.ne(network(device, dtype)[0].values).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), RULES)
def test_sixteen_bits_are_rounded_once(device, dtype, kind, options):
    # From the same values and state, one step differs from one in float64 by the rounding of what is stored.
    ulp = torch.finfo(dtype).eps
    if kind == "AdamW" and dtype == torch.float16:
        options = options | {"eps": 1e-3}  # squares of small gradients are 0 in float16, as in torch.optim's state
    for batch in (1, 4, 7, 12):
        model = network(device, dtype)
        optimizer = getattr(snack.optim, kind)(model.parameters(), fused_grad=True, **options)
        for step in range(3):
            values = model[0].values.detach().double().cpu()
            reference = nn.Parameter(values.clone())
            twin = getattr(torch.optim, kind)([reference], **options)
            state = {k: t.double().cpu() for k, t in optimizer.state[model[0].values].items() if t is not None}
            twin.state[reference] = {k: t.float() if k == "step" else t for k, t in state.items()}
            optimizer.zero_grad()
            backward(model, batch, step)
            pending = model[0].values.grad
            assert is_pending(pending)
            operands = (t.double().cpu() for t in (pending.operands.dy, pending.operands.x))
            reference.grad = snack.ops.sddmm(model[0].pattern.to("cpu"), *operands)
            twin.step()
            optimizer.step()
            torch.testing.assert_close(model[0].values.double().cpu(), reference.detach(), rtol=ulp, atol=1e-3 * ulp)
            for key, t in twin.state[reference].items():
                if t is not None and key != "step":
                    torch.testing.assert_close(optimizer.state[model[0].values][key].double().cpu(), t, rtol=ulp, atol=2e-7)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_what_is_fused_and_what_is_not(device, kind, options):
    _, (model, optimizer) = pair(device, kind, options)
    backward(model, 2, 0)
    gradients = [layer.values.grad for layer in (model[0], model[2])]
    assert all(is_pending(g) and g.nbytes == 0 for g in gradients)
    assert snack.summary(model).layers[0].gradient_bytes == model[0].bias.grad.nbytes
    optimizer.step()
    assert optimizer.fused_updates == 2 and all(is_pending(g) for g in gradients) and model[0].values.grad is gradients[0]
    optimizer.zero_grad()
    backward(model, 30, 0)  # x and dy together are larger than the gradient
    assert type(model[0].values.grad) is torch.Tensor
    optimizer.step()
    assert optimizer.fused_updates == 2
    del optimizer
    model.zero_grad()
    backward(model, 2, 0)  # nobody asks any more
    assert type(model[0].values.grad) is torch.Tensor


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_without_fused_grad_it_is_torch(device, kind, options):
    (model, plain), _ = pair(device, kind, options)
    twin = network(device)
    optimizer = getattr(snack.optim, kind)(twin.parameters(), **options)
    train(model, plain, 3, 5)
    train(twin, optimizer, 3, 5)
    check_same(model, twin, 1e-30)
    assert type(twin[0].values.grad) is torch.Tensor and optimizer.fused_updates == 0


# ---- who looks at the gradient gets it ----


def both(device, kind, options, loop):
    one, other = pair(device, kind, options)
    loop(*one)
    loop(*other)
    check_same(one[0], other[0])
    check_same_state(one[1], other[1])
    return other[1].fused_updates


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_clipping(device, kind, options):
    norms = []

    def loop(model, optimizer):
        train(model, optimizer, 2, 6, lambda: norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))

    assert both(device, kind, options, loop) == 0
    torch.testing.assert_close(norms[:6], norms[6:])


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation(device, kind, options, set_to_none):
    def loop(model, optimizer):
        for step in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            for part in range(1 + step % 3):
                backward(model, 2, 10 * step + part)
            optimizer.step()

    # Steps 0 and 3 have one pass. A gradient that was computed once stays a tensor of zeros without set_to_none.
    assert both(device, kind, options, loop) == (4 if set_to_none else 2)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_gradients_set_to_zero_and_not_to_none(device, kind, options):
    def loop(model, optimizer):
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            backward(model, 2, step)
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()  # by gradients of 0, which decay the momentum
        assert model[0].values.grad.eq(0).all()

    assert both(device, kind, options, loop) == 8


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_second_step_by_the_same_gradient_and_none_without(device, kind, options):
    def loop(model, optimizer):
        backward(model, 2, 0)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()

    assert both(device, kind, options, loop) == 4


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_layer_used_twice(device, kind, options):
    def loop(model, optimizer):
        layer = model[2]
        for step in range(4):
            x = torch.randn(2, 90, generator=torch.Generator().manual_seed(step)).to(layer.values)
            optimizer.zero_grad()
            (layer(x).sum() + layer(x.cos()).square().sum()).backward()
            optimizer.step()

    assert both(device, kind, options, loop) == 0


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_hooks_and_other_gradients(device, kind, options):
    def loop(model, optimizer):
        handle = model[0].values.register_hook(lambda g: 0.5 * g)
        for step in range(3):
            optimizer.zero_grad()
            loss = (model(torch.ones(2, 70, device=device)) - step).square().sum()
            assert type(torch.autograd.grad(loss, model[2].values, retain_graph=True)[0]) is torch.Tensor
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
        handle.remove()
        optimizer.zero_grad()
        x = torch.ones(2, 70, device=device, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)  # adds nothing to any .grad
        assert model[0].values.grad is None
        slope.square().sum().backward()
        optimizer.step()

    both(device, kind, options, loop)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_gradient_scaler(device, kind, options):
    skipped = []

    def loop(model, optimizer):
        scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=3)
        for step in range(5):
            optimizer.zero_grad()
            before = model[0].values.detach().clone()
            loss = scaler.scale((model(torch.ones(2, 70, device=device)) * (torch.inf if step == 2 else 1.0)).square().mean())
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
            skipped.append(torch.equal(before, model[0].values))

    assert both(device, kind, options, loop) == 0
    assert skipped == [False, False, True, False, False] * 2


@pytest.mark.cpu_only  # gloo's process group
@pytest.mark.parametrize("as_view", [True, False])
def test_distributed_data_parallel(device, as_view, tmp_path):
    distributed = nn.parallel.DistributedDataParallel

    def loop(model, optimizer):
        distributed._set_params_and_buffers_to_ignore_for_model(model, [name for name, _ in model.named_buffers()])
        wrapped = distributed(model, gradient_as_bucket_view=as_view)
        for step in range(4):
            optimizer.zero_grad()
            wrapped(torch.full((2, 70), 0.1 * step)).square().mean().backward()
            optimizer.step()

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert both(device, "SGD", dict(lr=0.05, momentum=0.9), loop) == 0
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_autocast(device, kind, options):
    def loop(model, optimizer):
        with torch.autocast(device.type, torch.bfloat16):
            train(model, optimizer, 2, 4)

    assert both(device, kind, options, loop) == 0


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_groups_schedules_and_closures(device, kind, options):
    def loop(model, optimizer):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, device=device))], "lr": 0.5})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(6):

            def closure(step=step):
                optimizer.zero_grad()
                return backward(model, 2, step)

            assert torch.is_tensor(optimizer.step(closure))
            schedule.step()

    def grouped(model, optimizer):
        groups = snack.param_groups(model, weight_decay=0.1)
        loop(model, type(optimizer)(groups, **options, **({"fused_grad": True} if hasattr(optimizer, "fused_grad") else {})))

    both(device, kind, options, loop)
    both(device, kind, options, grouped)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_learning_rate_as_a_tensor(device, kind, options):
    on_device = dict(capturable=True) if kind == "AdamW" and device.type == "cuda" else {}

    def loop(model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], device=device)
        train(model, optimizer, 2, 5)

    assert both(device, kind, options | on_device, loop) == 10


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_step_hooks_run_once(device, kind, options):
    counts = []
    for model, optimizer in pair(device, kind, options):
        calls = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        train(model, optimizer, 2, 3)
        counts.append(calls)
    assert counts[0] == counts[1] == ["before", "after"] * 3


# ---- states ----


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_state_dicts_go_both_ways(device, kind, options):
    (model, plain), (twin, fused) = pair(device, kind, options)
    train(model, plain, 2, 5)
    train(twin, fused, 2, 5)
    saved = [copy.deepcopy(o.state_dict()) for o in (plain, fused)]
    fused.load_state_dict(saved[0])
    plain.load_state_dict(saved[1])
    train(model, plain, 2, 5, first=5)
    train(twin, fused, 2, 5, first=5)
    check_same(model, twin)
    check_same_state(plain, fused)
    assert fused.fused_updates == 20


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_copies_and_files(device, kind, options):
    _, (model, optimizer) = pair(device, kind, options)
    train(model, optimizer, 2, 3)
    together, buffer = copy.deepcopy((model, optimizer)), io.BytesIO()
    torch.save((model, optimizer), buffer)
    buffer.seek(0)
    for twin, copied in (together, torch.load(buffer, weights_only=False)):
        assert copied.fused_grad
        before = copied.fused_updates
        train(twin, copied, 2, 3, first=3)
        assert copied.fused_updates - before == 6
    train(model, optimizer, 2, 3, first=3)
    check_same(model, together[0], 1e-30)


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("method", ["SET", "RigL"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_that_moves_connections(device, kind, options, method, dtype):
    models, losses = [], []
    for model, optimizer in pair(device, kind, options, dtype):
        dst = getattr(snack, method)(model, optimizer, every=7, drop_fraction=0.3, seed=1, **({"t_end": 100} if method == "RigL" else {}))
        for step in range(50):
            optimizer.zero_grad()
            losses.append(float(backward(model, 2, step).detach()))
            optimizer.step()
            dst.step()
        assert len(dst.history) == 7
        models.append((model, optimizer))
    (one, plain), (other, fused) = models
    assert fused.fused_updates == 100 and losses[:7] == pytest.approx(losses[50:57], rel=1e-4)
    if dtype == torch.float64:  # rounding in float32 may choose another connection
        assert torch.equal(one[0].index, other[0].index) and torch.equal(one[2].index, other[2].index)
        check_same(one, other, 1e-9)
        check_same_state(plain, fused, 1e-9)
    else:
        assert losses[50:] == pytest.approx(losses[:50], rel=0.1)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_an_edit_between_backward_and_step_carries_the_gradient(device, kind, options):
    def loop(model, optimizer):
        for step, grown in enumerate((10, 25)):  # the same number of connections, then more
            optimizer.zero_grad()
            backward(model, 2, step)
            rows, cols = snack.ops.grow_uniform(model[0].pattern, grown, 5)
            model[0].rewire(torch.arange(10), (rows, cols), optimizer=optimizer)
            optimizer.step()

    both(device, kind, options, loop)


# ---- errors ----


def test_what_changed_in_between_is_said(device):
    _, (model, optimizer) = pair(device, "SGD", dict(lr=0.1))
    x = torch.randn(2, 70, device=device)
    model(x).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    x.mul_(2)
    with raises("fused_grad: the layer's input was changed between backward() and the use of the gradient"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) and is_pending(model[2].values.grad)
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as after any optimiser's step
        y = model(x)
        optimizer.step()
        y.sum().backward()


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("AdamW", dict(amsgrad=True), "AdamW: amsgrad has no fused kernel"),
        ("SGD", dict(differentiable=True), "SGD: differentiable has no fused kernel"),
        ("AdamW", dict(betas=(torch.tensor(0.9), torch.tensor(0.99)), capturable=True), "AdamW: betas must be numbers"),
        ("SGD", dict(fused_grad=1), "SGD: fused_grad=1 must be True or False"),
    ],
)
def test_options_without_a_kernel(device, kind, options, text):
    with raises(text):
        getattr(snack.optim, kind)(network(device).parameters(), **{"fused_grad": True} | options)


def test_the_operator_refuses_in_one_sentence(device):
    layer = network(device)[0]
    x, dy = torch.randn(2, 70, device=device), torch.randn(2, 90, device=device)
    step = snack.ops.SgdStep(0.1, momentum=0.9)
    values = layer.values.detach().clone()

    def update(values=values, state=None, dy=dy, x=x, rule=step):
        snack.ops.sddmm_update(layer.pattern, values, [torch.zeros_like(values)] if state is None else state, dy, x, rule)

    with raises("sddmm_update: 0 states were given, expected 1"):
        update(state=[])
    with raises("sddmm_update: a state has 3 entries, the pattern has"):
        update(state=[torch.zeros(3, device=device)])
    with raises("sddmm_update: a state is bfloat16 and values is float32"):
        update(state=[torch.zeros_like(values, dtype=torch.bfloat16)])
    with raises("sddmm_update: x has shape (2, 90), the layer expects in_features=70"):
        update(x=dy)
    with raises("dy has leading dimensions (2,) and x (1,)"):
        update(x=x[:1])
    with raises("sddmm_update: step 0 was given; steps count from 1"):
        update(state=[values, values], rule=snack.ops.AdamWStep(0.1, step=0))
    assert torch.equal(values, layer.values)


def test_the_operator_on_strided_and_empty_operands(device):
    layer = network(device)[0]
    pattern = layer.pattern
    for dy, x in (
        (torch.ones(90, device=device).expand(3, 90), torch.randn(70, 3, device=device).t()),
        (torch.empty(0, 90, device=device), torch.empty(0, 70, device=device)),
        (torch.randn(2, 3, 90, device=device), torch.randn(2, 3, 70, device=device)),
    ):
        values, twin = layer.values.detach().clone(), nn.Parameter(layer.values.detach().clone())
        twin.grad = snack.ops.sddmm(pattern, dy, x)
        torch.optim.SGD([twin], 0.1, weight_decay=0.5).step()
        snack.ops.sddmm_update(pattern, values, [], dy, x, snack.ops.SgdStep(0.1, weight_decay=0.5))
        torch.testing.assert_close(values, twin.detach(), rtol=1e-6, atol=1e-6)
