"""Patterns and conversions: the slot order, round trips with every format, exact random topologies, and what is refused."""

import copy
import pickle

import pytest
import scipy.sparse as scipy_sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import snack
from checks import fails
from snack import formats
from snack.errors import SnackError


def sample(out=70, in_=2100, density=0.05, dtype=torch.float32, seed=0):
    """A dense matrix of that density with an explicit zero among its connections, and the mask."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(out, in_, generator=g) < density
    dense = torch.randn(out, in_, generator=g).to(dtype) * mask
    return dense, mask


# ---- the slot order ----


@given(st.sets(st.tuples(st.integers(0, 99), st.integers(0, 3000)), max_size=60), st.randoms(use_true_random=False))
def test_slot_order(positions, random):
    """Sorted by (col // 1024, row, col), whatever the order of the list; values and `pack`'s slots move along."""
    listed = list(positions)
    random.shuffle(listed)
    rows, cols = [r for r, _ in listed], [c for _, c in listed]
    expected = sorted(positions, key=lambda p: (p[1] // 1024, *p))
    pattern, values = formats.from_coo(rows, cols, [r * 4000.0 + c for r, c in listed] if listed else torch.empty(0), (100, 3001))
    assert list(zip(pattern.rows.tolist(), pattern.cols.tolist())) == expected
    assert values.tolist() == [r * 4000.0 + c for r, c in expected]
    assert pattern.rows.dtype == pattern.cols.dtype == torch.int32 and pattern.nnz == len(listed)
    assert pattern.equals(snack.Pattern(rows, cols, (100, 3001)))


def test_both_packings_hold_the_same_positions():
    """A dense-enough matrix packs into 2 bytes a slot, an emptier one into 4; both unpack to what was given."""
    seen = set()
    for nnz in (5, 40_000):
        pattern = snack.Pattern.random((130, 1100), nnz, seed=1)
        seen.add(pattern.index.element_size())
        again = snack.Pattern(pattern.rows.flip(0), pattern.cols.flip(0), (130, 1100))
        assert again.equals(pattern) and len(set(zip(pattern.rows.tolist(), pattern.cols.tolist()))) == nnz
    assert seen == {2, 4}


def test_equals_sees_every_difference():
    a = snack.Pattern([0, 1], [2, 3], (4, 5))
    assert not a.equals(snack.Pattern([0, 1], [2, 4], (4, 5)))
    assert not a.equals(snack.Pattern([0], [2], (4, 5)))
    assert not a.equals(snack.Pattern([0, 1], [2, 3], (5, 5)))


# ---- round trips ----


def test_dense():
    dense, mask = sample()
    pattern, values = formats.from_dense(dense)
    assert torch.equal(formats.to_dense(pattern, values), dense) and pattern.nnz == int((dense != 0).sum())
    assert abs(pattern.density + pattern.sparsity - 1) < 1e-12 and pattern.density == pattern.nnz / dense.numel()


def test_to_dense_is_differentiable():
    pattern = snack.Pattern([0, 1], [1, 0], (2, 2))
    values = torch.tensor([3.0, 4.0], requires_grad=True)
    (formats.to_dense(pattern, values) * torch.tensor([[1.0, 10.0], [100.0, 1000.0]])).sum().backward()
    assert values.grad.tolist() == [10.0, 100.0]


def test_mask_keeps_explicit_zeros():
    dense, mask = sample(in_=30, density=0.3)
    dense[mask.nonzero()[0][0], mask.nonzero()[0][1]] = 0.0
    pattern, values = formats.from_mask(mask, dense)
    assert pattern.nnz == int(mask.sum()) and int((values == 0).sum()) == 1
    assert torch.equal(formats.to_dense(pattern, torch.ones_like(values)) != 0, mask)
    pattern, ones = formats.from_mask(mask)
    assert torch.equal(ones, torch.ones(pattern.nnz))
    assert formats.from_mask(mask.to(torch.uint8))[0].equals(pattern)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_coo_csr_csc(dtype):
    dense, _ = sample(dtype=dtype)
    pattern, values = formats.from_dense(dense)
    rows, cols, listed = formats.to_coo(pattern, values)
    back, back_values = formats.from_coo(rows, cols, listed, dense.shape)
    assert back.equals(pattern) and torch.equal(back_values, values)
    for forth, back in ((formats.to_csr, formats.from_csr), (formats.to_csc, formats.from_csc)):
        pointers, minor, listed = forth(pattern, values)
        assert pointers.numel() == dense.shape[forth is formats.to_csc] + 1
        again, again_values = back(pointers, minor, listed, dense.shape)
        assert again.equals(pattern) and torch.equal(again_values, values) and again_values.dtype == dtype


def test_csr_and_csc_are_sorted():
    dense, _ = sample()
    pattern, values = formats.from_dense(dense)
    theirs = dense.to_sparse_csr()
    crow, cols, listed = formats.to_csr(pattern, values)
    assert torch.equal(crow, theirs.crow_indices()) and torch.equal(cols, theirs.col_indices()) and torch.equal(listed, theirs.values())
    theirs = dense.to_sparse_csc()
    ccol, rows, listed = formats.to_csc(pattern, values)
    assert torch.equal(ccol, theirs.ccol_indices()) and torch.equal(rows, theirs.row_indices()) and torch.equal(listed, theirs.values())


def test_unsorted_csr():
    pattern, values = formats.from_csr([0, 2, 3], [2, 0, 1], [1.0, 2.0, 3.0], (2, 3))
    assert formats.to_dense(pattern, values).tolist() == [[2, 0, 1], [0, 3, 0]]
    pattern, values = formats.from_csc([0, 2, 2, 3], [1, 0, 1], [1.0, 2.0, 3.0], (2, 3))
    assert formats.to_dense(pattern, values).tolist() == [[2, 0, 0], [1, 0, 3]]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse CS")
def test_torch_sparse(layout):
    dense, _ = sample()
    theirs = dense.to_sparse(layout=layout)
    pattern, values = formats.from_torch_sparse(theirs)
    assert torch.equal(formats.to_dense(pattern, values), dense)
    forth = {torch.sparse_coo: formats.to_torch_coo, torch.sparse_csr: formats.to_torch_csr, torch.sparse_csc: formats.to_torch_csc}[layout]
    assert forth(pattern, values).layout == layout and torch.equal(forth(pattern, values).to_dense(), dense)


def test_uncoalesced_torch_coo():
    theirs = torch.sparse_coo_tensor([[1, 0, 1], [2, 0, 2]], [1.0, 2.0, 3.0], (2, 3))
    fails(["(1, 2)", "twice", "sum_duplicates"], formats.from_torch_sparse, theirs)
    pattern, values = formats.from_torch_sparse(theirs, sum_duplicates=True)
    assert torch.equal(formats.to_dense(pattern, values), theirs.to_dense())


@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "lil", "dok", "bsr", "dia"])
def test_scipy(kind):
    dense, _ = sample(12, 20, 0.3)
    pattern, values = formats.from_scipy(scipy_sparse.coo_array(dense.numpy()).asformat(kind))
    assert torch.equal(formats.to_dense(pattern, values), dense)
    assert (formats.to_scipy(pattern, values).toarray() == dense.numpy()).all()


def test_scipy_unsorted_duplicates_and_explicit_zeros():
    matrix = scipy_sparse.coo_array(([1.0, 2.0, 0.0, 4.0], ([1, 0, 1, 1], [2, 1, 0, 2])), shape=(2, 3))
    fails(["(1, 2)", "twice"], formats.from_scipy, matrix)
    pattern, values = formats.from_scipy(matrix, sum_duplicates=True)
    assert pattern.nnz == 3 and formats.to_dense(pattern, values).tolist() == [[0, 2, 0], [0, 0, 5]]
    unsorted = scipy_sparse.csr_array(([1.0, 0.0], [2, 0], [0, 2, 2]), shape=(2, 3))
    pattern, values = formats.from_scipy(unsorted)
    assert pattern.cols.tolist() == [0, 2] and values.tolist() == [0.0, 1.0]
    assert formats.to_scipy(pattern, values).nnz == 2


def test_scipy_has_no_16_bit_types():
    pattern, values = formats.from_dense(torch.eye(3, dtype=torch.bfloat16))
    assert formats.to_scipy(pattern, values).dtype == "float32"


def test_sum_duplicates():
    pattern, values = formats.from_coo([1, 0, 1, 1], [2, 0, 2, 2], [1.0, 2.0, 3.0, 5.0], (2, 3), sum_duplicates=True)
    assert pattern.nnz == 2 and values.tolist() == [2.0, 9.0]


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (3, 4)])
def test_no_connections(shape):
    pattern, values = formats.from_coo([], [], torch.empty(0), shape)
    assert pattern.nnz == 0 and formats.to_dense(pattern, values).shape == shape and pattern.density == 0.0
    assert formats.to_csr(pattern, values)[0].tolist() == [0] * (shape[0] + 1)
    assert formats.to_scipy(pattern, values).shape == shape
    assert formats.from_dense(torch.zeros(shape))[0].equals(pattern)


