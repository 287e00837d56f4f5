"""Models from elsewhere: every form of mask and sparse matrix becomes the same sparse layers; what lies changes nothing."""

import copy

import numpy as np
import pytest
import scipy.sparse as scipy_sparse
import torch
from torch import nn
from torch.ao.pruning import WeightNormSparsifier
from torch.nn import functional as F
from torch.nn.utils import prune

import snack
from checks import fails, same, snapshot
from snack import io
from snack.nn import SparseLinear, densify, sparsify


def net():
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 5))


def mask_of(shape, density=0.3, seed=1):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density).float()


MASK = mask_of((30, 20))


def expected(state, mask=MASK):
    """Position and value of every connection of layer 0, one of them an explicit zero."""
    rows, cols = mask.nonzero(as_tuple=True)
    return snack.formats.from_coo(rows, cols, state["0.weight"][rows, cols], mask.shape)


def dense_state():
    """A trained dense state dict whose first live weight is 0: it exists, whoever looks at the values."""
    state = {k: v.clone() for k, v in net().state_dict().items()}
    live = MASK.nonzero()[0]
    state["0.weight"][live[0], live[1]] = 0.0
    return state


def torch_prune(state):
    model = net()
    model.load_state_dict(state)
    prune.custom_from_mask(model[0], "weight", MASK)
    return model.state_dict(), {}


def torch_ao(state):
    model = net()
    model.load_state_dict(state)
    sparsifier = WeightNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 1), zeros_per_block=1)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    model[0].parametrizations.weight[0].mask.copy_(MASK)
    return model.state_dict(), {"masks": sparsifier.state_dict()}


def ao_with_masks_in_it(state):
    found, options = torch_ao(state)
    return found | {"0.parametrizations.weight.0.mask": options["masks"]["state"]["0.weight"]["mask"]}, {}


def mask_beside(state):
    return state | {"0.weight_mask": MASK.bool()}, {}


def masks_apart(name):
    return lambda state: (state, {"masks": {name: MASK}})


def sparse_tensor(layout):
    def form(state):
        rows, cols = MASK.nonzero(as_tuple=True)
        coo = torch.sparse_coo_tensor(torch.stack([rows, cols]), state["0.weight"][rows, cols], MASK.shape).coalesce()
        return state | {"0.weight": coo.to_sparse(layout=layout) if layout != torch.sparse_coo else coo}, {}

    return form


def scipy_unsorted(state):
    rows, cols = MASK.nonzero(as_tuple=True)
    order = torch.randperm(len(rows))
    rows, cols = rows[order], cols[order]
    matrix = scipy_sparse.coo_array((state["0.weight"][rows, cols].numpy(), (rows.numpy(), cols.numpy())), shape=tuple(MASK.shape))
    return state | {"0.weight": matrix}, {}


def own(state):
    layer = SparseLinear.from_dense(nn.Linear(20, 30), mask=MASK)
    pattern, values = expected(state)
    with torch.no_grad():
        layer.values.copy_(values), layer.bias.copy_(state["0.bias"])
    return {k: v for k, v in state.items() if not k.startswith("0.")} | {f"0.{k}": v for k, v in layer.state_dict().items()}, {}


