"""Edits of a topology as properties: every device, the reference backend and a model of Python sets agree on every case.

A connection is a pair (row, col) here, a pattern is a sorted list of them, and everything an operator promises is written out
on that list.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snack import ops
from snack.errors import SnackError
from snack.formats import Pattern
from snack.formats.pattern import signed64

fast = settings(max_examples=120, deadline=None)
EMPTY = torch.empty(0, dtype=torch.int64)


# ---- the model ----


def slot_key(position):
    row, col = position
    return (col // 1024, row, col)


def mix64(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def model_positions(key, out, in_):
    """The endless stream of positions of a random key."""
    for i in itertools.count(1):
        draw = mix64((key + i * 0x9E3779B97F4A7C15) % 2**64)
        yield divmod(draw * out * in_ // 2**64, in_)


def model_rewire(positions, drop, grown):
    """Sorted new positions and, for each, its old slot or -(1 + g)."""
    source = {p: slot for slot, p in enumerate(positions) if slot not in set(drop)}
    source.update({p: -(1 + g) for g, p in enumerate(grown)})
    new = sorted(source, key=slot_key)
    return new, [source[p] for p in new]


def model_smallest(values, k, sign):
    def counts(v):
        return sign == "any" or (v < 0) == (sign == "negative")

    def magnitude(v):
        return math.inf if math.isnan(v) else abs(v)

    # NaN is larger than infinity: it is put behind everything that is a number.
    slots = [s for s, v in enumerate(values) if counts(v)]
    return sorted(sorted(slots, key=lambda s: (math.isnan(values[s]), magnitude(values[s]), s))[:k])


# ---- problems ----


@st.composite
def topologies(draw, max_extent=40):
    """A pattern with its list of positions: odd shapes, several column panels, empty, full, and too thin for small tiles."""
    shape = draw(
        st.one_of(
            st.tuples(st.integers(1, max_extent), st.integers(1, max_extent)),
            st.sampled_from([(1, 2500), (2500, 1), (3, 1025), (70, 1024), (2, 5000)]),
        )
    )
    total = shape[0] * shape[1]
    nnz = draw(st.one_of(st.sampled_from([0, 1, total, total - 1]), st.integers(0, total)))
    pattern = Pattern.random(shape, nnz, draw(st.integers(0, 2**63 - 1)))
    positions = list(zip(pattern.rows.tolist(), pattern.cols.tolist()))
    assert positions == sorted(set(positions), key=slot_key)
    return pattern, positions


@st.composite
def edits(draw):
    """A topology, slots to drop and positions to grow, all valid."""
    pattern, positions = draw(topologies(max_extent=12))
    drop = draw(st.lists(st.integers(0, len(positions) - 1), unique=True, max_size=40)) if positions else []
    taken = set(positions) - {positions[s] for s in drop}
    out, in_ = pattern.shape
    wanted = draw(st.lists(st.tuples(st.integers(0, out - 1), st.integers(0, in_ - 1)), unique=True, max_size=40))
    return pattern, positions, drop, [p for p in wanted if p not in taken]


def int64(data):
    return torch.tensor(data, dtype=torch.int64)


def packed(pattern):
    return pattern.index, pattern.tile_ptr


def poison(pattern, device):
    """Leave nonsense in freed memory of the sizes that an edit asks for."""
    for tensor in packed(pattern):
        for _ in range(2):
            del_me = torch.full_like(tensor, -1, device=device)
            del del_me


# ---- rewire ----


@fast
@given(edits())
def test_rewire(device, edit):
    pattern, positions, drop, grown = edit
    rows, cols = int64([r for r, _ in grown]), int64([c for _, c in grown])
    ours = pattern.to(device).clone()
    poison(pattern, device)
    new, source = ops.rewire(ours, int64(drop), rows, cols)
    expected, expected_source = model_rewire(positions, drop, grown)
    assert new.device == source.device == ours.device
    assert list(zip(new.rows.tolist(), new.cols.tolist())) == expected
    assert source.tolist() == expected_source
    assert new.nnz == pattern.nnz - len(drop) + len(grown)
    assert ours.equals(pattern)  # pure
    index, tile_ptr, ref_source = torch.ops.snack_reference.rewire(*packed(pattern), int64(drop), rows, cols, *pattern.shape)
    assert torch.equal(index, new.index.cpu()) and torch.equal(tile_ptr, new.tile_ptr.cpu()) and torch.equal(ref_source, source.cpu())


@fast
@given(edits(), st.data())
def test_rewire_refuses_what_does_not_fit(device, edit, data):
    pattern, positions, drop, grown = edit
    left = [p for s, p in enumerate(positions) if s not in set(drop)]
    out, in_ = pattern.shape
    bad = [("grow", (out, 0)), ("grow", (0, in_)), ("grow", (-1, 0)), ("drop", pattern.nnz), ("drop", -1)]
    bad += [("grow", grown[0])] if grown else []
    bad += [("grow", left[-1])] if left else []
    bad += [("drop", drop[0])] if drop else []
    kind, what = data.draw(st.sampled_from(bad))
    drop, grown = (drop + [what], grown) if kind == "drop" else (drop, grown + [what])
    with pytest.raises(SnackError):
        ops.rewire(pattern.to(device), drop, [r for r, _ in grown], [c for _, c in grown])


# ---- select_smallest ----


@fast
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1.5, math.inf, -math.inf, math.nan, 1e-3, -1e-3]), max_size=60),
    st.sampled_from(["any", "positive", "negative"]),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    st.data(),
)
def test_select_smallest(device, values, sign, dtype, data):
    tensor = torch.tensor(values, dtype=dtype, device=device)
    eligible = sum(sign == "any" or (v < 0) == (sign == "negative") for v in values)
    k = data.draw(st.integers(0, eligible))
    slots = ops.select_smallest(tensor, k, sign)
    code = {"any": 0, "positive": 1, "negative": 2}[sign]
    assert slots.dtype == torch.int64 and slots.device == tensor.device
    if not (any(map(math.isnan, values)) and any(map(math.isinf, values))):  # the reference does not tell these two apart
        assert slots.tolist() == torch.ops.snack_reference.select_smallest(tensor.cpu(), k, code).tolist()
    assert slots.tolist() == model_smallest(tensor.double().tolist(), k, sign)
    with pytest.raises(SnackError):
        ops.select_smallest(tensor, eligible + 1, sign)


# ---- grow ----


@fast
@given(topologies(), st.integers(0, 2**64 - 1), st.data())
def test_grow_uniform(device, topology, key, data):
    pattern, positions = topology
    out, in_ = pattern.shape
    drop = data.draw(st.lists(st.integers(0, len(positions) - 1), unique=True, max_size=20)) if positions else []
    taken = set(positions) - {positions[s] for s in drop}
    room = out * in_ - len(taken)
    k = data.draw(st.integers(0, min(room, 30)))
    rows, cols = ops.grow_uniform(pattern.to(device), k, key, int64(drop))
    assert rows.device.type == cols.device.type == device.type
    expected = []
    for position in model_positions(key, out, in_):
        if len(expected) == k:
            break
        if position not in taken:
            taken.add(position)
            expected.append(position)
    assert list(zip(rows.tolist(), cols.tolist())) == expected
    reference = torch.ops.snack_reference.grow_uniform(*packed(pattern), int64(drop), k, signed64(key), out, in_)
    assert torch.equal(reference[0], rows.cpu()) and torch.equal(reference[1], cols.cpu())
    with pytest.raises(SnackError, match="cannot grow"):
        ops.grow_uniform(pattern, room + 1, key, int64(drop))


@settings(max_examples=80, deadline=None)
@given(
    topologies(max_extent=20), st.integers(0, 5), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]), st.data()
)
def test_grow_gradient_is_the_dense_top_k(device, topology, batch, dtype, data):
    pattern, positions = topology
    out, in_ = pattern.shape
    drop = data.draw(st.lists(st.integers(0, len(positions) - 1), unique=True, max_size=20)) if positions else []
    taken = set(positions) - {positions[s] for s in drop}
    k = data.draw(st.integers(0, min(out * in_ - len(taken), 50)))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    # Small whole numbers: sums are exact in every dtype, and most scores are ties.
    x = torch.randint(-2, 3, (batch, in_), generator=random).to(dtype)
    dy = torch.randint(-2, 3, (batch, out), generator=random).to(dtype)
    rows, cols = ops.grow_gradient(pattern.to(device), x.to(device), dy.to(device), k, int64(drop))
    gradient = (dy.double().T @ x.double()).abs().tolist()
    empty = [(r, c) for r in range(out) for c in range(in_) if (r, c) not in taken]
    expected = sorted(empty, key=lambda p: (-gradient[p[0]][p[1]], slot_key(p)))[:k]
    assert list(zip(rows.tolist(), cols.tolist())) == expected
    reference = torch.ops.snack_reference.grow_gradient(*packed(pattern), int64(drop), dy, x, k, out, in_)
    assert torch.equal(reference[0], rows.cpu()) and torch.equal(reference[1], cols.cpu())


def test_grow_gradient_takes_any_strides():
    pattern = Pattern.random((30, 20), 100, 1)
    x, dy = torch.randn(4, 7, 20)[:, 3].double(), torch.tensor(1.0, dtype=torch.float64).expand(4, 30)
    expected = ops.grow_gradient(pattern, x.contiguous(), dy.contiguous(), 50)
    wide = torch.zeros(20, 4, dtype=torch.float64).T.copy_(x)
    for given_x in (x, wide):
        rows, cols = ops.grow_gradient(pattern, given_x, dy, 50)
        assert torch.equal(rows, expected[0]) and torch.equal(cols, expected[1])


# ---- exchange_ ----

CARRIED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def model_drop(values, drop, fraction, k):
    """Slots that exchange_ drops of a list of numbers."""
    if drop == "magnitude":
        return model_smallest(values, k, "any")
    negatives = sum(v < 0 for v in values)
    below, above = int(fraction * negatives), int(fraction * (len(values) - negatives))
    if above + below > k:
        above, below = above * k // (above + below), below * k // (above + below)
    return model_smallest(values, above, "positive") + model_smallest(values, below, "negative")


def without_nan(tensor):
    """77 in place of NaN, which equals nothing."""
    return tensor.nan_to_num(77) if tensor.is_floating_point() else tensor


@settings(max_examples=150, deadline=None)
@given(
    topologies(max_extent=16), st.sampled_from(["magnitude", "signed"]), st.sampled_from(["uniform", "gradient"]),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]), st.integers(0, 2**64 - 1), st.integers(0, 3), st.data(),
)
def test_exchange_is_the_list_operations(device, topology, drop, grow, dtype, key, batch, data):
    pattern, positions = topology
    (out, in_), nnz = pattern.shape, len(positions)
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    values = torch.randint(-3, 4, (nnz,), generator=random).to(dtype)  # mostly ties
    if data.draw(st.booleans()):
        values[torch.rand(nnz, generator=random) < 0.1] = math.nan
    others = [torch.arange(nnz).remainder(100).to(t) for t in data.draw(st.lists(st.sampled_from(CARRIED), max_size=4))]
    fills = torch.tensor([0.5, 3.0, 0.0, 7.0, 1.0][: 1 + len(others)])
    fraction, k = data.draw(st.sampled_from([0.0, 0.1, 0.3, 1.0])), data.draw(st.one_of(st.sampled_from([0, nnz]), st.integers(0, nnz)))
    x, dy = (torch.randint(-2, 3, (batch, n), generator=random).float() for n in (in_, out))
    slots = model_drop(values.double().tolist(), drop, fraction, k)
    if grow == "uniform":
        rows, cols = torch.ops.snack_reference.grow_uniform(*packed(pattern), int64(slots), len(slots), signed64(key), out, in_)
    else:
        rows, cols = torch.ops.snack_reference.grow_gradient(*packed(pattern), int64(slots), dy, x, len(slots), out, in_)
    index, tile_ptr, source = torch.ops.snack_reference.rewire(*packed(pattern), int64(slots), rows, cols, out, in_)
    old = [values, *others]

    def carry(tensor, fill):
        return torch.where(source >= 0, tensor[source.clamp(min=0)] if nnz else tensor, fill.to(tensor.dtype))

    expected = [index, tile_ptr, *(carry(t, f) for t, f in zip(old, fills, strict=True))]
    operands = {"dy": dy.to(device), "x": x.to(device)} if grow == "gradient" else {}
    ours, tensors = pattern.to(device).clone(), [t.to(device).clone() for t in old]
    kept = [*packed(ours), *tensors]
    addresses = [t.data_ptr() for t in kept]
    result = ops.exchange_(ours, tensors, fills.to(device), drop, fraction, k, grow, key, **operands)
    assert result.device == ours.device and result.tolist() == [len(slots), 0]
    assert [t.data_ptr() for t in kept] == addresses
    for got, wanted in zip(kept, expected, strict=True):
        assert torch.equal(without_nan(got.cpu()), without_nan(wanted))
    reference = [t.clone() for t in (*packed(pattern), *old)]
    code = {"magnitude": 0, "signed": 1}[drop], {"uniform": 0, "gradient": 1}[grow]
    torch.ops.snack_reference.exchange_(*reference[:2], reference[2:], fills, code[0], fraction, k, code[1], signed64(key), dy, x, out, in_)
    assert all(torch.equal(a, b) for a, b in zip(reference[:2], expected[:2], strict=True))


def test_exchange_changes_nothing_on_an_error(device):
    pattern = Pattern.random((20, 30), 50, 1).to(device)
    values, momentum, fills = torch.randn(50, device=device), torch.randn(50, device=device), torch.zeros(2, device=device)
    before = [t.clone() for t in (*packed(pattern), values, momentum)]
    x, dy = torch.full((2, 30), math.nan, device=device), torch.ones(2, 20, device=device)
    good = {"drop": "magnitude", "fraction": 0.3, "k": 5, "grow": "uniform"}
    for words, change in [
        ("drop rule 'large'", {"drop": "large"}),
        ("grow rule 'small'", {"grow": "small"}),
        ("k=51", {"k": 51}),
        ("k=-1", {"k": -1}),
        ("fraction", {"drop": "signed", "fraction": math.nan}),
        ("fraction", {"drop": "signed", "fraction": 1.5}),
        ("needs dy and x", {"grow": "gradient"}),
        ("dy has 19 columns", {"grow": "gradient", "dy": dy[:, :19], "x": x}),
    ]:
        with pytest.raises(SnackError, match=words):
            ops.exchange_(pattern, [values, momentum], fills, **(good | change))
    for words, carried, fill in [
        ("carried\\[1\\] has 49 entries", [values, momentum[:49]], fills),
        ("expected the values", [], fills[:0]),
        ("at most 15 more", [values] * 17, torch.zeros(17, device=device)),
        ("2 entries, one a carried", [values, momentum], fills[:1]),
        ("dtype", [values.int(), momentum], fills),
        ("dtype that cannot be carried", [values, momentum.to(torch.complex64)], fills),
    ]:
        with pytest.raises(SnackError, match=words):
            ops.exchange_(pattern, carried, fill, **good)
    if device.type == "cpu":
        with pytest.raises(SnackError, match="grow_gradient: only 0 of the 5"):
            ops.exchange_(pattern, [values, momentum], fills, "magnitude", 0, 5, "gradient", dy=dy, x=x)
    else:
        assert int(ops.exchange_(pattern, [values, momentum], fills, "magnitude", 0, 5, "gradient", dy=dy, x=x)[1]) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, (*packed(pattern), values, momentum), strict=True))


# ---- the random key, and long sequences ----


def test_random_key_is_a_fixed_function():
    def expected(seed, *numbers):
        key = mix64(seed % 2**64)
        for number in numbers:
            key = mix64(key ^ mix64((number + 0x9E3779B97F4A7C15) % 2**64))
        return key

    for numbers in [(0,), (1, 2, 3), (1, 3, 2), (2**63, 5), (-1, 0)]:
        assert ops.random_key(*numbers) == expected(*numbers)
    assert len({ops.random_key(s, u, n) for s in range(3) for u in range(3) for n in range(3)}) == 27


def test_a_thousand_edits_keep_the_set_in_step(device):
    """One long run against a Python set, on a shape with two column panels: nothing is lost, doubled or moved."""
    shape = (9, 1500)
    pattern = Pattern.random(shape, 700, 5).to(device)
    tags = torch.tensor([r * shape[1] + c for r, c in zip(pattern.rows.tolist(), pattern.cols.tolist())])
    live = set(tags.tolist())
    random = torch.Generator().manual_seed(0)
    for update in range(1000):
        k = int(torch.randint(0, 60, (), generator=random))
        drop = torch.randperm(pattern.nnz, generator=random)[:k]
        rows, cols = (t.cpu() for t in ops.grow_uniform(pattern, k, ops.random_key(3, update), drop))
        grown = rows * shape[1] + cols
        live -= set(tags[drop].tolist())
        assert live.isdisjoint(grown.tolist()) and len(set(grown.tolist())) == k
        live |= set(grown.tolist())
        pattern, source = ops.rewire(pattern, drop, rows, cols)
        source = source.cpu()
        tags = torch.where(source >= 0, tags[source.clamp(min=0)], grown[(-1 - source).clamp(min=0)] if k else 0)
        assert pattern.nnz == 700 and set(tags.tolist()) == live
        if update % 100 == 99:
            assert torch.equal(tags, pattern.rows.cpu().long() * shape[1] + pattern.cols.cpu().long())