def test_any_integer_type_and_numpy_and_lists():
    import numpy as np

    expected = snack.Pattern([0, 1], [1, 0], (2, 2))
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        assert snack.Pattern(torch.tensor([0, 1], dtype=dtype), torch.tensor([1, 0], dtype=dtype), (2, 2)).equals(expected)
    assert snack.Pattern(np.array([1, 0], dtype=np.uint16), (0, 1), torch.Size([2, 2])).equals(expected)


def test_copies():
    pattern = snack.Pattern.random((30, 40), 100, seed=3)
    for twin in (pattern.clone(), copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern)), pattern.to("cpu")):
        assert twin.equals(pattern)
    assert pattern.clone().index.data_ptr() != pattern.index.data_ptr()
    assert pattern.nbytes == pattern.index.nbytes + pattern.tile_ptr.nbytes and "nnz=100" in repr(pattern)


# ---- random topologies ----


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(0, 40), st.floats(0, 1), st.integers(0, 2**63))
def test_random_is_exact(out, in_, density, seed):
    nnz = round(density * out * in_)
    pattern = snack.Pattern.random((out, in_), nnz, seed)
    positions = set(zip(pattern.rows.tolist(), pattern.cols.tolist()))
    assert len(positions) == nnz == pattern.nnz and all(0 <= r < out and 0 <= c < in_ for r, c in positions)
    assert pattern.equals(snack.Pattern.random((out, in_), nnz, seed))
    assert pattern.equals(snack.Pattern(pattern.rows, pattern.cols, (out, in_)))


