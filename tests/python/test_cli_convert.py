"""``snack convert`` and ``snack prune``: files in, files out, a table; wrong input is a sentence, status 2, and no file."""

import numpy as np
import pytest
import scipy.sparse as scipy_sparse
import torch
from safetensors import torch as safetensors
from torch import nn
from torch.nn.utils import prune

import snack
from snack import io
from snack.cli.main import main
from snack.nn import SparseLinear, read_header


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 5))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with one network dense, masked, and with zeros."""
    monkeypatch.chdir(tmp_path)
    model = net()
    torch.save(model.state_dict(), "dense.pt")
    prune.l1_unstructured(model[0], "weight", 0.9)
    torch.save({"epoch": 1, "state_dict": model.state_dict()}, "masked.pt")
    prune.remove(model[0], "weight")
    safetensors.save_file(model.state_dict(), "zeros.safetensors", metadata={"format": "pt", "method": "wanda"})
    return tmp_path


def fails(capsys, folder, words, *arguments):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("snack: ") and captured.err.count("\n") == 1 and captured.out == ""
    for word in words:
        assert word in captured.err, f"{word!r} not in: {captured.err}"
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def row(text, name):
    return next(line.split() for line in text.splitlines() if line.startswith(f"{name} "))


def test_convert_masks(files, capsys):
    assert main(["convert", "masked.pt", "sparse.safetensors"]) == 0
    out = capsys.readouterr().out
    assert row(out, "0")[:7] == ["0", "sparse", "30", "x", "20", "60", "0.9"] and row(out, "2")[1] == "dense"
    assert "not converted: 1.weight, 1.bias" in out
    assert [(layer["name"], layer["nnz"]) for layer in read_header("sparse.safetensors")["layers"]] == [("0", 60)]
    model = snack.load("sparse.safetensors", snack.sparsify(net(), 0.5, include="0"))
    dense = net()
    prune.l1_unstructured(dense[0], "weight", 0.9)
    x = torch.randn(3, 20)
    torch.testing.assert_close(model(x), dense(x))
    assert main(["inspect", "sparse.safetensors"]) == 0


def test_convert_zeros_only_where_told(files, capsys):
    hint = ["zeros.safetensors", "--include", "'0' (90.0% zeros)", "'2' (0.0% zeros)", "snack prune"]
    fails(capsys, files, hint, "convert", "zeros.safetensors", "out.safetensors")
    assert main(["convert", "zeros.safetensors", "out.safetensors", "--include", "0"]) == 0
    header = read_header("out.safetensors")
    assert [layer["nnz"] for layer in header["layers"]] == [60] and header["metadata"]["method"] == "wanda"
    assert main(["convert", "zeros.safetensors", "out.safetensors", "--include", "*", "--exclude", "2"]) == 0
    assert [layer["name"] for layer in read_header("out.safetensors")["layers"]] == ["0"]


def test_there_and_back_through_every_format(files, capsys):
    """masked .pt -> .safetensors -> .npz -> .pt -> dense .safetensors: the masked weights, to the bit."""
    steps = ["masked.pt", "a.safetensors", "b.npz", "c.pt", "d.safetensors"]
    for source, target in zip(steps, steps[1:]):
        assert main(["convert", source, target, *(["--dense"] if target.startswith("d") else [])]) == 0
    expected = safetensors.load_file("zeros.safetensors")
    result = safetensors.load_file("d.safetensors")
    assert result.keys() == expected.keys() and all(torch.equal(result[key], expected[key]) for key in result)
    out = capsys.readouterr().out
    assert row(out.split("d.safetensors (")[1], "0")[1] == "dense"


def test_convert_scipy_and_masks_of_their_own(files, capsys):
    matrix = scipy_sparse.coo_matrix((np.array([1.0, 2.0, 3.0], np.float32), ([1, 1, 0], [2, 2, 3])), shape=(4, 5))
    np.savez("w.npz", format=np.array(b"coo"), shape=np.array([4, 5]), data=matrix.data, row=matrix.row, col=matrix.col)
    fails(capsys, files, ["twice"], "convert", "w.npz", "w.safetensors")
    assert main(["convert", "w.npz", "w.safetensors", "--sum-duplicates"]) == 0
    assert row(capsys.readouterr().out, "(model)")[5] == "2"
    layer = snack.load("w.safetensors", SparseLinear(5, 4, bias=False, sparsity=0.5))
    assert layer.to_dense().weight[1, 2] == 3.0
    torch.save({"2.weight": torch.eye(5, 30)}, "masks.pt")
    assert main(["convert", "dense.pt", "m.safetensors", "--masks", "masks.pt"]) == 0
    assert row(capsys.readouterr().out, "2")[5] == "5"


def test_convert_says_what_it_left(files, capsys):
    state = {"c.weight": torch.randn(4, 12), "c.bias": torch.randn(12), "f.weight": torch.eye(3), "f.weight_mask": torch.eye(3)}
    torch.save(state, "odd.pt")
    assert main(["convert", "odd.pt", "odd.npz"]) == 0
    out = capsys.readouterr().out
    assert "not converted: c.weight, c.bias" in out and "c.weight: its bias has shape (12,)" in out


@pytest.mark.parametrize("options", [[], ["--distribution", "erk"], ["--scope", "global"]])
def test_prune(files, capsys, options):
    assert main(["prune", "dense.pt", "--sparsity", "0.8", *options, "out.safetensors"]) == 0
    out = capsys.readouterr().out
    stored = io.as_model(io.read("out.safetensors"))
    nnz = [m.nnz if isinstance(m, SparseLinear) else m.weight.numel() for m in (stored.get_submodule("0"), stored.get_submodule("2"))]
    assert sum(nnz) == round(0.2 * 750) and row(out, "0")[5] == str(nnz[0]) and "not converted: 1.weight, 1.bias" in out
    model = net()
    snack.prune.magnitude(model, 0.8, *([] if "erk" not in options else ["erk"]), scope="global" if "global" in options else "layer")
    assert all(torch.equal(entry, model.state_dict()[key]) for key, entry in stored.state_dict().items())


def test_prune_some_layers(files, capsys):
    assert main(["prune", "dense.pt", "--sparsity", "0.5", "--include", "0", "out.safetensors"]) == 0
    assert [layer["name"] for layer in read_header("out.safetensors")["layers"]] == ["0"]
    assert main(["prune", "masked.pt", "--sparsity", "0.5", "out.safetensors"]) == 0  # what is sparse already stays
    assert [(layer["name"], layer["nnz"]) for layer in read_header("out.safetensors")["layers"]] == [("0", 60), ("2", 75)]
    capsys.readouterr()
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 8), "body": nn.Linear(8, 8), "head": nn.Linear(8, 9, bias=False)})
    model["head"].weight = model["embedding"].weight
    torch.save(model.state_dict(), "tied.pt")
    assert main(["prune", "tied.pt", "--sparsity", "0.5", "out.safetensors"]) == 0
    out = capsys.readouterr().out
    assert row(out, "head")[1] == "dense" and row(out, "body")[1] == "sparse" and "tied weights" in out


def test_wrong_input(files, capsys):
    torch.save(net(), "module.pt")
    (files / "junk.npz").write_bytes(b"junk")
    torch.save({"a": torch.ones(3)}, "vector.pt")
    for words, *arguments in (
        (["no file none.pt"], "convert", "none.pt", "o.pt"),
        (["OUT", "o.h5", ".safetensors"], "convert", "masked.pt", "o.h5"),
        (["cannot be written"], "convert", "none.pt", "nowhere/o.pt"),  # found before the input is read
        (["Python objects", "state_dict()"], "convert", "module.pt", "o.pt"),
        (["not a readable .npz file"], "convert", "junk.npz", "o.pt"),
        (["'head'", "'0', '2'"], "convert", "masked.pt", "o.pt", "--include", "head"),
        (["no file masks.pt"], "convert", "masked.pt", "o.pt", "--masks", "masks.pt"),
        (["no 2-D weight"], "convert", "vector.pt", "o.pt"),
        (["required: --sparsity"], "prune", "dense.pt", "o.pt"),
        (["invalid float value"], "prune", "dense.pt", "o.pt", "--sparsity", "lots"),
        (["sparsity 1.5"], "prune", "dense.pt", "o.pt", "--sparsity", "1.5"),
        (["'head'"], "prune", "dense.pt", "o.pt", "--sparsity", "0.5", "--exclude", "head"),
        (["no distribution"], "prune", "dense.pt", "o.pt", "--sparsity", "0.5", "--scope", "global", "--distribution", "erk"),
        (["vector.pt", "no 2-D weight"], "prune", "vector.pt", "o.pt", "--sparsity", "0.5"),
        (["OUT", "o.h5"], "prune", "dense.pt", "o.h5", "--sparsity", "0.5"),
    ):
        fails(capsys, files, words, *arguments)


def test_help(capsys):
    for command in ("convert", "prune"):
        assert main([command, "--help"]) == 0
        assert "--include GLOB" in capsys.readouterr().out