FORMS = {
    "torch.nn.utils.prune": torch_prune, "torch.ao.pruning": torch_ao, "ao with its masks": ao_with_masks_in_it, "weight_mask": mask_beside,
    "masks by weight": masks_apart("0.weight"), "masks by layer": masks_apart("0"), "torch COO": sparse_tensor(torch.sparse_coo),
    "torch CSR": sparse_tensor(torch.sparse_csr), "torch CSC": sparse_tensor(torch.sparse_csc), "scipy, unsorted": scipy_unsorted, "own": own,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", ["dense", "sparse", "pruned"])
def test_every_form_gives_the_same_layers(form, target):
    """In a dense model, one that is sparse already (with other connections), and one that torch.nn.utils.prune masks."""
    state = dense_state()
    given, options = FORMS[form](state)
    model = net() if target != "sparse" else sparsify(net(), 0.5, include="0")
    if target == "pruned":
        prune.random_unstructured(model[0], "weight", 0.5)
        prune.random_unstructured(model[0], "bias", 0.5)
    assert io.import_state_dict(model, given, **options) is model
    pattern, values = expected(state)
    assert model[0].pattern.equals(pattern) and torch.equal(model[0].values, values) and int((values == 0).sum()) == 1
    assert type(model[3]) is nn.Linear and all(torch.equal(model.state_dict()[k], v) for k, v in state.items() if k != "0.weight")
    tree = io.as_model(given, **options)
    assert same(tree.state_dict(), model.state_dict()) and tree.import_notes == {}


def masked_twin(state):
    model = net()
    model.load_state_dict(state)
    with torch.no_grad():
        model[0].weight.mul_(MASK)
    return model.eval()


def test_the_function_is_that_of_the_masked_model():
    state = dense_state()
    model = io.import_state_dict(net(), torch_prune(state)[0]).eval()
    x = torch.randn(4, 20)
    torch.testing.assert_close(model(x), masked_twin(state)(x))


def test_live_modules_of_torch_ao():
    """sparsify(how="nonzero") takes the mask over, also where a live weight is 0."""
    model, x = net().eval(), torch.randn(4, 20)
    with torch.no_grad():
        model[0].weight[0, 0] = 0.0
    sparsifier = WeightNormSparsifier(sparsity_level=0.8, sparse_block_shape=(1, 1), zeros_per_block=1)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    model[0].parametrizations.weight[0].mask[0, 0] = 1.0
    mask, y = model[0].parametrizations.weight[0].mask.clone(), model(x)
    other = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="masked by torch.nn.utils.prune or torch.ao.pruning; pass how='nonzero'"):
        sparsify(other, 0.5)
    sparsify(model, how="nonzero", include="0")
    assert model[0].nnz == int(mask.sum()) and torch.equal(model[0].to_dense().weight != 0, (mask != 0) & (model[0].to_dense().weight != 0))
    assert (0, 0) in set(zip(*(c.tolist() for c in model[0].pattern.coordinates())))
    torch.testing.assert_close(model(x), y)


class Doubled(nn.Module):
    """Has a mask, and does more than mask."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", MASK)

    def forward(self, weight):
        return 2 * weight * self.mask


def test_a_parametrization_that_does_more_than_mask():
    model = net()
    nn.utils.parametrize.register_parametrization(model[0], "weight", Doubled())
    with pytest.warns(UserWarning, match="'0': it is parametrized"):
        sparsify(model, how="nonzero")
    assert type(model[0]) is not SparseLinear and isinstance(model[3], SparseLinear)


# ---- weights with zeros, and what is no layer ----


def test_zeros_are_connections_until_they_are_not():
    """SparseGPT and Wanda leave zeros in dense weights: only globs say that these are absent."""
    state = dense_state()
    state["0.weight"] *= MASK
    tree = io.as_model(state)
    assert type(tree.get_submodule("0")) is nn.Linear
    tree = io.as_model(state, include="0")
    assert tree.get_submodule("0").nnz == int(MASK.sum()) - 1
    model = io.import_state_dict(net(), state, include=["*"])
    assert model[0].nnz == int(MASK.sum()) - 1 and model[3].nnz == 150
    tree = io.as_model(state | {"3.weight_mask": torch.ones(5, 30)}, include=["*"], exclude=["3"])
    assert isinstance(tree.get_submodule("0"), SparseLinear) and type(tree.get_submodule("3")) is nn.Linear


def test_excluded_masks_are_multiplied():
    state = dense_state()
    tree = io.as_model(torch_prune(state)[0], exclude="0")
    assert torch.equal(tree.state_dict()["0.weight"], state["0.weight"] * MASK) and set(tree.state_dict()) == set(state)


def test_masks_of_other_tensors():
    """Of a bias and of a convolution: multiplied in, and said."""
    model = nn.ModuleDict({"conv": nn.Conv2d(2, 3, 3), "fc": nn.Linear(4, 5), "norm": nn.LayerNorm(5)})
    prune.random_unstructured(model["conv"], "weight", 0.5)
    prune.random_unstructured(model["fc"], "bias", 3)
    prune.random_unstructured(model["norm"], "weight", 2)
    tree = io.as_model(model.state_dict())
    state = tree.state_dict()
    assert torch.equal(state["conv.weight"], model["conv"].weight) and torch.equal(state["fc.bias"], model["fc"].bias)
    assert torch.equal(state["norm.weight"], model["norm"].weight) and list(tree.import_notes) == ["conv.weight"]
    assert "multiplied" in tree.import_notes["conv.weight"]
    # What was masked away may be anything, NaN too.
    state = io.as_model({"a.bias": torch.tensor([1.0, float("nan")]), "a.bias_mask": torch.tensor([1, 0])}).state_dict()
    assert state["a.bias"].tolist() == [1.0, 0.0]


def test_what_only_looks_like_a_layer():
    """A transposed weight (GPT-2's Conv1D), one with more tensors beside it, spectral norm: left as they are, with a reason."""
    state = {
        "conv1d.weight": torch.randn(4, 12), "conv1d.bias": torch.randn(12),
        "scaled.weight": torch.randn(4, 4), "scaled.scale": torch.randn(4),
        "parent.weight": torch.randn(4, 4), "parent.child.weight": torch.randn(4, 4),
        "codes.weight": torch.zeros(4, 4, dtype=torch.int8), "attn.bias": torch.ones(1, 1, 8, 8),
    }  # fmt: skip
    tree = io.as_model(state)
    assert same(tree.state_dict(), state)
    assert [n for n, m in tree.named_modules() if isinstance(m, nn.Linear)] == ["parent.child"]
    assert tree.import_notes.keys() == {"conv1d.weight", "scaled.weight", "parent.weight"}
    assert "(12,)" in tree.import_notes["conv1d.weight"] and "scale" in tree.import_notes["scaled.weight"]
    tree = io.as_model(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).state_dict())
    assert "not by a mask alone" in tree.import_notes["parametrizations.weight.original"]
    tree = io.as_model(torch_ao(dense_state())[0])
    assert "sparsifier.state_dict()" in tree.import_notes["0.parametrizations.weight.original"]
    fails(["unchanged", "sparsifier.state_dict()"], io.import_state_dict, net(), torch_ao(dense_state())[0])