def test_random_is_uniform():
    """Every position is drawn about equally often: chi-square over 400 positions, far from any plausible deviation."""
    counts = torch.zeros(20, 20)
    for seed in range(400):
        pattern = snack.Pattern.random((20, 20), 40, seed)
        counts[pattern.rows.long(), pattern.cols.long()] += 1
    chi2 = float(((counts - 40) ** 2 / 40 / 0.9).sum())
    assert 280 < chi2 < 540  # 399 degrees of freedom, five standard deviations


def test_seeds_differ():
    assert not snack.Pattern.random((50, 50), 100, 1).equals(snack.Pattern.random((50, 50), 100, 2))


# ---- bad input ----


def test_bad_patterns():
    fails(["row 3", "3"], snack.Pattern, [0, 3], [0, 0], (3, 4))
    fails(["-1"], snack.Pattern, [0, -1], [0, 0], (3, 4))
    fails(["4"], snack.Pattern, [0, 1], [0, 4], (3, 4))
    fails(["(1, 2)", "twice"], snack.Pattern, [1, 0, 1], [2, 0, 2], (3, 4))
    fails(["2 entries", "3"], snack.Pattern, [0, 1], [0, 1, 2], (3, 4))
    fails(["integers", "float32"], snack.Pattern, [0.0, 1.0], [0, 1], (3, 4))
    fails(["integers", "bool"], snack.Pattern, torch.tensor([True]), [0], (3, 4))
    fails(["1-D"], snack.Pattern, [[0, 1]], [0, 1], (3, 4))
    for shape in ((3,), 3, (3, 4, 5)):
        fails(["pair"], snack.Pattern, [0], [0], shape)
    for shape in ((-1, 4), (3, 2**31), (3.0, 4), ("3", 4)):
        fails(["between 0 and 2147483647"], snack.Pattern, [0], [0], shape)
    fails(["13", "12 positions"], snack.Pattern.random, (3, 4), 13, 0)
    fails(["-1"], snack.Pattern.random, (3, 4), -1, 0)


def test_bad_values():
    fails(["int64", "floating"], formats.from_coo, [0], [0], [1], (3, 4))
    fails(["(2,)", "(1,)"], formats.from_coo, [0], [0], [1.0, 2.0], (3, 4))
    fails(["(1, 1)"], formats.from_coo, [0], [0], [[1.0]], (3, 4))
    fails(["mask", "(2, 3)", "(3, 2)"], formats.from_mask, torch.ones(2, 3), torch.ones(3, 2))
    fails(["2-D"], formats.from_dense, torch.ones(3))
    fails(["2-D"], formats.from_mask, torch.ones(3))
    fails(["int64"], formats.from_dense, torch.ones(2, 2, dtype=torch.int64))
    fails(["strided"], formats.from_torch_sparse, torch.ones(2, 2))
    fails(["ndarray"], formats.from_scipy, torch.ones(2, 2).numpy())


@pytest.mark.parametrize("pointers", [[0, 1], [0, 2, 1], [1, 1, 2], [0, 1, 3], [0, 1, 2, 2]])
def test_bad_pointers(pointers):
    fails(["pointers", "3 ascending", "from 0 to 2"], formats.from_csr, pointers, [0, 1], [1.0, 2.0], (2, 3))
    fails(["pointers"], formats.from_csc, pointers, [0, 1], [1.0, 2.0], (3, 2))


def test_duplicates_of_16_bit_values_are_added_in_float32():
    _, values = formats.from_coo([0, 0, 0], [0, 0, 0], torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16), (1, 1), sum_duplicates=True)
    assert values.dtype == torch.bfloat16 and values.item() == 258


@pytest.mark.parametrize("convert", [formats.to_dense, formats.to_coo, formats.to_csr, formats.to_csc, formats.to_torch_coo, formats.to_scipy])
def test_values_of_another_length_are_refused(convert):
    pattern = snack.Pattern([0, 1, 2], [0, 1, 2], (3, 3))
    with pytest.raises(SnackError, match="one for every"):
        convert(pattern, torch.ones(1))
