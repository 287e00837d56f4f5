"""Products and edits on a card that the shared tests (device=cuda) do not reach: large batches and shapes, streams, graphs, limits.

Collected only where there is a card. Everything is held against the float64 reference on the CPU.
"""

import copy
import gc
import json
import subprocess
import sys

import pytest
import torch

import problems
import snack
from checks import fails, same, snapshot
from problems import OPERATIONS, check, make, make_large
from snack import ops
from snack.cli.main import main
from snack.nn import SparseLinear, state
from snack.nn.slot_map import SlotMap
from snack.ops.products import regime_code

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
DTYPES = problems.dtypes(DEVICE)
STREAM, COO = ops.REGIMES["stream"], ops.REGIMES["coo"]


def check_all(p, regime=0):
    return [check(operation, p, regime) for operation in OPERATIONS]


# ---- shapes and batches ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 1, 3, 33, 257])
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (1, 65537), (65537, 1), (33, 65537), (257, 129), (1025, 2049)])
def test_shapes_and_batches(shape, batch, dtype):
    out, in_ = shape
    for density in (0.05, 0.0005):  # narrow tiles where there are enough slots; tall tiles
        p = make_large(out, in_, batch, round(density * out * in_), dtype, DEVICE, seed=batch)
        for regime in (STREAM, COO):
            check_all(p, regime)


