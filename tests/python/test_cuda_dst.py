"""Choosing, growing and exchanging connections on a card: bit for bit what the CPU gives, without the host waiting.

Collected only where there is a card. The shared tests (test_edits.py with device=cuda) hold small cases against a model; here are sizes
at which the kernels work differently, streams, graphs and memory.
"""

import pytest
import torch

from checks import fails
from problems import make_large
from snack import Pattern, ops

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def same_bits(a, b):
    """Equal on whatever devices, NaN too."""
    a, b = a.cpu(), b.cpu()
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def numbers(count, dtype, kind, seed=0):
    """Values of that many slots on the CPU: "normal", "ties" (a few different ones), "equal", "cluster" (a third are 0) or "special" (NaN,
    infinities, zeros of both signs)."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "ties":
        return torch.randint(-4, 5, (count,), generator=generator).to(dtype)
    if kind == "equal":
        return torch.full((count,), -0.5, dtype=dtype)
    values = torch.randn(count, generator=generator).to(dtype)
    if kind == "cluster":
        values[::3] = 0
    if kind == "special":
        for i, number in enumerate((float("nan"), float("inf"), -float("inf"), 0.0, -0.0)):
            values[i::13] = number
    return values


# ---- select_smallest ----


@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "cluster", "special"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [0, 1, 31, 33, 1024, 16_384, 16_385, 300_001, 3_000_000])
def test_select_smallest(count, dtype, kind):
    values = numbers(count, dtype, kind)
    there = values.to(DEVICE)
    eligible = {"any": count, "negative": int((values < 0).sum())}
    eligible["positive"] = count - eligible["negative"]
    for sign, most in eligible.items():
        for k in sorted({0, min(1, most), most // 3, max(0, most - 1), most}):
            slots = ops.select_smallest(there, k, sign)
            assert slots.is_cuda and torch.equal(slots.cpu(), ops.select_smallest(values, k, sign)), (sign, k)
        fails([f"cannot drop {most + 1} of {most}"], ops.select_smallest, there, most + 1, sign)


def test_select_smallest_takes_values_at_any_address():
    values = numbers(100_001, torch.float16, "ties")
    assert torch.equal(ops.select_smallest(values.to(DEVICE)[1:], 3000).cpu(), ops.select_smallest(values[1:], 3000))


# ---- grow_uniform ----

# Nearly empty, half and nearly full; narrow tiles and tall ones; more than 2^31 positions; and one row or column.
SHAPES = [
    (300, 2100, 30_000), (300, 2100, 500_000), (300, 2100, 629_000), (300, 2100, 200), (1, 70_000, 900), (70_000, 1, 30_000), (5000, 3, 9000),
    (50_000, 50_000, 1_500_000), (50_000, 50_000, 100_000), (1_000_000, 1_000_000, 200_000), (1, 1, 1), (64, 1024, 65_536), (4000, 4000, 1_600_000),
]


@pytest.mark.parametrize(("out", "in_", "nnz"), SHAPES)
def test_grow_uniform(out, in_, nnz):
    pattern = Pattern.random((out, in_), nnz, 3)
    there = pattern.to(DEVICE)
    room = out * in_ - nnz
    drop = torch.randperm(nnz, generator=torch.Generator().manual_seed(1))[: max(1, nnz // 5)]
    for k, slots in ((min(room, nnz // 4), None), (min(room + drop.numel(), nnz // 3), drop), (0, None), (min(1, room), None)):
        rows, cols = ops.grow_uniform(there, k, ops.random_key(5, k), slots if slots is None else slots.to(DEVICE))
        expected = ops.grow_uniform(pattern, k, ops.random_key(5, k), slots)
        assert rows.is_cuda and torch.equal(rows.cpu(), expected[0]) and torch.equal(cols.cpu(), expected[1])
    if room < 1_000_000:
        fails([f"cannot grow {room + 1} connections", f"has {room} empty positions"], ops.grow_uniform, there, room + 1, 1)
        fails([f"cannot grow {room + 2} connections", f"has {room + 1} empty positions"], ops.grow_uniform, there, room + 2, 1, [0, 0])
    fails([f"slot {nnz} to drop is outside"], ops.grow_uniform, there, 0, 1, [nnz])


# ---- grow_gradient ----


def operands(out, in_, batch, dtype=torch.float32, size=2, seed=0):
    """dy, x of small whole numbers on the card: every sum is exact, and many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(-size, size + 1, (batch, n), generator=generator).to(dtype).to(DEVICE) for name, n in (("dy", out), ("x", in_))}


