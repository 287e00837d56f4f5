"""spmm, spmm_t, sddmm: reference against hand-written numbers, every device against the reference, and what PyTorch asks of an
operator. (Large and odd problems on a card: test_cuda.py.)"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import problems
import snack
from checks import fails
from snack import ops
from snack.errors import SnackError

OPERATIONS = problems.OPERATIONS
STREAM, PANEL = ops.REGIMES["stream"], ops.REGIMES["panel"]

# 3 x 4:  [[1 0 2 0]
#          [0 0 0 0]
#          [0 3 0 4]]
ROWS, COLS, VALUES = [2, 0, 2, 0], [3, 0, 1, 2], [4.0, 1.0, 3.0, 2.0]
X = [[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 0.0, -1.0]]
DY = [[1.0, 5.0, 2.0], [-1.0, 7.0, 3.0]]


def check_hand_written(namespace, dtype, device):
    def tensor(data):
        return torch.tensor(data, dtype=dtype, device=device)

    pattern, values = snack.formats.from_coo(ROWS, COLS, tensor(VALUES), (3, 4))
    packed, x, dy, bias = (pattern.index, pattern.tile_ptr), tensor(X), tensor(DY), tensor([10.0, 20.0, 30.0])
    assert pattern.device.type == values.device.type == torch.device(device).type
    assert pattern.rows.tolist() == [0, 0, 2, 2] and pattern.cols.tolist() == [0, 2, 1, 3] and values.tolist() == [1, 2, 3, 4]
    assert namespace.spmm(*packed, values, x, None, 3, 4).tolist() == [[7, 0, 22], [0, 0, -1]]
    assert namespace.spmm(*packed, values, x, bias, 3, 4).tolist() == [[17, 20, 52], [10, 20, 29]]
    assert namespace.spmm_t(*packed, values, dy, 3, 4).tolist() == [[1, 6, 2, 8], [-1, 9, -2, 12]]
    assert namespace.sddmm(*packed, dy, x, 3, 4).tolist() == [1, 3, 4 + 3, 8 - 3]


@pytest.mark.parametrize("dtype", problems.DTYPES)
def test_hand_written(device, dtype):
    check_hand_written(torch.ops.snack, dtype, device)


@pytest.mark.parametrize("dtype", problems.DTYPES)
def test_hand_written_reference(dtype):
    check_hand_written(torch.ops.snack_reference, dtype, "cpu")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_reference_equals_dense(operation):
    """The specification against PyTorch's dense product, over two column panels."""
    p = problems.make(70, 1030, 3, 0.2, torch.float64)
    w = p.dense()
    dense = {"spmm": p.x @ w.t() + p.bias, "spmm_t": p.dy @ w}
    dense["sddmm"] = (p.dy.t() @ p.x)[p.pattern.rows.long(), p.pattern.cols.long()]
    torch.testing.assert_close(problems.run(torch.ops.snack_reference, operation, p), dense[operation], rtol=1e-12, atol=1e-12)


EXTENTS = st.sampled_from([0, 1, 2, 3, 7, 8, 15, 17, 31, 64, 65, 100, 129, 257])
WIDE = st.sampled_from([1, 16, 1023, 1024, 1025, 2100])
BATCHES = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 16, 31, 33, 64, 65, 130])


def check_all(p, regime, with_bias=True):
    for operation in OPERATIONS:
        problems.check(operation, p, regime, with_bias)


@pytest.mark.isa
@settings(max_examples=50 if "SNACK_ISA" in os.environ else 250)
@given(
    out=EXTENTS,
    in_=st.one_of(EXTENTS, WIDE),
    batch=BATCHES,
    density=st.sampled_from([0.01, 0.1, 0.5]),
    dtype=st.integers(0, 3),
    topology=st.sampled_from(problems.TOPOLOGIES),
    x_layout=st.sampled_from(problems.LAYOUTS),
    dy_layout=st.sampled_from(problems.LAYOUTS),
    align=st.booleans(),
    with_bias=st.booleans(),
    regime=st.integers(0, 1),
    seed=st.integers(0, 99),
)
@example(65, 129, 65, 0.5, 2, "uniform", "strided", "transposed", False, True, 0, 0)
@example(65, 1025, 3, 0.5, 1, "empty rows", "expanded", "expanded", False, True, 1, 0)
@example(17, 0, 3, 0.5, 0, "none", "contiguous", "contiguous", True, True, 0, 0)
@example(0, 17, 3, 0.5, 0, "none", "contiguous", "contiguous", True, True, 1, 0)
def test_equals_reference(device, out, in_, batch, density, dtype, topology, x_layout, dy_layout, align, with_bias, regime, seed):
    kinds = problems.dtypes(device)
    p = problems.make(out, in_, batch, density, kinds[dtype % len(kinds)], topology, x_layout, dy_layout, align, seed, device)
    check_all(p, problems.regimes(device)[regime], with_bias)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", problems.DTYPES)