@pytest.mark.parametrize("regime", [STREAM, COO], ids=["stream", "coo"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nnz", [900, 20])
def test_batch_beyond_a_grid_dimension(dtype, regime, nnz):
    """70,000 rows: more than gridDim.y and gridDim.z hold."""
    check_all(make_large(65, 130, 70_000, nnz, dtype, DEVICE), regime)


@pytest.mark.parametrize("topology", problems.TOPOLOGIES)
@pytest.mark.parametrize("batch", [1, 5, 70])
def test_topologies(topology, batch):
    for regime in (STREAM, COO):
        check_all(make(129, 1100, batch, 0.05, topology=topology, align=False, device=DEVICE), regime)


@pytest.mark.parametrize(("nnz", "word"), [(1_500_000, torch.int16), (100_000, torch.int32)], ids=["narrow", "tall"])
def test_more_positions_than_an_int32_counts(nnz, word):
    p = make_large(50_000, 50_000, 3, nnz, device=DEVICE)
    assert p.pattern.index.dtype == word and p.pattern.shape[0] * p.pattern.shape[1] > 2**31
    check_all(p)


def test_more_products_than_an_int32_counts():
    """batch * features, and nnz * batch of the atomics, above 2**31; all rows of the batch are equal, and so are the results."""
    batch = 70_000
    p = make_large(65, 65_537, 1, 900, torch.float16, DEVICE)
    y = ops.spmm(p.pattern, p.values, p.x.expand(batch, -1), p.bias)
    assert bool((y == y[0]).all()) and torch.equal(y[:1], ops.spmm(p.pattern, p.values, p.x, p.bias))
    dx = ops.spmm_t(p.pattern, p.values, p.dy.expand(batch, -1))
    assert dx.numel() > 2**32 and bool((dx[-1] == dx[0]).all()) and torch.equal(dx[batch // 2], ops.spmm_t(p.pattern, p.values, p.dy)[0])
    del dx
    p = make_large(65, 2000, 1, 40_000, torch.float32, DEVICE)
    y = ops.spmm(p.pattern, p.values, p.x.expand(batch, -1), regime="coo")
    assert torch.allclose(y[[0, batch // 2, -1]], ops.spmm(p.pattern, p.values, p.x).expand(3, -1), rtol=1e-3, atol=1e-3)


def test_a_million_squared():
    check_all(make_large(1_000_000, 1_000_000, 2, 500_000, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_dimensions_strides_and_offsets(dtype):
    p = make(65, 130, 24, 0.2, dtype, device=DEVICE)
    y = ops.spmm(p.pattern, p.values, p.x, p.bias)
    x = torch.empty(130, 4, 2, 3, dtype=dtype, device=DEVICE).permute(3, 1, 2, 0)
    x.copy_(p.x.view(3, 4, 2, 130))
    assert torch.equal(ops.spmm(p.pattern, p.values, x, p.bias).view(24, 65), y)
    wide = torch.full((48, 131), float("nan"), dtype=dtype, device=DEVICE)
    wide[::2, 1:] = p.x
    assert torch.equal(ops.spmm(p.pattern, p.values, wide[::2, 1:], p.bias), y)
    assert torch.equal(ops.spmm(p.pattern, problems.misaligned(p.values), p.x, problems.misaligned(p.bias)), y)
    once = p.x[:1].expand(24, 130)
    assert torch.equal(ops.spmm(p.pattern, p.values, once), ops.spmm(p.pattern, p.values, once.contiguous()))


# ---- determinism, Inf and NaN ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nnz", [60_000, 600], ids=["narrow", "tall"])
@pytest.mark.parametrize("batch", [1, 4, 200])
def test_two_runs_are_bit_identical(deterministic, nnz, dtype, batch):
    p = make_large(700, 3000, batch, nnz, dtype, DEVICE)
    first = check_all(p)
    for _ in range(5):
        assert all(torch.equal(problems.run(torch.ops.snack, o, p), y) for o, y in zip(OPERATIONS, first))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_atomics_are_refused_where_determinism_is_asked_for(deterministic):
    p = make(33, 70, 3, 0.2, device=DEVICE)
    for call in (
        lambda: ops.spmm(p.pattern, p.values, p.x, regime="coo"),
        lambda: ops.spmm_t(p.pattern, p.values, p.dy, "coo"),
        lambda: ops.sddmm(p.pattern, p.dy, p.x, "coo"),
    ):
        fails(["'coo'", "deterministic", "stream"], call)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="atomics"):
        ops.spmm(p.pattern, p.values, p.x, regime="coo")


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", ["x", "dy", "values"])
@pytest.mark.parametrize(("out", "in_", "nnz"), [(300, 1100, 16_000), (300, 1100, 100)], ids=["narrow", "tall"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_inf_and_nan_arrive_where_a_connection_leads(dtype, out, in_, nnz, where, bad):
    """Exactly there: a structural zero multiplies nothing."""
    for batch in (1, 3, 40):
        p = make_large(out, in_, batch, nnz, dtype, DEVICE, seed=3)
        slot, last = nnz // 3, batch - 1
        row, col = int(p.pattern.rows[slot]), int(p.pattern.cols[slot])
        if where == "values":
            p.values[slot] = bad
        elif where == "x":
            p.x[last, col] = bad
        else:
            p.dy[last, row] = bad
        for operation in OPERATIONS:
            for regime in (STREAM, COO):
                actual = problems.run(torch.ops.snack, operation, p, regime=regime).cpu()
                expected = problems.truth(operation, p).to(dtype)
                assert torch.equal(actual.isnan(), expected.isnan()), (operation, regime)
                assert torch.equal(actual.isinf(), expected.isinf()), (operation, regime)
                assert torch.equal(actual[actual.isinf()], expected[expected.isinf()])


# ---- streams ----


def test_work_is_ordered_on_the_current_stream():
    """The operand is finished long after the calls: right only on the stream that makes it."""
    p = make(257, 1030, 33, 0.1, device=DEVICE)
    expected = check_all(p)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = copy.deepcopy(p)
    late.x.zero_(), late.dy.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.x.copy_(p.x), late.dy.copy_(p.dy)
        results = [problems.run(torch.ops.snack, o, late) for o in OPERATIONS]
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(results, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 4, 16, 40])
def test_a_kernel_waits_for_the_one_before_it(batch, dtype):
    """Kernels start before the one in front of them has ended. Products that follow each other, large and small by turns, through
    memory that is used again and again, give what they give one at a time."""
    sizes = [(3000, 3000, 0.9), (64, 3000, 0.5), (3000, 64, 0.5), (3000, 3000, 0.99), (3000, 3000, 0.9998)]
    patterns = [snack.Pattern.random((out, in_), round((1 - sparsity) * out * in_), 3).to(DEVICE) for out, in_, sparsity in sizes]
    values = [torch.randn(p.nnz, device=DEVICE).mul_((p.shape[1] / p.nnz) ** 0.5).to(dtype) for p in patterns]
    x = torch.randn(batch, 3000, device=DEVICE).to(dtype)

    def chain(after=lambda: None):
        y, gradients = x, []
        for _ in range(4):
            for pattern, weights in zip(patterns, values, strict=True):
                before, y = y, ops.spmm(pattern, weights, y)
                after()
                gradients.append(ops.sddmm(pattern, y, before))
                after()
            for pattern, weights in zip(patterns[::-1], values[::-1], strict=True):
                y = ops.spmm_t(pattern, weights, y)
                after()
        return [y, *gradients]

    alone = chain(torch.cuda.synchronize)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(alone, chain(), strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for _ in range(5):
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(alone, captured, strict=True))


def test_an_edit_is_ordered_on_the_current_stream():
    layer = SparseLinear(1100, 300, sparsity=0.9, device=DEVICE)
    twin = copy.deepcopy(layer)
    drop, positions = torch.arange(500, device=DEVICE), ops.grow_uniform(layer.pattern, 500, 3)
    late = torch.zeros_like(drop)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late.copy_(drop)
        layer.rewire(late, positions, 0.5)
    stream.synchronize()
    twin.rewire(drop, positions, 0.5)
    assert same(layer.state_dict(), twin.state_dict())


def test_two_streams_at_once():
    many = [make_large(500, 2000, 33, nnz, device=DEVICE, seed=nnz) for nnz in (100_000, 90_000, 800, 700)]
    expected = [[problems.run(torch.ops.snack, o, p) for o in OPERATIONS] for p in many]
    streams = [torch.cuda.Stream() for _ in many]
    torch.cuda.synchronize()
    for _ in range(20):
        results = []
        for p, stream in zip(many, streams):
            with torch.cuda.stream(stream):
                results.append([problems.run(torch.ops.snack, o, p) for o in OPERATIONS])
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for got, wanted in zip(results, expected) for a, b in zip(got, wanted))


def test_an_edit_waits_for_its_verdict_alone():
    """Carrying values, gradient and moments makes the host wait for nothing."""
    layer = SparseLinear(1100, 300, sparsity=0.9, device=DEVICE)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.randn(3, 1100, device=DEVICE)).sum().backward()
    optimizer.step()
    for fill in (0.0, 0.5, torch.ones(50, device=DEVICE)):
        drop, positions = torch.arange(50, device=DEVICE), ops.grow_uniform(layer.pattern, 50, 3)
        pattern, source = ops.rewire(layer.pattern, drop, *positions)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.no_grad():
                state.carry(layer, pattern, SlotMap(source, layer.nnz), fill, optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert layer.pattern.equals(pattern)


# ---- graphs ----


def capture(body, warm_up=3):
    """(graph, what body returned while it was captured)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()
    return graph, result


@pytest.mark.parametrize("nnz", [30_000, 300], ids=["narrow", "tall"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_product_is_captured(operation, nnz, dtype):
    p = make_large(300, 2100, 33, nnz, dtype, DEVICE)
    graph, result = capture(lambda: problems.run(torch.ops.snack, operation, p))
    other = make_large(300, 2100, 33, nnz, dtype, DEVICE, seed=1)
    for mine, theirs in ((p.values, other.values), (p.x, other.x), (p.dy, other.dy), (p.bias, other.bias)):
        mine.copy_(theirs)
    p.pattern.index.copy_(other.pattern.index), p.pattern.tile_ptr.copy_(other.pattern.tile_ptr)
    result.fill_(float("nan"))
    graph.replay()
    problems.assert_close(operation, other, result)


@pytest.mark.parametrize("operation", ["spmm", "spmm_t"])
def test_a_layer_that_overfills_the_l2_cache(operation):
    """Its launches have an access policy, which test_cuda.cpp looks at: the numbers, eager and captured."""
    nnz = torch.cuda.get_device_properties(DEVICE).L2_cache_size // 6
    p = make_large(8192, 8192, 4, nnz, torch.float32, DEVICE)
    eager = check(operation, p)
    graph, result = capture(lambda: problems.run(torch.ops.snack, operation, p))
    result.fill_(float("nan"))
    graph.replay()
    assert torch.equal(result, eager)


@pytest.mark.parametrize(("dtype", "batch"), [(d, b) for d in DTYPES for b in (1, 2, 4, 8) if b < 8 or d.itemsize == 2])
def test_more_slots_than_a_block_has_under_way(dtype, batch):
    """Of sddmm_chunks: a thread takes chunk after chunk. The sampled gradient, and updates by it."""
    p = make_large(2048, 2048, batch, 3_000_000, dtype, DEVICE)
    check("sddmm", p, regime_code("sddmm_chunks"))
    gradient = ops.sddmm(p.pattern, p.dy.float(), p.x.float(), regime="sddmm_stream")
    for rule, states in ((ops.SgdStep(0.1), 0), (ops.SgdStep(0.1, momentum=0.9), 1), (ops.AdamWStep(0.1, eps=1e-3), 2)):
        values, state = p.values.clone(), [torch.zeros_like(p.values) for _ in range(states)]
        ops.sddmm_update(p.pattern, values, state, p.dy, p.x, rule, regime="sddmm_chunks")
        if states < 2:  # a first step with momentum is one without
            expected = p.values.float() - 0.1 * gradient
        else:
            expected = p.values.float() * (1 - 0.1 * 0.01) - 0.1 * gradient / (gradient.abs() + 1e-3)
        worst = ((values.float() - expected).abs() / (1 + expected.abs())).max()
        assert float(worst) < (1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps), rule


@pytest.mark.parametrize(("in_features", "sparsity"), [(1100, 0.9), (1100, 0.9995)], ids=["narrow", "tall"])
def test_a_thousand_edits_and_a_graph_captured_before(in_features, sparsity):
    layer = SparseLinear(in_features, 300, sparsity=sparsity, device=DEVICE)
    optimizer = torch.optim.Adam(layer.parameters())
    x = torch.randn(16, in_features, device=DEVICE)
    layer(x).square().mean().backward()
    optimizer.step()
    graph, y = capture(lambda: layer(x).detach())
    state = optimizer.state[layer.values]
    kept = (layer.values, layer.values.grad, state["exp_avg"], state["exp_avg_sq"], layer.index, layer.tile_ptr)
    addresses, nnz = [t.data_ptr() for t in kept], layer.nnz

    def tags():
        rows, cols = layer.pattern.coordinates()
        return (rows.long() * in_features + cols + 1).float()  # below 2^24: exact

    with torch.no_grad():
        for tensor in kept[:4]:
            tensor.copy_(tags())
    k = max(1, nnz // 10)
    for update in range(1000):
        drop = torch.randperm(nnz, device=DEVICE)[:k]
        layer.rewire(drop, ops.grow_uniform(layer.pattern, k, ops.random_key(1, update), drop), optimizer=optimizer)
        assert layer.nnz == nnz and [t.data_ptr() for t in kept] == addresses
        if update % 100 == 99:
            now = tags()
            assert now.unique().numel() == nnz
            for tensor in kept[:4]:  # what survived sits at its connection, what is new is 0
                assert bool(((tensor == now) | (tensor == 0)).all()) and int((tensor == 0).sum()) >= k
            with torch.no_grad():
                for tensor in kept[:4]:
                    tensor.copy_(now)
    with torch.no_grad():
        layer.values.normal_()
    y.fill_(float("nan"))
    graph.replay()
    rows, cols = layer.pattern.coordinates()
    assert torch.equal(y, layer(x)) and layer.pattern.equals(snack.Pattern(rows, cols, layer.pattern.shape))


# ---- bad input: one sentence, nothing changed, nothing leaked ----


def test_operands_on_different_devices():
    p = make(33, 70, 5, 0.2, device=DEVICE)
    there = p.cpu()
    words = ["cpu", "cuda:0", "move one of them"]
    fails(words, ops.spmm, p.pattern, p.values, there.x)
    fails(words, ops.spmm, there.pattern, p.values, p.x)
    fails(words, ops.spmm, p.pattern, there.values, there.x)
    fails(words, ops.spmm, p.pattern, p.values, p.x, there.bias)
    fails(words, ops.spmm_t, there.pattern, p.values, p.dy)
    fails(words, ops.sddmm, p.pattern, p.dy, there.x)
    fails(words, ops.sddmm, there.pattern, p.dy, p.x)
    mixed = snack.Pattern.from_packed(p.pattern.index, there.pattern.tile_ptr, p.pattern.shape)
    fails(words, ops.spmm, mixed, p.values, p.x)
    fails(words, SparseLinear(70, 33, sparsity=0.5, device=DEVICE), there.x)
    fails(words, SparseLinear(70, 33, sparsity=0.5), p.x)


def test_what_a_card_does_not_have():
    p = make(33, 70, 5, 0.2, torch.float64, device=DEVICE)
    fails(["float64", "float32", "CPU"], ops.spmm, p.pattern, p.values, p.x)
    fails(["float64"], SparseLinear(70, 33, sparsity=0.5, device=DEVICE, dtype=torch.float64), p.x)
    p = make(33, 70, 5, 0.2, device=DEVICE)
    for regime in ("panel", "tensor"):
        fails([regime, "stream"], ops.spmm, p.pattern, p.values, p.x, regime=regime)
    count = torch.cuda.device_count()
    fails([f"cuda:{count}", "does not exist"], SparseLinear, 4, 4, sparsity=0.5, device=f"cuda:{count}")


def test_an_edit_is_not_captured():
    layer = SparseLinear(70, 33, sparsity=0.5, device=DEVICE)
    before, drop = snapshot(layer), torch.arange(3, device=DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        fails(["captured", "between replays"], layer.rewire, drop)
        graph.capture_end()
    assert same(before, snapshot(layer))


def test_errors_leak_nothing():
    p, double = make(33, 70, 5, 0.2, device=DEVICE), make(33, 70, 5, 0.2, torch.float64, device=DEVICE)

    def all_errors():
        fails(["float64"], ops.spmm, double.pattern, double.values, double.x)
        fails(["panel"], ops.spmm, p.pattern, p.values, p.x, regime="panel")
        fails(["twice"], ops.rewire, p.pattern, [3, 3])
        fails([str(p.pattern.nnz)], ops.rewire, p.pattern, [p.pattern.nnz])
        fails(["cpu", "cuda:0"], ops.spmm, p.pattern, p.values, p.x.cpu())

    all_errors()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        all_errors()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_out_of_memory_in_an_edit_leaves_the_layer_as_it_was():
    layer = SparseLinear(10_000, 10_000, sparsity=0.9, device=DEVICE)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.randn(1, 10_000, device=DEVICE)).sum().backward()
    optimizer.step()
    drop = torch.arange(1000, device=DEVICE)
    positions = ops.grow_uniform(layer.pattern, 1000, 5)
    before, total = snapshot(layer, optimizer), torch.cuda.get_device_properties(DEVICE).total_memory

    def fits(megabytes):
        """Whether the edit succeeds when so much more may be allocated."""
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + megabytes * 2**20) / total)
        try:
            layer.rewire(drop, positions, optimizer=optimizer)
        except torch.OutOfMemoryError as error:
            assert isinstance(error, snack.SnackError) and "rewire: out of memory: " in str(error)
            return False
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return True

    refused = 0
    for megabytes in (8, 60, 120, 180, 240, 300, 1000):  # ends in the operator, or later, where values and states are carried
        if fits(megabytes):
            break
        refused += 1
        assert same(before, snapshot(layer, optimizer))
    assert 2 <= refused < 7 and layer.nnz == 10_000_000 and not same(before, snapshot(layer, optimizer))


# ---- the process ----


def test_import_does_not_touch_the_card():
    code = (
        "import os, torch, snack\n"
        "assert not torch.cuda.is_initialized()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    layer = snack.SparseLinear(70, 33, sparsity=0.8, device='cuda')\n"
        "    assert layer(torch.ones(2, 70, device='cuda')).isfinite().all()\n"
        "    os._exit(0)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_doctor_shows_the_card_and_runs_every_operation_on_it(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["environment"]["cuda"].startswith("loaded, with code for")
    assert list(report["cards"]) == [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    card = report["cards"]["cuda:0"]
    assert card["name"] == torch.cuda.get_device_name(0) and card["memory_bytes"] > 0
    assert len(card["operations"]) == 9 and all(result["ok"] for result in card["operations"].values())
    assert main(["doctor"]) == 0
    assert "Topology rules: on the card" in capsys.readouterr().out


def test_a_card_without_code_is_told(monkeypatch):
    from snack import _lib

    monkeypatch.setattr(_lib, "architectures", lambda: "12")
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    with pytest.warns(UserWarning, match=f"compute capability {capability}.* code for 12"):
        _lib._warn_of_cards()
    fails(["compute capability", "SNACK_CUDA_ARCHITECTURES"], SparseLinear, 4, 4, sparsity=0.5, device=DEVICE)
    layer = SparseLinear(4, 4, sparsity=0.5)
    fails(["compute capability"], layer.to, DEVICE)
    assert layer.index.device.type == "cpu" and layer.values.device.type == "cpu"