GRADIENT_SHAPES = [
    (300, 2100, 30_000), (300, 2100, 629_000), (300, 2100, 200), (1, 70_000, 900), (70_000, 1, 30_000), (5000, 3, 9000), (64, 1024, 65_536),
    (3000, 3000, 900_000), (3000, 3000, 5000), (1, 1, 1), (1, 1, 0), (129, 1025, 0),
]
OPERANDS = [(4, torch.float32, 2), (33, torch.float32, 50), (7, torch.bfloat16, 8), (0, torch.float16, 1), (3, torch.float16, 8)]
OPERANDS += [(5, torch.float64, 50)]


@pytest.mark.parametrize(("out", "in_", "nnz"), GRADIENT_SHAPES)
@pytest.mark.parametrize(("batch", "dtype", "size"), OPERANDS)
def test_grow_gradient(out, in_, nnz, batch, dtype, size):
    pattern = Pattern.random((out, in_), nnz, 3)
    there, room = pattern.to(DEVICE), out * in_ - nnz
    by = operands(out, in_, batch, dtype, size)
    dy, x = by["dy"].cpu(), by["x"].cpu()
    drop = torch.randperm(nnz, generator=torch.Generator().manual_seed(1))[: nnz // 5]
    wanted = [(min(room, nnz // 4), None), (min(room + drop.numel(), nnz // 3), drop), (0, None), (min(1, room), None), (min(room, 70_000), None)]
    for k, slots in wanted:
        rows, cols = ops.grow_gradient(there, by["x"], by["dy"], k, slots if slots is None else slots.to(DEVICE))
        expected = ops.grow_gradient(pattern, x, dy, k, slots)
        assert rows.is_cuda and torch.equal(rows.cpu(), expected[0]) and torch.equal(cols.cpu(), expected[1])
    fails([f"cannot grow {room + 1} connections", f"has {room} empty positions"], ops.grow_gradient, there, by["x"], by["dy"], room + 1)


@pytest.mark.parametrize(("nnz", "k"), [(1_000_000, 100_000), (60_000, 20)])
def test_grow_gradient_of_more_positions_than_an_int32_counts(nnz, k):
    """dy is 0 but for a few rows: the best lie there, and a sample hardly meets them."""
    out, in_ = 50_000, 50_000
    pattern, by = Pattern.random((out, in_), nnz, 3).to(DEVICE), operands(out, in_, 1, size=1000)
    by["dy"][0, :-3] = 0
    by["dy"][0, -3:] = torch.tensor([1.0, -2.0, 3.0])
    rows, cols = ops.grow_gradient(pattern, by["x"], by["dy"], k)
    scores = (by["dy"][0, rows] * by["x"][0, cols]).abs()
    chosen, live = rows * in_ + cols, pattern.rows.long() * in_ + pattern.cols
    assert rows.unique().numel() <= 3 and chosen.unique().numel() == k and not bool(torch.isin(chosen, live).any())
    # All of them at once, on the card: the three rows alone, without their taken positions.
    three = (by["dy"][0, -3:, None] * by["x"][0]).abs()
    taken = pattern.rows >= out - 3
    three[pattern.rows[taken].long() - (out - 3), pattern.cols[taken].long()] = -1
    assert torch.equal(three.flatten().sort(descending=True).values[:k], scores)


def test_grow_gradient_of_numbers_as_they_come():
    """Sums that are rounded: the chosen positions are the best of the dense product but for those as good as the last one."""
    pattern = Pattern.random((2000, 3000), 300_000, 1).to(DEVICE)
    dy, x = torch.randn(64, 2000, device=DEVICE), torch.randn(64, 3000, device=DEVICE)
    rows, cols = ops.grow_gradient(pattern, x, dy, 90_000)
    gradient = (dy.double().T @ x.double()).abs()
    gradient[pattern.rows.long(), pattern.cols.long()] = -1
    scores, best = gradient[rows, cols], gradient.flatten().sort(descending=True).values[:90_000]
    assert bool((scores >= best[-1] - 1e-4).all()) and torch.allclose(scores, best, rtol=0, atol=1e-4)
    again = ops.grow_gradient(pattern, x, dy, 90_000)
    assert torch.equal(rows, again[0]) and torch.equal(cols, again[1])


def test_lists_are_not_captured():
    values, pattern = torch.randn(100, device=DEVICE), Pattern.random((30, 40), 100, 1).to(DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        fails(["captured", "between replays"], ops.select_smallest, values, 3)
        fails(["captured", "between replays"], ops.grow_uniform, pattern, 3, 1)
        fails(["captured", "between replays"], ops.grow_gradient, pattern, torch.ones(2, 40, device=DEVICE), torch.ones(2, 30, device=DEVICE), 3)
        graph.capture_end()


# ---- exchange_ ----


class Layer:
    """What an exchange changes, on the CPU and on the card."""

    def __init__(self, out, in_, nnz, dtypes=(torch.float32, torch.float32), kind="normal", seed=0):
        self.pattern = Pattern.random((out, in_), nnz, seed)
        tags = torch.arange(1, nnz + 1)
        self.carried = [numbers(nnz, dtypes[0], kind, seed), *(tags.remainder(2 if t == torch.bool else 100).to(t) for t in dtypes[1:])]
        self.fills = torch.arange(len(dtypes)).float() + 0.5
        self.on_card = self.pattern.to(DEVICE).clone()
        self.carried_on_card = [t.to(DEVICE) for t in self.carried]
        self.fills_on_card = self.fills.to(DEVICE)

    @property
    def tensors(self):
        return [self.on_card.index, self.on_card.tile_ptr, *self.carried_on_card]

    def exchange(self, *args, **operands):
        """The same update on both; they must agree."""
        expected = ops.exchange_(self.pattern, self.carried, self.fills, *args, **{k: v.cpu() for k, v in operands.items()})
        addresses = [t.data_ptr() for t in self.tensors]
        result = self.exchange_on_card(*args, **operands)
        assert result.is_cuda and result.tolist() == expected.tolist()
        assert [t.data_ptr() for t in self.tensors] == addresses
        self.check()
        return int(result[0])

    def exchange_on_card(self, *args, **operands):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return ops.exchange_(self.on_card, self.carried_on_card, self.fills_on_card, *args, **operands)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def check(self):
        for ours, theirs in zip(self.tensors, [self.pattern.index, self.pattern.tile_ptr, *self.carried], strict=True):
            assert same_bits(ours, theirs)


@pytest.mark.parametrize(("out", "in_", "nnz"), SHAPES)
def test_exchange_uniform(out, in_, nnz):
    for drop, fraction in (("magnitude", 0.0), ("signed", 0.3)):
        layer = Layer(out, in_, nnz)
        for update in range(2):
            k = min(int(0.3 * nnz), out * in_ - nnz)
            moved = layer.exchange(drop, fraction, k, "uniform", ops.random_key(7, update))
            assert moved <= k and (drop == "signed" or moved == k)


@pytest.mark.parametrize(("out", "in_", "nnz"), GRADIENT_SHAPES)
@pytest.mark.parametrize(("batch", "dtype", "size"), OPERANDS)
def test_exchange_by_gradient(out, in_, nnz, batch, dtype, size):
    for drop, fraction in (("magnitude", 0.0), ("signed", 0.3)):
        layer = Layer(out, in_, nnz)
        for update in range(2):
            k = min(int(0.3 * nnz), out * in_ - nnz)
            moved = layer.exchange(drop, fraction, k, "gradient", **operands(out, in_, batch, dtype, size, update))
            assert moved <= k and (drop == "signed" or moved == k)


@pytest.mark.parametrize("nnz", [60_000, 600], ids=["bits", "lists"])
def test_exchange_without_enough_gradients_changes_nothing(nnz):
    layer = Layer(300, 2100, nnz)
    by = operands(300, 2100, 3)
    by["x"][0, 1:] = float("nan")
    k = min(nnz, 1000)
    for drop, fraction in (("magnitude", 0.0), ("signed", 1.0)):
        result = layer.exchange_on_card(drop, fraction, k, "gradient", **by)
        assert result.tolist() == [0, 1]
        layer.check()
    layer.exchange("magnitude", 0.0, 20, "gradient", **by)  # a column of numbers is enough for these


@pytest.mark.parametrize("shape", [(300, 1100, 90_000), (300, 1100, 3000), (40, 70, 2000), (4, 5, 20), (7, 9, 0), (0, 5, 0)])
def test_exchange_of_nothing_and_of_everything(shape):
    out, in_, nnz = shape
    for drop, fraction in (("magnitude", 0.0), ("signed", 1.0), ("signed", 0.0)):
        for k in sorted({0, min(1, nnz), nnz}):
            layer = Layer(*shape)
            layer.exchange(drop, fraction, k, "uniform", 11)


@pytest.mark.parametrize("kind", ["ties", "equal", "special"])
@pytest.mark.parametrize("values", FLOATS)
@pytest.mark.parametrize("nnz", [200_000, 2000])
def test_exchange_carries_every_type(nnz, values, kind):
    others = (torch.float64, torch.uint8, torch.bfloat16, torch.int64, torch.bool, torch.float16, torch.int16, torch.int32, torch.float32, torch.int8)
    for drop, fraction in (("magnitude", 0.0), ("signed", 0.4)):
        layer = Layer(500, 1500, nnz, (values, *others), kind)
        layer.exchange(drop, fraction, nnz // 3, "uniform", 13)


def test_exchange_takes_tensors_at_any_address():
    layer = Layer(300, 1100, 33_001, (torch.float16, torch.uint8, torch.float32))
    layer.carried_on_card = [torch.cat([t[:1], t])[1:] for t in layer.carried_on_card]
    layer.on_card = Pattern.from_packed(torch.cat([layer.on_card.index[:1], layer.on_card.index])[1:], layer.on_card.tile_ptr, layer.on_card.shape)
    for update in range(3):
        layer.exchange("magnitude", 0.0, 9000, "uniform", update)


def test_exchange_of_a_large_layer():
    layer = Layer(10_000, 10_000, 10_000_000)
    layer.exchange("signed", 0.3, 3_000_000, "uniform", 17)
    layer.exchange("magnitude", 0.0, 3_000_000, "uniform", 18)
    layer.exchange("magnitude", 0.0, 3_000_000, "gradient", **operands(10_000, 10_000, 4, size=1000))


@pytest.mark.parametrize("grow", ["uniform", "gradient"])
@pytest.mark.parametrize(("in_", "nnz"), [(10_000, 1_000_000), (10_000, 100_000), (100_000, 500_000)])
def test_exchange_needs_little_memory(in_, nnz, grow):
    layer = Layer(1000, in_, nnz)
    by = operands(1000, in_, 2) if grow == "gradient" else {}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer.exchange_on_card("magnitude", 0.0, nnz // 2, grow, 1, **by)
    assert torch.cuda.max_memory_allocated() - before <= 16 * nnz + 3 * 2**20 + 4096


@pytest.mark.parametrize("nnz", [60_000, 600], ids=["bits", "lists"])
def test_exchange_is_captured(nnz):
    """A replay works on what is there then."""
    layer = Layer(300, 2100, nnz)
    layer.exchange("signed", 0.3, nnz, "uniform", 5)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        ops.exchange_(layer.on_card, layer.carried_on_card, layer.fills_on_card, "signed", 0.3, nnz, "uniform", 6)
    layer.check()  # nothing has run yet
    for _ in range(3):
        graph.replay()
        ops.exchange_(layer.pattern, layer.carried, layer.fills, "signed", 0.3, nnz, "uniform", 6)
        layer.check()


@pytest.mark.parametrize("nnz", [60_000, 600], ids=["bits", "lists"])
def test_an_exchange_by_gradient_is_captured(nnz):
    """A replay uses the gradient that is there then."""
    layer, by = Layer(300, 2100, nnz), operands(300, 2100, 4)
    layer.exchange("magnitude", 0.0, nnz // 4, "gradient", **by)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        ops.exchange_(layer.on_card, layer.carried_on_card, layer.fills_on_card, "magnitude", 0.0, nnz // 4, "gradient", **by)
    for seed in range(3):
        for name, other in operands(300, 2100, 4, seed=seed).items():
            by[name].copy_(other)
        graph.replay()
        cpu = {name: t.cpu() for name, t in by.items()}
        ops.exchange_(layer.pattern, layer.carried, layer.fills, "magnitude", 0.0, nnz // 4, "gradient", **cpu)
        layer.check()


def test_exchanges_of_two_streams():
    layers = [Layer(500, 2000, nnz, seed=nnz) for nnz in (100_000, 90_000, 800, 700)]
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    for update in range(10):
        for layer, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                layer.exchange_on_card("signed", 0.3, layer.pattern.nnz, "uniform", update)
    torch.cuda.synchronize()
    for layer in layers:
        for update in range(10):
            ops.exchange_(layer.pattern, layer.carried, layer.fills, "signed", 0.3, layer.pattern.nnz, "uniform", update)
        layer.check()


def test_exchange_waits_for_the_stream():
    """The values are finished long after the call."""
    layer = Layer(500, 2000, 100_000)
    values = layer.carried_on_card[0].clone()
    layer.carried_on_card[0].zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        layer.carried_on_card[0].copy_(values)
        layer.exchange_on_card("magnitude", 0.0, 30_000, "uniform", 3)
    stream.synchronize()
    ops.exchange_(layer.pattern, layer.carried, layer.fills, "magnitude", 0.0, 30_000, "uniform", 3)
    layer.check()


def test_products_know_the_new_pattern():
    """Row starts and tile pointers are those of the new index: a product by it is that of the same pattern built anew."""
    p = make_large(300, 2100, 5, 60_000, device=DEVICE)
    ops.exchange_(p.pattern, [p.values], torch.zeros(1, device=DEVICE), "magnitude", 0.0, 20_000, "uniform", 3)
    again = Pattern(p.pattern.rows, p.pattern.cols, p.pattern.shape)
    assert again.equals(p.pattern)
    assert torch.equal(ops.spmm(p.pattern, p.values, p.x), ops.spmm(again, p.values, p.x))


def test_exchange_refuses_operands_of_other_devices():
    layer = Layer(30, 40, 100)
    fails(["cpu", "cuda:0"], ops.exchange_, layer.on_card, layer.carried, layer.fills_on_card, "magnitude", 0.0, 3)
    fails(["cpu", "cuda:0"], ops.exchange_, layer.on_card, layer.carried_on_card, layer.fills, "magnitude", 0.0, 3)
    layer.check()