@pytest.mark.parametrize("regime", [0, 1], ids=["stream", "panel or coo"])
@pytest.mark.parametrize("batch", [3, 65])
def test_large_enough_for_threads_and_panels(two_threads, device, dtype, regime, batch):
    """Both packings of the index, several column panels, several decoded panels, work for two threads."""
    for density in (0.1, 0.0005):  # narrow tiles; tall tiles
        check_all(problems.make(300, 1100, batch, density, dtype, align=False, device=device), problems.regimes(device)[regime])


@pytest.mark.parametrize("operation", ["spmm", "sddmm"])
@pytest.mark.parametrize("batch", [1, 4, 65])
def test_threads_do_not_change_a_bit(operation, batch):
    p = problems.make(500, 1100, batch, 0.15)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        check_all(p, STREAM)
        results.append(problems.run(torch.ops.snack, operation, p, regime=STREAM))
    assert torch.equal(*results)


@pytest.mark.parametrize("isa", ["base", "avx2"])
@pytest.mark.slow
def test_other_instruction_sets(isa):
    """The tests marked `isa`, in a process of its own that is limited to an older instruction set."""
    if isa == "avx2" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no avx2")
    code = f"import torch, snack, sys; sys.exit(torch.ops.snack.cpu_isa() != {isa!r})"
    environment = os.environ | {"SNACK_ISA": isa}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
    here = Path(__file__)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "isa and not cuda",
        "-o",
        "addopts=--strict-markers",
        "-p",
        "no:cacheprovider",
        str(here),
    ]
    done = subprocess.run(command, env=environment, cwd=here.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout


# ---- leading dimensions ----


@pytest.mark.parametrize("leading", [(), (1,), (0,), (2, 3), (2, 0, 3), (1, 2, 3)])
def test_leading_dimensions(device, leading):
    dtype = problems.dtypes(device)[-1 if device.type == "cpu" else 0]
    p = problems.make(5, 7, 6, 0.4, dtype, device=device)
    w, x, dy = p.dense(dtype), *(torch.randn(*leading, n, dtype=dtype, device=device) for n in (7, 5))
    torch.testing.assert_close(ops.spmm(p.pattern, p.values, x, p.bias), torch.nn.functional.linear(x, w, p.bias))
    torch.testing.assert_close(ops.spmm_t(p.pattern, p.values, dy), dy @ w)
    full = dy.reshape(-1, 5).t() @ x.reshape(-1, 7)
    torch.testing.assert_close(ops.sddmm(p.pattern, dy, x), full[p.pattern.rows.long(), p.pattern.cols.long()])


def test_leading_dimensions_of_a_strided_view(device):
    p = problems.make(5, 7, 1, 0.4, device=device)
    x = torch.randn(7, 4, 3, device=device).permute(2, 1, 0)
    torch.testing.assert_close(ops.spmm(p.pattern, p.values, x).double(), x.double() @ p.dense().t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_extents(on_device, shape):
    pattern, values = snack.formats.from_coo([], [], torch.empty(0), shape)
    y = ops.spmm(pattern, values, torch.ones(2, 3, shape[1]), torch.ones(shape[0]))
    assert y.shape == (2, 3, shape[0]) and bool((y == 1).all())
    dx = ops.spmm_t(pattern, values, torch.ones(2, 3, shape[0]))
    assert dx.shape == (2, 3, shape[1]) and bool((dx == 0).all())
    assert ops.sddmm(pattern, torch.ones(2, shape[0]), torch.ones(2, shape[1])).shape == (0,)


# ---- Inf and NaN ----


@pytest.mark.isa
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["operands", "values"])
def test_inf_and_nan_arrive_where_a_connection_leads(device, bad, batch, dtype, where):
    """A connection that does not exist passes nothing on: 0 * inf happens nowhere."""
    p = problems.make(40, 33, batch, 0.1, dtype, "empty rows", device=device)
    row, col, last = 1, int(p.pattern.cols[p.pattern.rows == 1][0]), batch - 1
    if where == "operands":
        p.x[last, col], p.dy[0, row] = bad, bad
    else:
        p.values[p.pattern.nnz // 2] = bad
    for operation in OPERATIONS[: 3 if where == "operands" else 2]:
        actual = problems.run(torch.ops.snack, operation, p, regime=STREAM).cpu()
        expected = problems.truth(operation, p).to(dtype)
        assert torch.equal(actual.isnan(), expected.isnan()) and torch.equal(actual.isinf(), expected.isinf()), operation
        assert torch.equal(actual[actual.isinf()], expected[expected.isinf()])
        assert not bool(expected.isfinite().all()) and bool(expected.isfinite().any())


@pytest.mark.parametrize("regime", [PANEL, ops.REGIMES["auto"]], ids=["panel", "auto"])
def test_inf_and_nan_in_panels(regime):
    p = problems.make(40, 33, 64, 0.5)
    p.x[3, 4] = float("inf")
    assert torch.equal(problems.run(torch.ops.snack, "spmm", p, regime=regime).isnan(), problems.truth("spmm", p).isnan())


# ---- derivatives ----


def gradient_case():
    p = problems.make(5, 6, 3, 0.4, torch.float64, seed=1)
    leaves = [t.detach().clone().requires_grad_() for t in (p.values, p.x, p.bias, p.dy)]
    return p.pattern, *leaves


@pytest.mark.parametrize("regime", ["stream", "panel"])
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck], ids=["first", "second"])
def test_derivatives(regime, check):
    pattern, values, x, bias, dy = gradient_case()
    assert check(lambda v, x, b: ops.spmm(pattern, v, x, b, regime), (values, x, bias))
    assert check(lambda v, x: ops.spmm(pattern, v, x, None, regime), (values, x))
    assert check(lambda v, g: ops.spmm_t(pattern, v, g, regime), (values, dy))
    assert check(lambda g, x: ops.sddmm(pattern, g, x, regime), (dy, x))


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck], ids=["first", "second"])
def test_derivatives_of_the_registered_operators(check):
    """The route of torch.compile and autocast, which eager calls may bypass."""
    pattern, values, x, bias, dy = gradient_case()
    packed, s = (pattern.index, pattern.tile_ptr), torch.ops.snack
    assert check(lambda v, x, b: s.spmm(*packed, v, x, b, *pattern.shape), (values, x, bias))
    assert check(lambda v, g: s.spmm_t(*packed, v, g, *pattern.shape), (values, dy))
    assert check(lambda g, x: s.sddmm(*packed, g, x, *pattern.shape), (dy, x))


