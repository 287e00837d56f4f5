"""Files of every format there and back, what cannot be read or written, SparseLab's layers, ONNX."""

import importlib.util
import sys

import numpy as np
import pytest
import scipy.sparse as scipy_sparse
import torch
from torch import nn

import snack
from checks import fails, same, snapshot
from snack import io
from snack.nn import SparseLinear, sparsify


def net():
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 5))


# ---- files ----


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npz"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pytorch_22616_round_trip(tmp_path, suffix, dtype):
    """pytorch/pytorch#22616, #16667: what was saved loads again, the same connections in the same order."""
    model = sparsify(net().to(dtype), 0.8, include="0")
    with torch.no_grad():
        model[0].values[3] = 0.0
    io.write(model, tmp_path / f"m{suffix}")
    state = io.read(tmp_path / f"m{suffix}")
    back = io.import_state_dict(net().to(dtype), state)
    assert same(back.state_dict(), model.state_dict())
    is_wide = suffix == ".npz" and dtype == torch.bfloat16
    assert same(state, model.state_dict()) and state["0.values"].dtype == (torch.float32 if is_wide else dtype)
    assert [p.name for p in tmp_path.iterdir()] == [f"m{suffix}"]


@pytest.mark.parametrize("format", ["csr", "csc", "coo", "bsr"])
def test_scipy_files(tmp_path, format):
    matrix = scipy_sparse.random_array((30, 20), density=0.2, format=format, dtype=np.float32, rng=np.random.default_rng(0))
    scipy_sparse.save_npz(tmp_path / "w.npz", matrix)
    layer = io.as_model(io.read(tmp_path / "w.npz"))
    ours = snack.formats.to_scipy(layer.pattern, layer.values)
    assert isinstance(layer, SparseLinear) and (abs(ours - matrix)).max() == 0
    assert layer.nnz == matrix.tocoo().nnz


def test_npz_of_plain_arrays(tmp_path):
    weight = np.asfortranarray(np.random.default_rng(0).normal(size=(3, 4)).astype(">f4"))
    np.savez(tmp_path / "m.npz", **{"a.weight": weight, "a.weight_mask": np.eye(3, 4, dtype=bool), "a.bias": np.zeros(3, np.float32)})
    layer = io.as_model(io.read(tmp_path / "m.npz")).get_submodule("a")
    assert layer.nnz == 3 and layer.values.tolist() == [float(weight[i, i]) for i in range(3)]