def test_tied_weights_stay_tied():
    """A weight under two names is one tensor; made sparse, it would be two."""
    model = nn.ModuleDict({"embedding": nn.Embedding(9, 8), "body": nn.Linear(8, 8), "head": nn.Linear(8, 9, bias=False)})
    model["head"].weight = model["embedding"].weight
    tree = io.as_model(model.state_dict(), include="*")
    assert tree.get_parameter("embedding.weight") is tree.get_parameter("head.weight")
    assert isinstance(tree.get_submodule("body"), SparseLinear)
    assert tree.import_notes.keys() == {"embedding.weight", "head.weight"} and all("tied" in why for why in tree.import_notes.values())
    given = model.state_dict() | {"head.weight_mask": mask_of((9, 8))}
    before = snapshot(model)
    fails(["'head' is sparse", "tied"], io.import_state_dict, model, given)
    assert same(before, snapshot(model))


def test_a_bare_layer_and_names_of_modules():
    layer = io.import_state_dict(nn.Linear(20, 30), {"weight": torch.randn(30, 20), "bias": torch.zeros(30), "weight_mask": MASK})
    assert isinstance(layer, SparseLinear) and layer.nnz == int(MASK.sum())
    state = {"forward.weight": torch.randn(3, 2), "training.type.weight": torch.randn(2, 2), "parameters.x": torch.ones(1)}
    assert same(io.as_model(state).state_dict(), state)  # names that nn.Module uses itself


def test_a_layer_used_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x))

    source = sparsify(Twice(), 0.5)
    target = io.import_state_dict(Twice(), source.state_dict())
    assert target.a is target.b and target.a.pattern.equals(source.a.pattern)
    tree = io.as_model(source.state_dict())
    assert tree.get_submodule("a") is tree.get_submodule("b")


def test_dtype_device_hooks_and_frozen_weights_stay_the_models():
    model, seen = net().double(), []
    model[0].weight.requires_grad_(False)
    model[0].register_forward_hook(lambda *a: seen.append(1))
    bias = model[0].bias
    io.import_state_dict(model, torch_prune(dense_state())[0])
    assert model[0].values.dtype == torch.float64 and not model[0].values.requires_grad and model[0].bias is bias and bias.requires_grad
    model(torch.randn(2, 20, dtype=torch.float64))
    assert seen == [1] and model.sparsify_report.nnz == model[0].nnz
    stale = net()
    optimizer = torch.optim.SGD(stale.parameters(), 0.1)
    io.import_state_dict(stale, torch_prune(dense_state())[0])
    fails(["'0'", "import_state_dict"], optimizer.step)