def test_only_what_is_asked_for_gets_a_gradient():
    pattern, values, x, bias, _ = gradient_case()
    ops.spmm(pattern, values.detach(), x, bias.detach()).sum().backward()  # sum(): the gradient arrives with stride 0
    torch.testing.assert_close(x.grad, snack.formats.to_dense(pattern, values.detach()).sum(0).expand_as(x))
    assert values.grad is None and bias.grad is None


# ---- what PyTorch asks of an operator ----


def operator_calls(device="cpu"):
    p = problems.make(6, 7, 3, 0.3, device=device)
    (index, tile_ptr), shape = p.packed, p.pattern.shape
    leaf = lambda t: t.detach().clone().requires_grad_()  # noqa: E731
    empty = torch.empty(0, dtype=torch.int64, device=device)
    rows, cols = ops.grow_uniform(p.pattern, 2, 5)
    moved, fills = (index.clone(), tile_ptr.clone()), torch.zeros(2, device=device)
    s, numbers = torch.ops.snack, [0.1, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0]  # of SGD with momentum
    return {
        "spmm": (s.spmm, (index, tile_ptr, leaf(p.values), leaf(p.x), leaf(p.bias), *shape, 0)),
        "spmm without bias": (s.spmm, (index, tile_ptr, leaf(p.values), leaf(p.x), None, *shape, 0)),
        "spmm_t": (s.spmm_t, (index, tile_ptr, leaf(p.values), leaf(p.dy), *shape, 0)),
        "sddmm": (s.sddmm, (index, tile_ptr, leaf(p.dy), leaf(p.x), *shape, 0)),
        "spmm_recorded": (s.spmm_recorded, (index, tile_ptr, leaf(p.values), leaf(p.x), leaf(p.bias), *shape, 0)),
        "sddmm_recorded": (s.sddmm_recorded, (index, tile_ptr, leaf(p.dy), leaf(p.x), *shape, 0)),
        "sddmm_update": (s.sddmm_update, (index, tile_ptr, p.values.clone(), [p.values.clone()], p.dy, p.x, None, None, 0, numbers, *shape, 0)),
        "rewire": (s.rewire, (index, tile_ptr, torch.tensor([0, 3], device=device), rows, cols, *shape)),
        "pack": (s.pack, (rows, cols, *shape, False)),
        "unpack": (s.unpack, (index, tile_ptr, *shape)),
        "select_smallest": (s.select_smallest, (p.values, 3, 0)),
        "grow_uniform": (s.grow_uniform, (index, tile_ptr, empty, 2, 5, *shape)),
        "grow_gradient": (s.grow_gradient, (index, tile_ptr, empty, p.dy, p.x, 2, *shape)),
        "exchange_": (s.exchange_, (*moved, [p.values.clone(), p.values.clone()], fills, 0, 0.3, 2, 0, 5, None, None, *shape)),
        "exchange_ by gradient": (s.exchange_, (*moved, [p.values.clone()], fills[:1], 1, 0.3, 2, 1, 5, p.dy, p.x, *shape)),
    }