def test_unreadable_files(tmp_path):
    for name, content, words in (
        ("a.pt", b"hello", ["a.pt", "not a readable PyTorch file"]),
        ("a.pt", b"", ["not a readable PyTorch file"]),
        ("a.pth", b"\x80\x02junk", ["not a readable PyTorch file"]),
        ("a.npz", b"hello", ["not a readable .npz file"]),
        ("a.npz", b"PK\x03\x04" + bytes(40), ["not a readable .npz file"]),
        ("a.safetensors", b"hello", ["not a readable safetensors file"]),
        ("a.h5", b"hello", ["a.h5", ".safetensors"]),
        ("a", b"hello", ["no suffix"]),
    ):
        (tmp_path / name).write_bytes(content)
        fails(words, io.read, tmp_path / name)
    fails(["no file"], io.read, tmp_path / "none.pt")
    (tmp_path / "folder.pt").mkdir()
    fails(["not a file"], io.read, tmp_path / "folder.pt")
    for content, words in ((net(), ["Python objects", "state_dict()"]), ([1], ["list"]), ({"a": torch.ones(1), "epoch": 3}, ["'epoch'", "int"])):
        torch.save(content, tmp_path / "b.pt")
        fails(words, io.read, tmp_path / "b.pt")
    torch.save(net().state_dict(), tmp_path / "c.pt")
    whole = (tmp_path / "c.pt").read_bytes()
    (tmp_path / "c.pt").write_bytes(whole[: len(whole) // 2])
    fails(["not a readable PyTorch file"], io.read, tmp_path / "c.pt")
    np.savez(tmp_path / "d.npz", a=np.array([object()]))
    fails(["objects"], io.read, tmp_path / "d.npz")
    np.savez(tmp_path / "f.npz", format=np.array(b"csr"), shape=np.array([3, 4]), data=np.ones(2), indices=np.zeros(3), indptr=np.zeros(2))
    fails(["f.npz", "scipy.sparse.load_npz"], io.read, tmp_path / "f.npz")
    with open(tmp_path / "e.npz", "wb") as file:
        np.save(file, np.ones(3))
    fails(["one array without a name"], io.read, tmp_path / "e.npz")


def test_bad_writes(tmp_path):
    fails(["m.h5"], io.write, net(), tmp_path / "m.h5")
    fails(["dict", "as_model"], io.write, {}, tmp_path / "m.pt")
    fails(["metadata"], io.write, net(), tmp_path / "m.pt", {"a": 1})
    fails(["cannot be written"], io.write, net(), tmp_path / "nowhere" / "m.npz")
    fails(["'weight'", "not a tensor with numbers"], io.write, nn.Linear(3, 4, device="meta"), tmp_path / "m.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package, call", [
    ("scipy.sparse", lambda path: io.read(path / "w.npz")),
    ("onnx", lambda path: io.export_onnx(net(), (torch.ones(1, 20),), path / "m.onnx")),
])  # fmt: skip
def test_missing_packages_are_a_sentence(tmp_path, monkeypatch, package, call):
    scipy_sparse.save_npz(tmp_path / "w.npz", scipy_sparse.eye_array(3, format="csr"))
    monkeypatch.setitem(sys.modules, package, None)
    fails([package.split(".")[0], "pip install"], call, tmp_path)


# ---- SparseLab ----


@pytest.mark.skipif(importlib.util.find_spec("sparselab") is None, reason="sparselab is not installed (requirements/bench.txt)")
@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support")
def test_sparselab():
    import sparselab

    model = nn.Sequential(sparselab.SparseLinear(20, 30, sparsity=0.8), nn.ReLU(), sparselab.SparseLinear(30, 5, sparsity=0.5, bias=False))
    with torch.no_grad():
        model[0]._values[0] = 0.0
    x = torch.randn(4, 20)
    y, nnz, bias = model(x), [model[i].nnz for i in (0, 2)], model[0].bias
    state = model.state_dict()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert io.import_sparselab(model) is model
    assert [model[i].nnz for i in (0, 2)] == nnz and model[0].bias is bias and model[2].bias is None
    torch.testing.assert_close(model(x), y)
    fails(["'0'", "import_sparselab"], optimizer.step)
    model(x).sum().backward()
    assert isinstance(io.import_sparselab(sparselab.SparseLinear(4, 3, sparsity=0.5)), SparseLinear)
    # Its files have no topology: nothing is guessed.
    assert not any(isinstance(m, SparseLinear) for m in io.as_model(state).modules())


def test_no_sparselab_layer():
    fails(["Sequential", "no sparselab.SparseLinear"], io.import_sparselab, net())
    fails(["int"], io.import_sparselab, 3)


# ---- ONNX ----


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("onnxscript") is None, reason="onnxscript is not installed (requirements/test.txt)")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_onnx_is_dense_and_says_so(tmp_path):
    from onnx.reference import ReferenceEvaluator

    model, x = sparsify(net(), 0.8, include="0").eval(), torch.randn(2, 20)
    before = snapshot(model)
    with pytest.warns(UserWarning, match="ONNX has no sparse layers, so 120 connections are written as 600 weights"):
        io.export_onnx(model, (x,), tmp_path / "m.onnx", external_data=False, verbose=False)
    assert same(before, snapshot(model)) and isinstance(model[0], SparseLinear)
    runtime = ReferenceEvaluator(str(tmp_path / "m.onnx"))
    (y,) = runtime.run(None, {runtime.input_names[0]: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x).detach())
    fails(["no folder"], io.export_onnx, model, (x,), tmp_path / "nowhere" / "m.onnx")
    fails(["int"], io.export_onnx, 3, (x,), tmp_path / "m.onnx")