# ---- scipy, duplicates, dtypes ----


def test_duplicates_are_added_only_when_asked():
    rows, cols, values = np.array([1, 0, 1, 2]), np.array([2, 1, 2, 0]), np.array([1.0, 2.0, 4.0, 0.0], dtype=np.float32)
    state = {"weight": scipy_sparse.coo_matrix((values, (rows, cols)), shape=(3, 4))}
    fails(["'weight'", "twice"], io.as_model, state)
    layer = io.as_model(state, sum_duplicates=True)
    assert layer.nnz == 3 and layer.to_dense().weight[1, 2] == 5.0  # and the explicit zero is one of the three
    uncoalesced = torch.sparse_coo_tensor(np.stack([rows, cols]), torch.from_numpy(values), (3, 4))
    assert same(io.as_model({"weight": uncoalesced}, sum_duplicates=True).state_dict(), layer.state_dict())
    fails(["int64", "floating"], io.as_model, {"weight": scipy_sparse.eye_array(3, dtype=np.int64)})
    fails(["column 9"], io.as_model, {"weight": torch.sparse_coo_tensor([[0], [9]], [1.0], (3, 4), check_invariants=False)})
    fails(["'adjacency'", "2-D 'weight'"], io.as_model, {"adjacency": torch.eye(3).to_sparse()})
    fails(["'weight'", "shape (4,)"], io.as_model, {"weight": scipy_sparse.coo_array(np.ones(4))})


# ---- what lies ----


def test_bad_input_changes_nothing():
    state = dense_state()
    masked = state | {"0.weight_mask": MASK}
    cases = [
        ({"0.weight_mask": MASK.t()}, {}, ["'0.weight'", "(20, 30)", "(30, 20)"]),
        ({"0.weight_mask": MASK * 0.5}, {}, ["'0.weight'", "other than 0 and 1"]),
        ({"0.weight_orig": state["0.weight"], "0.weight_mask": MASK}, {}, ["'0.weight_orig'", "remove one"]),
        ({}, {"masks": {"0.weight": MASK}}, ["another one in `masks`"]),
        ({}, {"masks": {"7.weight": MASK}}, ["'7.weight'", "no such tensor"]),
        ({}, {"masks": [MASK]}, ["list", "mapping"]),
        ({}, {"include": "head"}, ["'head'", "'0', '3'"]),
        ({}, {"exclude": "head"}, ["'head'", "'0', '3'"]),
        ({"3.weight": torch.randn(5, 31)}, {}, ["'3.weight'", "(5, 31)", "(5, 30)"]),
        ({"0.weight": torch.randn(31, 20), "0.bias": torch.ones(31), "0.weight_mask": mask_of((31, 20))}, {}, ["'0'", "(31, 20)", "(30, 20)"]),
        ({"0.bias": torch.ones(29)}, {}, ["'0", "(29,)"]),
        ({"1.running_mean": None}, {}, ["'1.running_mean' is a NoneType"]),
        ({"0.weight": torch.empty(30, 20, device="meta")}, {}, ["'0.weight'", "meta"]),
        ({"x": torch.ones(2)}, {}, ["'x'", "unknown"]),
        ({"x": np.array(["a"])}, {}, ["'x'", "numpy array"]),
        ({3: torch.ones(2)}, {}, ["key 3", "int"]),
    ]
    for change, options, words in cases:
        model = net()
        before = snapshot(model)
        fails(words, io.import_state_dict, model, masked | change, **options)
        assert same(before, snapshot(model)) and type(model[0]) is nn.Linear
    for missing in ("0.bias", "3.weight", "1.running_var"):
        model = net()
        fails([f"'{missing}' is not in the file"], io.import_state_dict, model, {k: v for k, v in masked.items() if k != missing})
        assert type(model[0]) is nn.Linear
    pruned = net()
    prune.random_unstructured(pruned[0], "bias", 3)
    fails(["'0.bias_orig' is not in the file"], io.import_state_dict, pruned, {k: v for k, v in masked.items() if k != "0.bias"})
    assert "bias_orig" in pruned[0]._parameters
    first = {"0.weight": torch.randn(30, 20), "0.weight_mask": MASK, "0.bias": torch.ones(30)}
    fails(["'0.bias'", "unknown"], io.import_state_dict, nn.Sequential(nn.Linear(20, 30, bias=False)), first)
    fails(["int"], io.import_state_dict, 3, {})
    fails(["list", "mapping"], io.import_state_dict, net(), [])
    fails(["list", "mapping"], io.as_model, [])


