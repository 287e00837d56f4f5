"""Growth by gradient: the positions RigL grows are those of the dense gradient, however the layer was used.

The dense gradient comes from autograd, on an nn.Linear with the same weights used in the same way.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from checks import real
from snack import dst, ops
from snack.dst import rules
from snack.nn import SparseLinear

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(autouse=True)
def one_thread():
    """These layers are tiny: threads would only wait for each other."""
    torch.set_num_threads(1)  # conftest puts it back


OUT, IN, FRACTION = 24, 30, 0.3


def new_layer(dtype=None, out=OUT, in_=IN, sparsity=0.8):
    torch.manual_seed(0)
    return SparseLinear(in_, out, sparsity=sparsity, dtype=dtype or real())


def positions(layer):
    rows, cols = layer.pattern.coordinates()
    return list(zip(rows.tolist(), cols.tolist()))


def tolerance():
    """Rounding of float64 on the CPU, of float32 on a card, where sums have another order than the dense ones."""
    return {"rtol": 1e-10} if real() == torch.float64 else {"rtol": 1e-4, "atol": 1e-3}


def slot_key(p):
    return (p[1] // 1024, *p)


def expected_topology(layer, gradient, fraction=FRACTION):
    """The set after RigL's update, from the dense gradient (out, in)."""
    live, values = positions(layer), layer.values.tolist()
    k = int(fraction * len(live))
    dropped = sorted(range(len(live)), key=lambda s: (abs(values[s]), s))[:k]
    kept = set(live) - {live[s] for s in dropped}
    scores = gradient.abs().tolist()
    empty = [(r, c) for r in range(layer.out_features) for c in range(layer.in_features) if (r, c) not in kept]
    return kept | set(sorted(empty, key=lambda p: (-scores[p[0]][p[1]], slot_key(p)))[:k])


def rigl(layer, model=None, **options):
    """A stepper with an update after every step, and an optimiser that leaves the values alone."""
    model = layer if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return dst.RigL(model, optimizer, every=1, drop_fraction=dst.Constant(FRACTION), **options), optimizer


def x_of(*shape, seed=1, dtype=None):
    numbers = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device(), dtype or real())


# ---- ways to use a layer. Each gets a layer, sparse or dense, and leaves a gradient in it ----


def use_once(layer):
    layer(x_of(8, IN)).square().sum().backward()


def use_in_three_dimensions(layer):
    layer(x_of(2, 3, IN).transpose(0, 1)).square().sum().backward()


def use_one_dimension(layer):
    layer(x_of(IN)).square().sum().backward()


def use_expanded_gradient(layer):
    (layer(x_of(8, IN)) * 1.0).sum().backward()
    layer(x_of(8, IN, seed=2)).sum().backward()


def use_shared(layer):
    h = layer(x_of(8, IN)).tanh()
    (layer(torch.cat([h, h], 1)[:, :IN]) * x_of(8, OUT, seed=3)).sum().backward()


def use_micro_batches(layer):
    for seed in range(3):
        layer(x_of(3 + seed, IN, seed=seed)).square().sum().backward()


def use_in_place_relu(layer):
    nn.functional.relu(layer(x_of(8, IN)), inplace=True).square().sum().backward()


def use_with_keyword(layer):
    call = {"x": x_of(8, IN)} if isinstance(layer, SparseLinear) else {"input": x_of(8, IN)}
    layer(**call).square().sum().backward()


def use_amid_evaluation(layer):
    """Forward passes that train nothing: no_grad, eval without backward, a gradient with respect to the input only."""
    with torch.no_grad():
        layer(x_of(8, IN, seed=5))
    y = layer(x_of(8, IN))
    layer.eval()
    layer(x_of(8, IN, seed=6) * 100)
    x = (x_of(8, IN, seed=7) * 100).requires_grad_()
    torch.autograd.grad(layer(x).square().sum(), x)
    layer.train()
    y.square().sum().backward()
    torch.autograd.grad(layer(x).square().sum(), x)


def use_with_cleared_gradient(layer, set_to_none=True):
    """An iteration that is thrown away: what zero_grad cleared must not count."""
    (layer(x_of(8, IN, seed=8)) * 100).square().sum().backward()
    layer.zero_grad(set_to_none=set_to_none)
    use_micro_batches(layer)


def use_with_zeroed_gradient(layer):
    use_with_cleared_gradient(layer, set_to_none=False)


def use_with_clipping_between(layer):
    layer(x_of(8, IN)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1e9)  # a factor of 1, but the gradient is written to
    layer(x_of(4, IN, seed=2)).square().sum().backward()


def use_checkpoint(layer):
    h = checkpoint(layer, x_of(8, IN).requires_grad_(), use_reentrant=False)
    h.square().sum().backward()


def use_reentrant_checkpoint(layer):
    h = checkpoint(layer, x_of(8, IN).requires_grad_(), use_reentrant=True)
    (h.square().sum() + layer(x_of(5, IN, seed=2)).square().sum()).backward()


USES = [value for name, value in list(globals().items()) if name.startswith("use_")]


