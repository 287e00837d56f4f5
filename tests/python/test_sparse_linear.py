"""SparseLinear as a module: construction, initialisation, what PyTorch does to modules, rewiring, compilation, bad input."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import snack
from checks import fails, layer, real, same
from snack import ops
from snack.nn import SparseLinear

pytestmark = pytest.mark.usefixtures("on_device")


def here():
    """The device under test."""
    return torch.get_default_device()


def close(a, b):
    """Equal up to the rounding of many sums: float64 on the CPU, float32 on a card."""
    torch.testing.assert_close(a, b, **({"rtol": 1e-10, "atol": 1e-12} if real() == torch.float64 else {"rtol": 1e-3, "atol": 1e-4}))

# ---- construction ----


def test_construction():
    a = layer(dtype=torch.float64)
    assert a.nnz == round(0.2 * 33 * 70) == a.values.numel() and a.values.shape == (a.nnz,) and a.values.is_contiguous()
    assert a.values.dtype == a.bias.dtype == torch.float64 and a.bias.shape == (33,)
    assert abs(a.sparsity - 0.8) < 1e-3 and abs(a.density - 0.2) < 1e-3 and a.pattern.nnz == a.nnz
    assert not isinstance(a, nn.Linear) and [n for n, _ in a.named_parameters()] == ["values", "bias"]
    assert {n for n, _ in a.named_buffers()} == {"index", "tile_ptr"}
    assert layer(bias=False).bias is None
    assert "in_features=70, out_features=33, bias=True, nnz=462" in repr(a)


def test_no_dense_weight():
    with pytest.raises(AttributeError, match="values.*to_dense"):
        layer().weight  # noqa: B018
    with pytest.raises(AttributeError, match="nonsense"):
        layer().nonsense  # noqa: B018
    assert not hasattr(layer(), "weight")


def test_initialisation_is_that_of_linear_for_the_effective_fan_in():
    """Uniform within 1 / sqrt(mean connections of a row): variance and bounds of values and bias."""
    a = SparseLinear(1000, 400, sparsity=0.9)
    limit = 1 / math.sqrt(100)
    for tensor in (a.values.detach(), a.bias.detach()):
        assert float(tensor.abs().max()) <= limit and float(tensor.abs().max()) > 0.9 * limit
    values = a.values.detach()
    assert abs(float(values.std()) / (limit / math.sqrt(3)) - 1) < 0.02 and abs(float(values.mean())) < 0.02 * limit
    out = a(torch.randn(500, 1000)).detach()
    dense = nn.Linear(1000, 400)(torch.randn(500, 1000)).detach()
    assert abs(float(out.std() / dense.std()) - 1) < 0.05


def test_random_state():
    """torch.manual_seed and a generator govern topology and values."""
    torch.manual_seed(3)
    a = layer()
    torch.manual_seed(3)
    b, c = layer(), layer()
    assert same(a.state_dict(), b.state_dict()) and not a.pattern.equals(c.pattern)
    a, b = (layer(generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert same(a.state_dict(), b.state_dict())


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.999999])
def test_extreme_sparsities(sparsity):
    a = layer(sparsity=sparsity)
    assert a.nnz == round((1 - sparsity) * 33 * 70)
    torch.testing.assert_close(a(torch.ones(2, 70)), a.to_dense()(torch.ones(2, 70)))


def test_from_dense_magnitude():
    dense = nn.Linear(20, 30)
    a = SparseLinear.from_dense(dense, sparsity=0.7)
    assert a.nnz == 180
    kept, all_sizes = a.values.detach().abs(), dense.weight.detach().abs().flatten().sort(descending=True).values
    assert torch.equal(kept.sort(descending=True).values, all_sizes[:180])
    assert torch.equal(
        a.to_dense().weight[a.pattern.rows.long(), a.pattern.cols.long()], dense.weight[a.pattern.rows.long(), a.pattern.cols.long()]
    )
    assert torch.equal(a.bias, dense.bias) and a.bias is not dense.bias


def test_from_dense_ties_go_to_the_first_in_row_major_order():
    dense = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        dense.weight.fill_(0.5)
    a = SparseLinear.from_dense(dense, sparsity=0.5)
    assert sorted(zip(a.pattern.rows.tolist(), a.pattern.cols.tolist())) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_from_dense_mask_random_nonzero():
    dense = nn.Linear(20, 30)
    mask = torch.rand(30, 20) < 0.3
    a = SparseLinear.from_dense(dense, mask=mask)
    assert torch.equal(a.to_dense().weight != 0, mask) and torch.equal(a.to_dense().weight, dense.weight * mask)
    b = SparseLinear.from_dense(dense, sparsity=0.9, how="random", generator=torch.Generator().manual_seed(1))
    assert b.nnz == 60 and torch.equal(b.values, dense.weight[b.pattern.rows.long(), b.pattern.cols.long()])
    with torch.no_grad():
        dense.weight[mask] = 0.0
    c = SparseLinear.from_dense(dense, how="nonzero")
    assert torch.equal(c.to_dense().weight, dense.weight) and c.nnz == 600 - int(mask.sum())


def test_from_dense_keeps_mode_and_frozen_parameters():
    dense = nn.Linear(5, 6).eval().requires_grad_(False)
    a = SparseLinear.from_dense(dense, sparsity=0.5)
    assert not a.training and not a.values.requires_grad and not a.bias.requires_grad
    assert not a.to_dense().training and not a.to_dense().weight.requires_grad


def test_from_coo_and_to_coo():
    a = SparseLinear.from_coo([2, 0, 1], [3, 0, 2], torch.tensor([1.0, 0.0, 3.0]), (3, 4), bias=torch.tensor([1.0, 2.0, 3.0]))
    rows, cols, values = a.to_coo()
    assert (rows.tolist(), cols.tolist(), values.tolist()) == ([0, 1, 2], [0, 2, 3], [0.0, 3.0, 1.0])
    assert a(torch.tensor([1.0, 1.0, 1.0, 1.0])).tolist() == [1.0, 5.0, 4.0]
    assert a.to_torch_csr().to_dense().tolist() == [[0, 0, 0, 0], [0, 0, 3, 0], [0, 0, 0, 1]]
    values.fill_(9.0)
    assert a.values.tolist() == [0.0, 3.0, 1.0]  # a copy


def test_explain():
    plans = layer().explain(batch=3)
    assert all("stream" in plans.pop(name) for name in ("spmm", "spmm_t", "sddmm"))
    if here().type == "cpu":
        assert not plans and "panel" in layer().explain(3, "panel")["spmm"]
    else:
        costs = plans.pop("costs")
        assert "table" in costs or "measured" in costs
        assert plans == {"rewire": "on the card", "topology rules": "on the card"}
        assert "kernel spmm_" in layer().explain(3)["spmm"] and "coo" in layer().explain(3, "coo")["spmm"]


# ---- it learns what a masked dense layer learns ----


@pytest.mark.parametrize("leading", [(8,), (2, 3), (), (0,)])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_backward_equal_masked_dense(leading, bias):
    a = layer(bias=bias, dtype=real())
    weight = a.to_dense().weight.detach().requires_grad_()
    mask = snack.formats.to_dense(a.pattern, torch.ones_like(a.values.detach()))
    x = torch.randn(*leading, 70, dtype=real())
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    b = a.bias.detach().clone().requires_grad_() if bias else None
    y, z = a(ours), F.linear(theirs, weight * mask, b)
    torch.testing.assert_close(y, z)
    target = torch.randn_like(y)
    (y * target).sum().backward()
    (z * target).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(a.values.grad, weight.grad[a.pattern.rows.long(), a.pattern.cols.long()])
    if bias:
        torch.testing.assert_close(a.bias.grad, b.grad)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        torch.optim.Adam,
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
    ],
    ids=["sgd", "adam", "adamw-foreach", "adamw-fused", "rmsprop", "adagrad", "nadam", "adamax", "adadelta"],
)
def test_every_stock_optimiser(make):
    """Fifteen steps equal those of a dense weight whose gradient is masked."""
    a = layer(dtype=real(), bias=False)
    weight = nn.Parameter(a.to_dense().weight.detach())
    mask = snack.formats.to_dense(a.pattern, torch.ones_like(a.values.detach()))
    ours, theirs = make(a.parameters()), make([weight])
    for _ in range(15):
        x = torch.randn(9, 70, dtype=real())
        for optimizer, loss in ((ours, a(x).square().mean()), (theirs, F.linear(x, weight * mask).square().mean())):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    close(a.to_dense().weight, weight * mask)


def test_no_gradient_for_what_needs_none():
    a = layer()
    a.values.requires_grad_(False)
    a(torch.randn(2, 70)).sum().backward()
    assert a.values.grad is None and a.bias.grad is not None


# ---- what PyTorch does to modules ----


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(twin):
    a = layer()
    a(torch.randn(2, 70)).sum().backward()
    b = twin(a)
    assert same(a.state_dict(), b.state_dict()) and b.values is not a.values and b.pattern.equals(a.pattern)
    assert b.index.data_ptr() != a.index.data_ptr()
    x = torch.randn(2, 70)
    assert torch.equal(a(x), b(x))
    with torch.no_grad():
        b.values.zero_()
    assert bool((a.values != 0).any())


def test_torch_save_whole_module(tmp_path):
    a = layer()
    torch.save(a, tmp_path / "a.pt")
    assert same(torch.load(tmp_path / "a.pt", weights_only=False).state_dict(), a.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    a = layer()
    before = a.pattern.clone()
    a.to(dtype)
    assert a.values.dtype == a.bias.dtype == dtype and a.pattern.equals(before) and a(torch.randn(2, 70).to(dtype)).dtype == dtype
    assert layer().half().values.dtype == torch.float16 and layer().bfloat16()(torch.ones(1, 70, dtype=torch.bfloat16)).shape == (1, 33)


def test_memory_without_a_topology_is_refused():
    """Buffers of a layer without memory, replaced one by one; our own ways to give it memory are other tests."""
    a, b = layer(device="meta"), layer()
    fails(["built without memory", "from_pretrained", "snack.load"], setattr, a, "index", torch.empty_like(b.index))
    assert a.index.is_meta
    a.index = torch.empty_like(a.index)
    b.index = b.index.clone()


def test_meta_and_back():
    """A meta layer has the shapes and no memory; to_empty gives it a valid topology, the one its seed stands for."""
    torch.manual_seed(7)
    a = layer(device="meta")
    assert a.values.is_meta and a.index.is_meta and a.nnz == 462 and a(torch.empty(5, 70, device="meta")).shape == (5, 33)
    assert "nnz=462" in repr(a)
    a.to_empty(device=here())
    a.reset_parameters()
    assert len(set(zip(a.pattern.rows.tolist(), a.pattern.cols.tolist()))) == 462
    assert bool(a(torch.randn(2, 70)).isfinite().all())
    torch.manual_seed(7)
    assert layer().pattern.equals(a.pattern)
    with torch.device("meta"):
        assert layer().values.is_meta
    assert layer().to("meta").index.is_meta


def test_autocast():
    a = layer()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(here().type, dtype=dtype):
            y = a(torch.randn(4, 70))
        assert y.dtype == dtype
        y.float().sum().backward()
        assert a.values.grad.dtype == a.bias.grad.dtype == torch.float32
        a.zero_grad()


def test_clip_and_hooks_and_functional_call():
    a = layer()
    a(torch.randn(2, 70)).square().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(a.parameters(), 0.1)
    assert float(norm) > 0.1 and abs(float(torch.nn.utils.get_total_norm([p.grad for p in a.parameters()])) - 0.1) < 1e-4
    zero = {k: torch.zeros_like(v) for k, v in a.named_parameters()}
    assert not bool(torch.func.functional_call(a, zero, (torch.randn(2, 70),)).any())


def test_activation_checkpointing():
    a = layer(dtype=real())
    x = torch.randn(3, 70, dtype=real(), requires_grad=True)
    torch.utils.checkpoint.checkpoint(a, x, use_reentrant=False).square().sum().backward()
    through, a.values.grad = a.values.grad, None
    a(x).square().sum().backward()
    torch.testing.assert_close(through, a.values.grad)


# ---- compilation ----


@pytest.mark.slow
def test_compile():
    """One graph forward and backward, the eager numbers, and no recompilation after a rewire at constant nnz."""
    torch._dynamo.reset()
    model = nn.Sequential(layer(), nn.ReLU(), SparseLinear(33, 5, sparsity=0.5))
    x = torch.randn(8, 70)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    fast = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=backend, bw_compiler=backend))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            model.zero_grad()
            y = fast(x)
            y.square().sum().backward()
            compiled = [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
            z = model(x)
            z.square().sum().backward()
            torch.testing.assert_close(y, z)
            for ours, theirs in zip(compiled, model.parameters()):
                torch.testing.assert_close(ours, theirs.grad)
            first = model[0]
            rows, cols = snack.ops.grow_uniform(first.pattern, 20, 1)
            first.rewire(drop=range(20), grow=(rows, cols), values=torch.ones(20))
    assert len(graphs) == 2  # a forward and a backward
    code = graphs[0].print_readable(print_output=False)
    assert code.count("torch.ops.snack.spmm.default") == 2
    torch._dynamo.reset()


@pytest.mark.slow
def test_compile_inductor():
    torch._dynamo.reset()
    a = layer()
    x = torch.randn(4, 70, requires_grad=True)
    y = torch.compile(lambda t: torch.relu(a(t) * 2).sum(), fullgraph=True)(x)
    y.backward()
    compiled, x.grad = x.grad, None
    z = torch.relu(a(x) * 2).sum()
    z.backward()
    torch.testing.assert_close(y, z)
    torch.testing.assert_close(compiled, x.grad)
    torch._dynamo.reset()


def test_export():
    exported = torch.export.export(nn.Sequential(layer(), nn.ReLU()), (torch.randn(4, 70),))
    assert "snack.spmm" in str(exported.graph)


# ---- bad input ----


@pytest.mark.parametrize("sparsity", [float("nan"), -0.1, 1.0, 1.5, float("inf"), "lots", None])
def test_bad_sparsity(sparsity):
    fails([repr(sparsity), "0 <= sparsity < 1"], SparseLinear, 4, 5, sparsity=sparsity)
    fails(["sparsity"], SparseLinear.from_dense, nn.Linear(4, 5), sparsity)


def test_bad_construction():
    fails(["(5, -1)"], SparseLinear, -1, 5, sparsity=0.5)
    fails(["2147483647"], SparseLinear, 2**31, 5, sparsity=0.5)
    fails(["int32", "floating"], SparseLinear, 4, 5, sparsity=0.5, dtype=torch.int32)
    fails(["Conv2d"], SparseLinear.from_dense, nn.Conv2d(1, 1, 1), 0.5)
    fails(["mask", "(4, 5)", "(5, 4)"], SparseLinear.from_dense, nn.Linear(4, 5), mask=torch.ones(4, 5))
    fails(["either sparsity or mask"], SparseLinear.from_dense, nn.Linear(4, 5), 0.5, torch.ones(5, 4))
    fails(["'best'", "magnitude"], SparseLinear.from_dense, nn.Linear(4, 5), 0.5, how="best")
    fails(["nonzero", "no sparsity"], SparseLinear.from_dense, nn.Linear(4, 5), 0.5, how="nonzero")
    fails(["bias", "(2,)", "(3,)"], SparseLinear.from_coo, [0], [0], [1.0], (3, 4), bias=torch.ones(2))
    fails(["twice"], SparseLinear.from_coo, [0, 0], [0, 0], [1.0, 2.0], (3, 4))
    fails(["int64"], SparseLinear.from_coo, [0], [0], [1], (3, 4))


def test_bad_calls():
    a = layer()
    fails(["SparseLinear", "(2, 69)", "in_features=70"], a, torch.ones(2, 69))
    fails(["float64", "float32"], a, torch.ones(2, 70, dtype=torch.float64))
    fails(["int64"], a, torch.ones(2, 70, dtype=torch.int64))
    fails(["meta"], a, torch.ones(2, 70, device="meta"))
    fails(["ndarray"], a, torch.ones(2, 70, device="cpu").numpy())
    fails(["'fast'"], a.explain, 3, "fast")
    fails(["(3,)", "(462,)"], a.rewire().apply, torch.ones(3))


def test_function_transforms_agree_with_autograd():
    """grad, per-sample gradients, forward mode and the Hessian, against the dense layer."""
    torch.manual_seed(0)
    layer = SparseLinear(12, 5, sparsity=0.6, dtype=real())
    dense = layer.to_dense()
    rows, cols = (c.long() for c in layer.pattern.coordinates())
    x = torch.randn(7, 12, dtype=real())
    parameters, dense_parameters = dict(layer.named_parameters()), dict(dense.named_parameters())

    def loss(module, values, x):
        return (torch.func.functional_call(module, values, (x,)) ** 2).sum()

    gradient = torch.func.grad(lambda p: loss(layer, p, x))(parameters)
    expected = torch.func.grad(lambda p: loss(dense, p, x))(dense_parameters)
    close(gradient["values"], expected["weight"][rows, cols])
    close(gradient["bias"], expected["bias"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        each = torch.func.vmap(torch.func.grad(lambda p, x: loss(layer, p, x[None])), (None, 0))(parameters, x)
        hessian = torch.func.hessian(lambda x: loss(layer, parameters, x))(x[:1])
    close(each["values"].sum(0), gradient["values"])
    close(hessian, torch.func.hessian(lambda x: loss(dense, dense_parameters, x))(x[:1]))
    cotangent = torch.randn(7, 5, dtype=real())
    backward = torch.func.vjp(lambda p: torch.func.functional_call(layer, p, (x,)), parameters)[1]
    close(backward(cotangent)[0]["values"], (cotangent.t() @ x)[rows, cols])  # called when the transform is over
    tangent = torch.randn_like(x)
    close(torch.func.jvp(layer, (x,), (tangent,))[1], tangent @ dense.weight.t())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        forward = torch.autograd.forward_ad.unpack_dual(layer.requires_grad_(False)(dual)).tangent
    close(forward, tangent @ dense.weight.t())


def test_many_gradients_of_one_call():
    """torch.autograd.grad(..., is_grads_batched=True) runs the backward pass of an ordinary call under vmap."""
    layer = SparseLinear(12, 5, sparsity=0.6, dtype=real())
    dense = layer.to_dense()
    rows, cols = (c.long() for c in layer.pattern.coordinates())
    x = torch.randn(3, 12, dtype=real(), requires_grad=True)
    directions = torch.randn(4, 3, 5, dtype=real())
    ours, theirs = (
        torch.autograd.grad(module(x), (x, *module.parameters()), directions, is_grads_batched=True) for module in (layer, dense)
    )
    close(ours[0], theirs[0])
    close(ours[1], theirs[1][:, rows, cols])
    close(ours[2], theirs[2])


@pytest.mark.cpu_only  # numerical derivatives need float64
@pytest.mark.parametrize("operation", ["spmm", "spmm_t", "sddmm"])
def test_forward_mode_of_every_product(operation):
    layer = SparseLinear(6, 4, sparsity=0.4, dtype=torch.float64)
    x, dy = (torch.randn(3, n, dtype=torch.float64, requires_grad=True) for n in (6, 4))
    values = layer.values.detach().requires_grad_()
    arguments = {"spmm": (values, x, layer.bias), "spmm_t": (values, dy), "sddmm": (dy, x)}[operation]
    assert torch.autograd.gradcheck(lambda *a: getattr(ops, operation)(layer.pattern, *a), arguments, check_forward_ad=True)


def test_replicas_and_late_backward():
    layer = SparseLinear(12, 5, sparsity=0.5)
    x = torch.randn(2, 12)
    replica = layer._replicate_for_data_parallel()
    replica._former_parameters = {}
    for name, parameter in layer._parameters.items():
        setattr(replica, name, parameter.clone())
    assert torch.equal(replica(x), layer(x))
    loss = layer(x).sum()
    layer.rewire(drop=[0, 1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