@pytest.mark.parametrize("key,value", [("rows", 30), ("cols", -1), ("shape", torch.tensor([1.0, 2.0])), ("slot_order", torch.tensor(9))])
def test_a_damaged_layer_of_our_own(key, value):
    state = own(dense_state())[0]
    state[f"0.{key}"] = torch.full_like(state[f"0.{key}"], value) if isinstance(value, int) else value
    model = net()
    fails(["'0'"], io.import_state_dict, model, state)
    assert type(model[0]) is nn.Linear


# ---- reports of users of other libraries ----


def test_pytorch_101186_sparse_tensors_in_a_checkpoint(tmp_path):
    """pytorch/pytorch#101186: a saved COO tensor forgets that it is coalesced; nothing here depends on the flag."""
    state = sparse_tensor(torch.sparse_coo)(dense_state())[0]
    torch.save({"epoch": 3, "state_dict": state, "optimizer": {"lr": 0.1}}, tmp_path / "m.pt")
    model = io.import_state_dict(net(), io.read(tmp_path / "m.pt"))
    assert model[0].pattern.equals(expected(dense_state())[0])
    back = model[0].to_torch_csr()
    assert torch.equal(back.to_dense(), state["0.weight"].to_dense())


def train(model, steps=20):
    """Momentum and weight decay, which revive masked weights elsewhere."""
    x, y = torch.randn(16, 20), torch.randint(5, (16,))
    for optimizer in (torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)):
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model.train()(x), y).backward()
            optimizer.step()


@pytest.mark.parametrize("kind", ["masked", "zeros"])
def test_sparsegpt_17_training_goes_on_from_a_sparse_checkpoint(tmp_path, kind):
    """IST-DASLab/sparsegpt#17, neuralmagic/sparseml#145, IntelLabs/distiller#76: zeros stay zeros through training, saving and resuming."""
    state = dense_state()
    state["0.weight"][0, 0] = 1.0  # so that no live weight is 0 in this one
    state["0.weight"] += (state["0.weight"] == 0).float() * 0.01
    torch.save(state | {"0.weight_mask": MASK} if kind == "masked" else state | {"0.weight": state["0.weight"] * MASK}, tmp_path / "m.pt")
    model = io.import_state_dict(net(), io.read(tmp_path / "m.pt"), include=() if kind == "masked" else "0")
    start = model[0].values.detach().clone()
    for _ in range(2):
        train(model)
        dense = densify(copy.deepcopy(model))
        assert not dense[0].weight[MASK == 0].any() and model[0].nnz == int(MASK.sum())
        io.write(model, tmp_path / "next.safetensors")
        model = io.import_state_dict(net(), io.read(tmp_path / "next.safetensors"))
    assert not torch.equal(model[0].values, start)


def test_rigl_15_a_users_mask():
    """google-research/rigl#15: the user's mask says which connections exist, and only they train, also at value 0."""
    model = net()
    with torch.no_grad():
        model[0].weight.zero_()
    io.import_state_dict(model, model.state_dict(), masks={"0.weight": MASK})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dst = snack.Static(model, optimizer)
    x, y = torch.randn(16, 20), torch.randint(5, (16,))
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        dst.step()
    weight = densify(model)[0].weight
    assert not weight[MASK == 0].any() and (weight[MASK == 1] != 0).float().mean() > 0.3  # some units stay dead


def test_condensed_sparsity_78_a_given_fan_in():
    """calgaryml/condensed-sparsity#78: n connections a neuron, known beforehand, and still n after training."""
    mask = torch.zeros(30, 20).scatter(1, torch.rand(30, 20).argsort(1)[:, :4], 1.0)
    model = net()
    io.import_state_dict(model, model.state_dict(), masks={"0": mask})
    train(model, 3)
    assert torch.bincount(model[0].pattern.rows, minlength=30).tolist() == [4] * 30
