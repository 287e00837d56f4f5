"""Files and state dicts: round trips, other sparsities, dense weights, and files that lie, which change nothing."""

import io
import json
import struct
import subprocess
import sys

import pytest
import torch
from safetensors import torch as safetensors
from torch import nn

from checks import fails
from snack.nn import SparseLinear, load, read_header, read_patterns, save, sparsify


def model(sparsity=0.8, dtype=torch.float32, bias=True):
    return nn.Sequential(
        SparseLinear(70, 33, sparsity=sparsity, dtype=dtype, bias=bias),
        nn.BatchNorm1d(33, dtype=dtype),
        nn.ReLU(),
        SparseLinear(33, 20, sparsity=sparsity, dtype=dtype),
        nn.Linear(20, 5, dtype=dtype),
    )


def state(m):
    return {k: v.clone() for k, v in m.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


# ---- state dicts ----


def test_keys():
    sd = model().state_dict()
    keys = {
        "values": torch.float32,
        "rows": torch.int32,
        "cols": torch.int32,
        "shape": torch.int64,
        "slot_order": torch.int64,
        "bias": torch.float32,
    }
    assert {k for k in sd if k.startswith("0.")} == {f"0.{k}" for k in keys} and all(sd[f"0.{k}"].dtype == d for k, d in keys.items())
    assert sd["0.shape"].tolist() == [33, 70] and sd["0.slot_order"].shape == () and int(sd["0.slot_order"]) == 1
    order = [(c // 1024, r, c) for r, c in zip(sd["0.rows"].tolist(), sd["0.cols"].tolist())]
    assert order == sorted(order)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("sparsity", [0.8, 0.5, 0.999])
def test_load_state_dict(assign, sparsity):
    a, b = model(), model(sparsity)
    result = b.load_state_dict(state(a), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys and same(state(a), state(b))
    a.eval(), b.eval()
    x = torch.randn(3, 70)
    assert torch.equal(a(x), b(x))
    b(x).sum().backward()
    torch.optim.Adam(b.parameters()).step()


def test_same_topology_size_keeps_all_addresses():
    """So that captured graphs and optimisers stay valid."""
    a, b = model(), model()
    tensors = [b[0].values, b[0].bias, b[0].index, b[0].tile_ptr]
    addresses = [t.data_ptr() for t in tensors]
    b.load_state_dict(state(a))
    assert [t.data_ptr() for t in (b[0].values, b[0].bias, b[0].index, b[0].tile_ptr)] == addresses and b[0].values is tensors[0]


def test_the_parameter_object_survives_another_size():
    a, b = model(), model(0.5)
    optimizer = torch.optim.SGD(b.parameters(), 0.1)
    parameter = b[0].values
    b(torch.randn(3, 70)).sum().backward()
    b.load_state_dict(state(a))
    assert b[0].values is parameter and parameter.grad is None
    b(torch.randn(3, 70)).sum().backward()
    optimizer.step()
    assert not torch.equal(b[0].values, a[0].values)


def test_nothing_is_shared_with_the_state_dict():
    for assign in (False, True):
        sd, b = state(model()), model(0.5)
        b.load_state_dict(sd, assign=assign)
        with torch.no_grad():
            b[0].values.zero_(), b[0].bias.zero_()
        assert bool(sd["0.values"].any()) and bool(sd["0.bias"].any())


def test_dtype_stays_unless_assigned():
    a = model()
    b, c = model(dtype=torch.float64), model(dtype=torch.float64)
    b.load_state_dict(state(a))
    assert b[0].values.dtype == torch.float64 and torch.equal(b[0].values, a[0].values.double())
    c.load_state_dict(state(a), assign=True)
    assert c[0].values.dtype == c[0].bias.dtype == torch.float32


@pytest.mark.parametrize("assign", [False, True])
def test_meta_layer(assign):
    a = model()
    b = SparseLinear(70, 33, sparsity=0.5, device="meta")
    b.load_state_dict(a[0].state_dict(), assign=assign)
    assert not b.values.is_meta and not b.bias.is_meta and b.pattern.equals(a[0].pattern) and torch.equal(b.values, a[0].values)
    assert torch.equal(b(torch.ones(2, 70)), a[0](torch.ones(2, 70)))


def test_torch_save_weights_only(tmp_path):
    a, b = model(), model(0.5)
    torch.save(a.state_dict(), tmp_path / "a.pt")
    b.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True))
    assert same(state(a), state(b))


def test_any_order_in_the_file_is_sorted():
    a, b = model(), model()
    sd = state(a)
    order = torch.randperm(a[0].nnz)
    for key in ("values", "rows", "cols"):
        sd[f"0.{key}"] = sd[f"0.{key}"][order]
    b.load_state_dict(sd)
    assert same(state(a), state(b))


def test_explicit_zeros_survive():
    a, b = model(), model(0.5)
    with torch.no_grad():
        a[0].values.zero_()
    b.load_state_dict(state(a))
    assert b[0].nnz == a[0].nnz and b[0].pattern.equals(a[0].pattern)


def test_dense_weight():
    """From a dense checkpoint: its non-zero entries."""
    b, dense = model(), nn.Linear(70, 33)
    mask = torch.rand(33, 70) < 0.3
    with torch.no_grad():
        dense.weight.mul_(mask)
    result = b[0].load_state_dict(dense.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    assert b[0].nnz == int(mask.sum()) and torch.equal(b[0].to_dense().weight, dense.weight) and torch.equal(b[0].bias, dense.bias)


def test_missing_and_unexpected():
    b = model()
    before = state(b)
    assert set(b[0].load_state_dict({}, strict=False).missing_keys) == {"values", "rows", "cols", "shape", "slot_order", "bias"}
    assert same(before, state(b))
    result = b[0].load_state_dict({"bias": torch.ones(33), "more": torch.ones(1)}, strict=False)
    assert set(result.missing_keys) == {"values", "rows", "cols", "shape", "slot_order"} and result.unexpected_keys == ["more"]
    assert torch.equal(b[0].bias, torch.ones(33))
    with pytest.raises(RuntimeError, match="values"):
        b[0].load_state_dict({"bias": torch.ones(33)})
    no_bias = SparseLinear(70, 33, sparsity=0.8, bias=False)
    assert no_bias.load_state_dict(b[0].state_dict(), strict=False).unexpected_keys == ["bias"]
    assert b[0].load_state_dict(no_bias.state_dict(), strict=False).missing_keys == ["bias"]


class Gated(SparseLinear):
    """A derived class with a parameter of its own and a hook that renames keys of old files."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gate = nn.Parameter(torch.rand(self.out_features))
        self.hooked = 0
        self.register_load_state_dict_pre_hook(Gated.rename)

    @staticmethod
    def rename(module, state_dict, prefix, *_):
        module.hooked += 1
        if prefix + "old_values" in state_dict:
            state_dict[prefix + "values"] = state_dict.pop(prefix + "old_values")


def test_derived_class(tmp_path):
    a, b = Gated(70, 33, sparsity=0.8), Gated(70, 33, sparsity=0.5)
    sd = state(a)
    sd["old_values"] = sd.pop("values")
    b.load_state_dict(sd)
    assert same(state(a), state(b)) and b.hooked == 1
    save(a, tmp_path / "m.safetensors")
    assert same(state(load(tmp_path / "m.safetensors", Gated(70, 33, sparsity=0.5))), state(a))
    plain = SparseLinear(70, 33, sparsity=0.5)
    before = state(plain)
    fails(["'gate'", "unknown"], load, tmp_path / "m.safetensors", plain)
    save(plain, tmp_path / "m.safetensors")
    fails(["'gate' is not in the file"], load, tmp_path / "m.safetensors", b)
    assert same(state(plain), before) and same(state(b), state(a))


# ---- lies ----


def drop(key):
    return lambda sd: sd.pop(key)


def put(key, make):
    return lambda sd: sd.__setitem__(key, make(sd[key]))


def at(index, value):
    def change(t):
        t = t.clone()
        t[index] = value
        return t

    return change


LIES = {
    "row out of range": (put("0.rows", at(5, 33)), ["row 33"]),
    "negative row": (put("0.rows", at(5, -1)), ["-1"]),
    "column out of range": (put("0.cols", at(5, 70)), ["70"]),
    "huge column": (put("0.cols", lambda t: at(5, 2**40)(t.long())), [str(2**40)]),
    "negative column": (put("0.cols", at(0, -70)), ["-70"]),
    "duplicates": (lambda sd: (put("0.rows", lambda t: at(1, t[0])(t))(sd), put("0.cols", lambda t: at(1, t[0])(t))(sd)), ["twice"]),
    "values too short": (put("0.values", lambda t: t[:-1]), ["461", "462"]),
    "rows too short": (put("0.rows", lambda t: t[:-1]), ["461", "462"]),
    "cols too long": (put("0.cols", lambda t: torch.cat([t, t[:1]])), ["463"]),
    "float indices": (put("0.rows", lambda t: t.float()), ["float32", "integers"]),
    "bool indices": (put("0.cols", lambda t: t > 3), ["bool"]),
    "2-D indices": (put("0.rows", lambda t: t[None]), ["1-D"]),
    "integer values": (put("0.values", lambda t: t.int()), ["int32"]),
    "2-D values": (put("0.values", lambda t: t[None]), ["(1, 462)"]),
    "other shape": (put("0.shape", lambda t: t.flip(0)), ["(70, 33)", "(33, 70)"]),
    "larger shape": (put("0.shape", lambda t: t + 1), ["(34, 71)"]),
    "negative shape": (put("0.shape", lambda t: -t), ["(-33, -70)"]),
    "float shape": (put("0.shape", lambda t: t.double()), ["float64", "shape"]),
    "scalar shape": (put("0.shape", lambda t: t[0]), ["shape (33,)"]),
    "long shape": (put("0.shape", lambda t: t.repeat(500)), ["(1000,)"]),
    "future slot order": (put("0.slot_order", lambda t: t + 1), ["slot order [2]", "knows 1"]),
    "float slot order": (put("0.slot_order", lambda t: t.float()), ["slot_order", "float32"]),
    "empty slot order": (put("0.slot_order", lambda t: t[None][:0]), ["slot order []"]),
    "no slot order": (drop("0.slot_order"), ["lacks slot_order"]),
    "no rows": (drop("0.rows"), ["lacks rows"]),
    "no values": (drop("0.values"), ["lacks values"]),
    "bias too short": (put("0.bias", lambda t: t[:-1]), ["bias", "(32,)", "(33,)"]),
    "dense weight of another shape": (
        lambda sd: (
            [sd.pop(f"0.{k}") for k in ("values", "rows", "cols", "shape", "slot_order")],
            sd.update({"0.weight": torch.ones(70, 33)}),
        ),
        ["weight", "(70, 33)", "(33, 70)"],
    ),
    "both dense and sparse": (lambda sd: sd.update({"0.weight": torch.ones(33, 70)}), ["both"]),
}
# The file as a whole: for snack.load only.
FILE_LIES = {
    "lie in the last sparse layer": (put("3.rows", at(0, 20)), ["'3'", "row 20"]),
    "dense layer of another shape": (put("4.weight", lambda t: t.t().contiguous()), ["'4.weight'", "(20, 5)", "(5, 20)"]),
    "dense layer missing": (drop("4.bias"), ["'4.bias' is not in the file"]),
    "buffer missing": (drop("1.running_mean"), ["running_mean"]),
    "bias missing": (drop("3.bias"), ["'3.bias' is not in the file"]),
    "layer missing": (lambda sd: [sd.pop(k) for k in list(sd) if k.startswith("0.")], ["'0' is not in the file"]),
    "unknown entry": (lambda sd: sd.update({"5.weight": torch.ones(3)}), ["'5.weight'", "unknown"]),
    "sparse where the model is dense": (
        lambda sd: (sd.pop("4.weight"), sd.update({f"4.{k}": v for k, v in SparseLinear(20, 5, sparsity=0.5).state_dict().items()})),
        ["'4' is sparse in the file", "sparsify"],
    ),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_state_dict_that_lies(lie, assign):
    """load_state_dict says so, and the layer is as it was."""
    change, words = LIES[lie]
    sd, b = state(model()), model(0.5)
    change(sd)
    before, objects = state(b[0]), [b[0].values, b[0].bias, b[0].index]
    with pytest.raises(RuntimeError) as caught:
        b.load_state_dict(sd, assign=assign, strict=False)
    assert all(word in str(caught.value) for word in ["SparseLinear '0'", *words]), caught.value
    assert same(before, state(b[0])) and all(x is y for x, y in zip(objects, [b[0].values, b[0].bias, b[0].index]))


@pytest.mark.parametrize("lie", LIES | FILE_LIES)
def test_file_that_lies(lie, tmp_path):
    """snack.load says so in a sentence, and the whole model is as it was."""
    change, words = (LIES | FILE_LIES)[lie]
    sd, b = state(model()), model(0.5)
    change(sd)
    safetensors.save_file({k: v.contiguous() for k, v in sd.items()}, tmp_path / "lie.safetensors")
    before = state(b)
    fails(["lie.safetensors", "unchanged", *words], load, tmp_path / "lie.safetensors", b)
    assert same(before, state(b))


def test_values_that_are_not_tensors():
    b = model()
    with pytest.raises(RuntimeError, match="shape is not a tensor"):
        b[0].load_state_dict({**state(b[0]), "shape": [33, 70]})
    with pytest.raises(RuntimeError, match="values is not a tensor"):
        b[0].load_state_dict({**state(b[0]), "values": torch.empty(462, device="meta")})


# ---- files ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_save_and_load(tmp_path, dtype):
    a, b = model(dtype=dtype), model(0.5, dtype=dtype)
    path = tmp_path / "m.safetensors"
    save(a, path)
    assert load(path, like=b) is b and same(state(a), state(b))
    assert same(safetensors.load_file(path), state(a))  # readable by anyone
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_bare_layer_and_str_path(tmp_path):
    a, b = SparseLinear(70, 33, sparsity=0.8), SparseLinear(70, 33, sparsity=0.5)
    save(a, str(tmp_path / "m.safetensors"))
    assert same(state(load(str(tmp_path / "m.safetensors"), b)), state(a))


def test_no_connections(tmp_path):
    a, b = SparseLinear(70, 33, sparsity=0.9999), SparseLinear(70, 33, sparsity=0.5)
    assert a.nnz == 0
    save(a, tmp_path / "m.safetensors")
    assert load(tmp_path / "m.safetensors", b).nnz == 0 and read_header(tmp_path / "m.safetensors")["layers"][0]["nnz"] == 0


def test_dense_file_into_sparse_model(tmp_path):
    dense = nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 4))
    with torch.no_grad():
        dense[0].weight[:, ::2] = 0.0
    save(dense, tmp_path / "m.safetensors")
    b = sparsify(nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 4)), 0.9)
    load(tmp_path / "m.safetensors", b)
    assert b[0].nnz == 36 and b[1].nnz == 36 and torch.equal(b[0].to_dense().weight, dense[0].weight)


def test_shared_tensors(tmp_path):
    """Tied weights and a layer used twice are stored once and come back tied."""

    def build():
        m = nn.ModuleDict({"embedding": nn.Embedding(9, 33), "body": SparseLinear(33, 33, sparsity=0.8), "head": nn.Linear(33, 9)})
        m["head"].weight = m["embedding"].weight
        m["again"] = m["body"]
        return m

    torch.manual_seed(0)
    a, b = build(), build()
    save(a, tmp_path / "m.safetensors")
    stored = safetensors.load_file(tmp_path / "m.safetensors")
    assert "head.weight" not in stored and "again.values" not in stored
    load(tmp_path / "m.safetensors", b)
    assert same(state(a), state(b)) and b["head"].weight is b["embedding"].weight and b["again"] is b["body"]
    headers = {layer["name"]: layer["nnz"] for layer in read_header(tmp_path / "m.safetensors")["layers"]}
    assert headers == {"again": a["body"].nnz, "body": a["body"].nnz}
    assert all(pattern.equals(a["body"].pattern) for pattern in read_patterns(tmp_path / "m.safetensors").values())


def test_patterns_of_a_file(tmp_path):
    path = tmp_path / "m.safetensors"
    a = nn.Sequential(*(SparseLinear(7, 7, sparsity=0.5) for _ in range(11)), nn.Linear(7, 2))
    save(a, path)
    patterns = read_patterns(path)
    assert list(patterns) == [str(i) for i in range(11)] and all(patterns[str(i)].equals(a[i].pattern) for i in range(11))
    save(a[0], path)
    assert read_patterns(path)["(model)"].equals(a[0].pattern)
    sd = state(a)
    sd["3.rows"], sd["3.cols"] = torch.zeros_like(sd["3.rows"]), torch.zeros_like(sd["3.cols"])
    safetensors.save_file(sd, path)
    fails(["layer '3'", "damaged", "twice"], read_patterns, path)


def test_views_of_one_storage(tmp_path):
    m = nn.Module()
    whole = torch.arange(6.0)
    for name, part in (("a", whole[:3]), ("b", whole[3:]), ("c", whole.view(2, 3).t())):
        m.register_buffer(name, part)
    save(m, tmp_path / "m.safetensors")
    stored = safetensors.load_file(tmp_path / "m.safetensors")
    assert stored["a"].tolist() == [0, 1, 2] and stored["b"].tolist() == [3, 4, 5] and stored["c"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_header(tmp_path):
    path = tmp_path / "m.safetensors"
    save(model(), path, metadata={"method": "set", "seed": 3})
    header = read_header(path)
    assert (
        header["metadata"] == {"format": "pt", "snack": "1", "method": "set", "seed": "3"} and header["file_bytes"] == path.stat().st_size
    )
    layers = {layer["name"]: layer for layer in header["layers"]}
    assert list(layers) == ["0", "3"] and layers["0"]["shape"] == (33, 70) and layers["0"]["nnz"] == 462 and layers["0"]["dtype"] == "F32"
    assert abs(layers["0"]["sparsity"] - 0.8) < 1e-9 and layers["0"]["bytes"] == 12 * 462
    tensors = {t["name"]: t for t in header["tensors"]}
    assert tensors["4.weight"] == {"name": "4.weight", "dtype": "F32", "shape": (5, 20), "bytes": 400} and len(tensors) == 6 + 5 + 6 + 2
    json.dumps(header)
    save(SparseLinear(3, 4, sparsity=0.5), path)
    assert read_header(path)["layers"][0]["name"] == "(model)"


def test_damaged_header(tmp_path):
    sd = state(model())
    del sd["0.rows"]
    safetensors.save_file(sd, tmp_path / "m.safetensors")
    fails(["layer '0'", "damaged"], read_header, tmp_path / "m.safetensors")
    safetensors.save_file({"a": torch.ones(3)}, tmp_path / "n.safetensors", metadata={"snack.shared": '{"b": "c"}'})
    for text in ('{"b": "c"}', "[1]", "nonsense", '{"a": "a"}'):
        safetensors.save_file({"a": torch.ones(3)}, tmp_path / "n.safetensors", metadata={"snack.shared": text})
        fails(["shared", "damaged"], load, tmp_path / "n.safetensors", model())


@pytest.mark.parametrize("read", [read_header, lambda path: load(path, model())], ids=["header", "load"])
def test_unreadable_files(tmp_path, read):
    path = tmp_path / "m.safetensors"
    fails(["no file", "m.safetensors"], read, path)
    fails(["not a file"], read, tmp_path)
    save(model(), path)
    whole = path.read_bytes()
    for cut in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        fails(["m.safetensors", "cut short"], read, path)
    for other in (
        b"hello world, this is not a model",
        b"PK\x03\x04" + bytes(100),
        struct.pack("<Q", 2**60) + whole[8:],
        whole[:8] + b"[" + whole[9:],
        whole + b"more",
    ):
        path.write_bytes(other)
        fails(["m.safetensors", "not a readable safetensors file"], read, path)
    buffer = io.BytesIO()
    torch.save(model().state_dict(), buffer)
    path.write_bytes(buffer.getvalue())
    fails(["not a readable safetensors file"], read, path)


def test_bad_saves(tmp_path):
    fails(["cannot be written", "nowhere"], save, model(), tmp_path / "nowhere" / "m.safetensors")
    fails(["'snack'"], save, model(), tmp_path / "m", metadata={"snack": "2"})
    fails(["'0.values'", "meta"], save, nn.Sequential(SparseLinear(3, 4, sparsity=0.5, device="meta")), tmp_path / "m")
    fails(["str", "model"], load, tmp_path / "m", "model")

    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    fails(["_extra_state", "dict"], save, Extra(3, 4), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    a = model()
    save(a, path)

    def fail(tensors, file, metadata):
        with open(file, "wb") as f:
            f.write(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors, "save_file", fail)
    fails(["no space left"], save, model(), path)
    monkeypatch.undo()
    assert same(state(load(path, model())), state(a)) and [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.slow
def test_without_safetensors(tmp_path):
    """It is imported only when a file is written or read, and its absence is a sentence."""
    code = (
        "import sys; sys.modules['safetensors'] = None; import snack; from snack.nn import SparseLinear, save\n"
        "try: save(SparseLinear(3, 4, sparsity=0.5), 'm')\n"
        "except snack.SnackError as e: sys.exit('pip install safetensors' not in str(e))\n"
        "sys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0