@pytest.mark.parametrize("name", operator_calls())
def test_opcheck(device, name):
    operator, arguments = operator_calls(device)[name]
    torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("name", operator_calls())
def test_fake_tensors_on_a_card_that_is_not_there(name):
    """What torch.compile and torch.export see: the same shapes and dtypes, on the operands' device."""
    operator, arguments = operator_calls()[name]
    real = operator(*arguments)
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = tree_map_only(torch.Tensor, lambda a: torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cuda"), arguments)
        fake = operator(*there)
    if real is None:
        return
    for ours, theirs in zip(*(r if isinstance(r, tuple) else (r,) for r in (fake, real)), strict=True):
        assert ours.device.type == "cuda" and ours.dtype == theirs.dtype
        assert name == "pack" or (ours.shape == theirs.shape and ours.stride() == theirs.stride())


def test_every_operator_is_checked():
    """A new operator must be added above (those without tensor inputs have nothing to check)."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("snack::")]
    with_tensors = {s.name.split("::")[1] for s in schemas if any(a.type.kind() == "TensorType" for a in s.arguments)}
    assert with_tensors == {op._qualified_op_name.split("::")[1] for op, _ in operator_calls().values()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    """Master weights stay float32, the product runs in `dtype`, gradients arrive in float32; as nn.Linear does."""
    p = problems.make(33, 70, 5, 0.2, device=device)
    values, x, bias = (t.detach().clone().requires_grad_() for t in (p.values, p.x, p.bias))
    with torch.autocast(device.type, dtype=dtype):
        y = ops.spmm(p.pattern, values, x, bias)
        assert y.dtype == dtype
        y16 = ops.spmm(p.pattern, p.values.to(dtype), p.x.to(dtype), p.bias.to(dtype))
        assert torch.equal(y, y16)
        mixed = ops.spmm(p.pattern, values, p.x.to(dtype), bias)
        assert torch.equal(mixed, y)
    y.float().square().sum().backward()
    assert values.grad.dtype == x.grad.dtype == bias.grad.dtype == torch.float32
    w = p.dense().requires_grad_()
    (p.x.double() @ w.t() + p.bias).square().sum().backward()
    expected = w.grad[p.pattern.rows.long(), p.pattern.cols.long()]
    torch.testing.assert_close(values.grad.double(), expected, rtol=0, atol=float(expected.abs().max()) * 20 * torch.finfo(dtype).eps)


def test_autocast_leaves_float64_alone():
    p = problems.make(5, 6, 2, 0.5, torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.spmm(p.pattern, p.values, p.x).dtype == torch.float64


def test_fake_tensors_have_the_right_shapes():
    p = problems.make(6, 7, 3, 0.3)
    index, tile_ptr, values, x, dy = (t.to("meta") for t in (*p.packed, p.values, p.x, p.dy))
    assert torch.ops.snack.spmm(index, tile_ptr, values, x, None, 6, 7).shape == (3, 6)
    assert torch.ops.snack.spmm_t(index, tile_ptr, values, dy, 6, 7).shape == (3, 7)
    assert torch.ops.snack.sddmm(index, tile_ptr, dy, x, 6, 7).shape == values.shape


# ---- bad input ----


def test_bad_input(device):
    p = problems.make(5, 7, 3, 0.4, device=device)
    pattern, values, x, dy = p.pattern, p.values, p.x, p.dy
    fails(["(3, 6)", "in_features=7"], ops.spmm, pattern, values, torch.ones(3, 6, device=device))
    fails(["()", "in_features=7"], ops.spmm, pattern, values, torch.tensor(1.0))
    fails(["(3, 7)", "out_features=5"], ops.spmm_t, pattern, values, x)
    fails(["meta", device.type], ops.spmm, pattern, values, x.to("meta"))
    fails(["float64", "float32", "autocast"], ops.spmm, pattern, values, x.double())
    fails(["int64", "float32"], ops.spmm, pattern, values, x.long())
    fails(["list", "tensor"], ops.spmm, pattern, values, [[1.0] * 7])
    fails(["leading dimensions", "(3,)", "(2,)"], ops.sddmm, pattern, dy, x[:2])
    fails(["regime", "'fast'", "stream"], ops.spmm, pattern, values, x, regime="fast")
    for bad_regime in ("coo" if device.type == "cpu" else "panel", "tensor"):
        with pytest.raises((SnackError, RuntimeError), match="stream"):
            ops.spmm(pattern, values, x, regime=bad_regime)
    for bad_values in (values[1:], torch.cat([values, values]), values[None]):
        with pytest.raises((SnackError, RuntimeError), match="connections"):
            ops.spmm(pattern, bad_values, x)
    with pytest.raises((SnackError, RuntimeError), match="bias"):
        ops.spmm(pattern, values, x, torch.ones(4, device=device))


def test_operators_refuse_a_pattern_that_is_none(device):
    """Direct callers of torch.ops.snack.* get an error, not a crash."""
    p = problems.make(5, 7, 3, 0.4, device=device)
    index, tile_ptr = p.packed
    for bad in ((index.long(), tile_ptr), (index, tile_ptr[:-1]), (index[1:], tile_ptr), (index, tile_ptr.int()), (index[None], tile_ptr)):
        with pytest.raises(RuntimeError):
            torch.ops.snack.spmm(*bad, p.values, p.x, None, 5, 7)


@pytest.mark.isa
def test_half_precision_rounds_and_overflows(on_device):
    """One connection, so that the result is one rounded product; Inf, NaN, overflow, ties and subnormals."""
    p = snack.Pattern([0], [0], (1, 1)).to(on_device)
    a = torch.tensor([1, 1, 60000, 1.000167e-4, 1, 1, 6e-8, -1.5, 1.0], dtype=torch.float16)
    b = torch.tensor([torch.inf, torch.nan, 60000, 0.330078, -torch.inf, 65504, 1, 0, -0.0], dtype=torch.float16)
    got = torch.stack([ops.spmm(p, v[None], x[None, None])[0, 0] for v, x in zip(a, b)])
    torch.testing.assert_close(got, (a.double() * b.double()).half(), rtol=0, atol=0, equal_nan=True)
    batch = torch.linspace(-3, 3, 37, dtype=torch.float16)[:, None]
    for scale in (1.0, 0.1, 1e-4):
        v = torch.tensor([scale], dtype=torch.float16)
        torch.testing.assert_close(ops.spmm(p, v, batch), (batch.double() * v.double()).half(), rtol=0, atol=0)