@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
def test_grows_where_the_dense_gradient_is_largest(use):
    layer = new_layer()
    dense = layer.to_dense()
    use(dense)
    stepper, optimizer = rigl(layer)
    use(layer)
    rows, cols = layer.pattern.coordinates()
    assert torch.allclose(layer.values.grad, dense.weight.grad[rows.long(), cols.long()], **tolerance())
    expected = expected_topology(layer, dense.weight.grad)
    before = set(positions(layer))
    optimizer.step()
    stepper.step()
    assert set(positions(layer)) == expected != before


def topologies_with_zero_grad(place, set_to_none):
    model = nn.Sequential(new_layer(), nn.Tanh(), SparseLinear(OUT, 6, sparsity=0.5, dtype=real()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    stepper = dst.RigL(model, optimizer, every=2, t_end=100)

    def clear_if(here):
        if place == here:
            optimizer.zero_grad(set_to_none=set_to_none)

    for iteration in range(10):
        clear_if("first")
        model(x_of(8, IN, seed=iteration)).square().mean().backward()
        optimizer.step()
        clear_if("after the step")
        stepper.step()
        clear_if("after the edit")
    assert stepper.updates == 5
    return [positions(model[0]), positions(model[2])]


def test_place_of_zero_grad_does_not_matter():
    places = ("first", "after the step", "after the edit")
    outcomes = [topologies_with_zero_grad(place, set_to_none) for place in places for set_to_none in (True, False)]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert topologies_with_zero_grad("never", True) != outcomes[0]


def test_step_skipped_by_grad_scaler_leaves_no_trace():
    layer = new_layer()
    dense = layer.to_dense()
    dense(x_of(8, IN)).square().sum().mul(8.0).backward()
    stepper, optimizer = rigl(layer)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=16.0)
    bad = x_of(8, IN, seed=4) * 100
    bad[0, 0] = torch.inf
    for x, is_skipped in ((bad, True), (x_of(8, IN), False)):
        optimizer.zero_grad()
        scaler.scale(layer(x).square().sum()).backward()
        expected = expected_topology(layer, dense.weight.grad)
        scaler.step(optimizer)
        scaler.update()
        assert (stepper.step() is None) == is_skipped
    assert set(positions(layer)) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """x in float32, dY in 16 bits: operands as the layer multiplied them, summed in float32."""
    layer = new_layer(torch.float32)
    x = x_of(8, IN, dtype=torch.float32)
    stepper, optimizer = rigl(layer)
    with torch.autocast(torch.get_default_device().type, dtype):
        y = layer(x)
    assert y.dtype == dtype
    seen = []
    y.register_hook(lambda dy: seen.append(dy.clone()))
    y.float().square().sum().backward()
    assert seen[0].dtype == dtype
    expected = expected_topology(layer, seen[0].double().T @ x.to(dtype).double())
    optimizer.step()
    stepper.step()
    assert set(positions(layer)) == expected
    assert layer.values.dtype == torch.float32


def test_mixed_dtypes_of_uses_are_joined():
    layer = new_layer(torch.float32)
    stepper, optimizer = rigl(layer)
    dense = layer.to_dense()
    for net in (layer, dense):
        net(x_of(8, IN, dtype=torch.float32)).square().sum().backward()
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            (net(torch.ones(4, IN)) * 2**-4).sum().backward()
    optimizer.step()
    expected = expected_topology(layer, dense.weight.grad)
    stepper.step()
    assert set(positions(layer)) == expected


def test_overwritten_input_is_told():
    layer = new_layer()
    stepper, optimizer = rigl(layer)
    x, before = x_of(8, IN), positions(layer)
    layer(x).sum().backward()
    optimizer.step()
    x.copy_(x_of(8, IN, seed=2))
    with pytest.raises(ValueError, match="input was overwritten .* call step\\(\\) before"):
        stepper.step()
    assert positions(layer) == before and stepper.updates == 0


def test_layer_without_a_backward_pass_keeps_its_connections():
    used, unused = new_layer(), new_layer()
    model = nn.ModuleDict({"used": used, "unused": unused})
    stepper, optimizer = rigl(used, model)
    before = positions(unused)
    for number in range(2):
        used(x_of(8, IN)).square().sum().backward()
        optimizer.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layers = stepper.step().layers
        assert layers == {"used": int(FRACTION * used.nnz), "unused": 0}
        assert [("'unused' took no part" in str(w.message)) for w in caught] == [True] * (number == 0)  # said once
    assert positions(unused) == before


def test_armed_steps_of_a_compiled_model_may_run_eagerly():
    """In place of the armed variant, where its compilation is not worth it (tests of that: test_compiled.py)."""
    layer = new_layer()
    model = nn.Sequential(layer, nn.Tanh())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    stepper = dst.RigL(model, optimizer, every=2, t_end=100)

    def iterate():
        with torch.compiler.set_stance("force_eager" if stepper.armed else "default"):
            compiled(x_of(8, IN)).square().sum().backward()
        optimizer.step()
        return stepper.step()

    assert [iterate() is not None for _ in range(4)] == [False, True, False, True]
    assert all(u.dropped > 0 for u in stepper.history)


def test_gradient_may_serve_the_drop_rule_too():
    """SNIP-like: drop where |w dL/dw| is smallest; the gradient is asked for by the mark alone."""
    layer = new_layer()

    @dst.needs_gradient
    def drop(layer, k, context):
        gradient = ops.sddmm(layer.pattern, context.dy, context.x)
        assert torch.allclose(gradient, layer.values.grad, **tolerance())
        return ops.select_smallest(layer.values * gradient, k)

    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    stepper = dst.DST(layer, optimizer, drop=drop, grow="uniform", every=1)
    layer(x_of(8, IN)).square().sum().backward()
    optimizer.step()
    assert stepper.step().dropped == int(0.3 * layer.nnz)


# ---- sampled candidates ----


def mix64(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def drawn(key, count, layer, taken):
    """The first `count` distinct positions of the stream outside `taken`."""
    found, i = {}, 0
    while len(found) < count:
        i += 1
        draw = mix64((key + i * 0x9E3779B97F4A7C15) % 2**64)
        position = divmod(draw * layer.out_features * layer.in_features // 2**64, layer.in_features)
        if position not in taken:
            found[position] = None
    return list(found)


@pytest.mark.parametrize(("dtype", "offset"), [(torch.float64, 0), (torch.bfloat16, 120)])
def test_sampled_growth_takes_the_best_of_its_candidates(monkeypatch, dtype, offset):
    monkeypatch.setattr(rules, "EXACT_POSITIONS", OUT * 1500 - 1)
    monkeypatch.setattr(rules, "CANDIDATES_PER_CONNECTION", 3)
    layer = new_layer(dtype, in_=1500, sparsity=0.98)
    stepper, optimizer = rigl(layer, seed=9)
    # Whole numbers that the dtype holds exactly: many ties in two column panels, or sums that only float32 tells apart.
    x, weight = (x_of(6, n, seed=n).mul(2).round().add(offset).to(dtype) for n in (1500, OUT))
    live = positions(layer)
    order = sorted(range(len(live)), key=lambda s: (abs(layer.values[s].item()), s))
    k = int(FRACTION * len(live))
    kept = set(live) - {live[s] for s in order[:k]}
    scores = (weight.double().T @ x.double()).abs().tolist()
    candidates = drawn(ops.random_key(9, 0, 0), 3 * k, layer, kept)
    best = sorted(candidates, key=lambda p: (-scores[p[0]][p[1]], slot_key(p)))[:k]
    (layer(x) * weight).sum().backward()
    optimizer.step()
    sentence = r"layer '' \(24 x 1500\) has 36,000 positions.*2\.2e\+05 multiply-adds at batch 6, 50 times.*candidates='all'"
    with pytest.warns(UserWarning, match=sentence):
        stepper.step()
    assert set(positions(layer)) == kept | set(best)


def test_sampling_on_request_and_exact_on_request(monkeypatch):
    def grown(limit, **options):
        monkeypatch.setattr(rules, "EXACT_POSITIONS", limit)
        layer = new_layer()
        stepper, optimizer = rigl(layer, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                use_once(layer)
                optimizer.step()
                stepper.step()
        return positions(layer), len(caught)

    exact, silence = grown(2**30)
    assert silence == 0
    assert grown(1, candidates="all") == (exact, 0)
    assert grown(2**30, candidates=10**6) == (exact, 0)  # all empty positions are candidates
    few, silence = grown(2**30, candidates=2)
    assert few != exact and silence == 0
    assert grown(1)[1] == 1  # one warning a layer, not one an update


def test_hyper_sparse_layer():
    """40,000,000,000 positions: SET and RigL touch the connections and candidates only."""
    layer = SparseLinear.from_coo(*torch.randint(200_000, (2, 20_000)), torch.randn(20_000), (200_000, 200_000), sum_duplicates=True)
    nnz = layer.nnz
    for method in (dst.SET, dst.RigL):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9)
        stepper = method(layer, optimizer, every=1, t_end=100)
        layer(torch.randn(2, 200_000)).square().sum().backward()
        optimizer.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            update = stepper.step()
        assert len(caught) == (method is dst.RigL)
        assert layer.nnz == nnz and 5_000 < update.dropped <= 0.3 * nnz and len(set(positions(layer))) == nnz


def test_window_of_steps_survives_a_reused_input_buffer():
    """Growth by momentum reads several steps: what the buffer held then, not what it holds now."""

    def grown(buffer):
        layer = new_layer()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        stepper = dst.RigL(layer, optimizer, every=3, t_end=100, grow=dst.MomentumGrowth(window=3))
        for seed in range(3):
            x = x_of(8, IN, seed=seed)
            if buffer is not None:
                x = buffer.copy_(x)
            optimizer.zero_grad()
            layer(x).square().sum().backward()
            optimizer.step()
            assert (stepper.step() is not None) == (seed == 2)
        return positions(layer)

    assert grown(x_of(8, IN)) == grown(None)
