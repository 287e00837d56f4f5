"""What sparsify leaves alone, and says so: weights that something else reads or computes; and optimisers built before it."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from checks import fails, mlp
from snack.nn import SparseLinear, densify, sparsify

pytestmark = pytest.mark.filterwarnings("error:snack.sparsify left dense:UserWarning")  # a layer that is left dense unasked warns


def kinds(model):
    return {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, (nn.Linear, SparseLinear))}


# ---- what reads .weight ----


def encoder(**kwargs):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, **kwargs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("exclude", ["*.out_proj", ["*.out_proj", "layers.0.*"], ["*.out_proj", "*.linear2"]])
@pytest.mark.parametrize("padded", [False, True])
def test_transformer_encoder_in_inference(exclude, padded):
    """The fast path reads linear1.weight: it is not taken, and the numbers are those of the dense copy of the same function."""
    model = encoder().eval()
    untouched = copy.deepcopy(model)
    sparsify(model, 0.5, exclude=exclude)
    x = torch.randn(3, 5, 16)
    mask = torch.arange(5) >= torch.tensor([[5], [4], [2]]) if padded else None
    dense = densify(copy.deepcopy(model))
    with torch.no_grad():
        ours, theirs = model(x, src_key_padding_mask=mask), dense(x, src_key_padding_mask=mask)
    live = torch.ones(3, 5, dtype=torch.bool) if mask is None else ~mask
    torch.testing.assert_close(ours[live], theirs[live], rtol=1e-4, atol=1e-5)
    model.train()
    model(x, src_key_padding_mask=mask).sum().backward()
    # densify switched the fast path on again: the dense copy has every attribute as the model had before.
    for ours, theirs in zip(dense.modules(), untouched.modules()):
        for name in ("activation_relu_or_gelu", "use_nested_tensor"):
            assert getattr(ours, name, None) == getattr(theirs, name, None)
        assert not any(key.startswith("_snack") for key in vars(ours))


def test_the_fast_path_would_have_been_taken(monkeypatch):
    """Guard of the test above: PyTorch does take it in the dense model, and not in the sparse one."""
    calls = []
    real = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *a, **k: calls.append(1) or real(*a, **k))
    model = encoder(enable_nested_tensor=False).eval()
    with torch.no_grad():
        model(torch.randn(3, 5, 16))
        assert len(calls) == 2
        sparsify(model, 0.5, exclude=["*.out_proj", "layers.1.*"])
        model(torch.randn(3, 5, 16))
    assert len(calls) == 3  # the second layer is dense still


@pytest.mark.parametrize("kdim", [None, 8])
def test_multihead_attention(kdim):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 4, kdim=kdim, batch_first=True), "head": nn.Linear(16, 16)})
    with pytest.warns(UserWarning, match=r"'attention.out_proj': nn.MultiheadAttention reads its weight"):
        sparsify(model, 0.5)
    assert isinstance(model["head"], SparseLinear) and isinstance(model["attention"].out_proj, nn.Linear)
    key = torch.randn(2, 5, kdim or 16)
    model.eval()
    with torch.no_grad():
        model["attention"](torch.randn(2, 5, 16), key, torch.randn(2, 5, 16))
    model["attention"].out_proj = nn.Linear(16, 16)  # an exact nn.Linear there is read just the same
    with pytest.warns(UserWarning, match="nn.MultiheadAttention"):
        sparsify(model, 0.5)
    assert isinstance(model["attention"].out_proj, nn.Linear)


def test_whole_transformer():
    model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
    with pytest.warns(UserWarning):
        sparsify(model, 0.5)
    model.eval()
    with torch.no_grad():
        assert model(torch.randn(2, 5, 16), torch.randn(2, 3, 16)).shape == (2, 3, 16)


def test_tied_embedding():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.body, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50, bias=False)
            self.head.weight = self.embedding.weight

    model = Language()
    with pytest.warns(UserWarning, match="'head': it shares a parameter with another module"):
        sparsify(model, 0.5)
    assert isinstance(model.body, SparseLinear) and model.head.weight is model.embedding.weight
    sparsify(model.body.to_dense(), 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Language()
        sparsify(model, 0.5, exclude=["head"])  # nothing to tell


def test_parametrized_and_computed_weights():
    model = nn.ModuleDict(
        {
            "spectral": parametrizations.spectral_norm(nn.Linear(4, 4)),
            "weight": parametrizations.weight_norm(nn.Linear(4, 4)),
            "plain": nn.Linear(4, 4),
        }
    )
    with pytest.warns(UserWarning, match="'spectral', 'weight': it is parametrized; call .*remove_parametrizations"):
        sparsify(model, 0.5)
    assert kinds(model)["plain"] == "SparseLinear" and kinds(model)["spectral"] == "ParametrizedLinear"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.ModuleDict(
            {"a": nn.utils.weight_norm(nn.Linear(4, 4)), "b": nn.utils.spectral_norm(nn.Linear(4, 4)), "c": nn.Linear(4, 4)}
        )
    with pytest.warns(UserWarning, match="its weight is computed from other parameters"):
        sparsify(old, 0.5)
    assert kinds(old) == {"a": "Linear", "b": "Linear", "c": "SparseLinear"}


def pruned():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    prune.l1_unstructured(model[0], "weight", 0.8)
    prune.random_unstructured(model[0], "bias", 0.5)
    with torch.no_grad():
        live = model[0].weight_mask.nonzero()[0]
        model[0].weight_orig[live[0], live[1]] = 0.0  # a live connection whose weight happens to be 0
    return model


def test_torch_prune():
    other, model, x = pruned(), pruned(), torch.randn(4, 20)
    expected = model(x)
    with pytest.warns(UserWarning, match="how='nonzero'"):
        sparsify(other, 0.5)
    assert kinds(other) == {"0": "Linear", "2": "SparseLinear"}
    sparsify(model, how="nonzero", include="0")
    torch.testing.assert_close(model(x), expected)
    assert model[0].nnz == 120 and isinstance(model[0].bias, nn.Parameter) and not model[0]._forward_pre_hooks
    assert [name for name, _ in model[0].named_parameters()] == ["values", "bias"]
    model(x).sum().backward()
    copy.deepcopy(model)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_derived_classes():
    model = nn.Sequential(Scaled(8, 8), nn.Linear(8, 8))
    with pytest.warns(UserWarning, match="'0': it is a Scaled"):
        sparsify(model, 0.5)
    assert kinds(model) == {"0": "Scaled", "1": "SparseLinear"}
    model = sparsify(nn.Sequential(Scaled(8, 8), nn.Linear(8, 8)), 0.5, include=[Scaled])
    assert kinds(model) == {"0": "SparseLinear", "1": "Linear"}
    with pytest.warns(UserWarning, match="no shape yet"):
        sparsify(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8)), 0.5, include=["*", nn.LazyLinear])


def test_odd_dtypes():
    with pytest.warns(UserWarning, match="its dtype is complex64"):
        sparsify(nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64), nn.Linear(4, 4)), 0.5)


# ---- an optimiser built too early ----


def backward(model):
    model(torch.randn(2, 784)).sum().backward()


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SGD(p, 0.1), torch.optim.Adam, lambda p: torch.optim.AdamW(p, fused=True), torch.optim.LBFGS]
)
@pytest.mark.parametrize("stepped_before", [False, True])
def test_stale_optimiser_is_told_at_its_first_step(make, stepped_before):
    model = mlp()
    optimizer = make(model.parameters())
    backward(model)
    if stepped_before and not isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step()
    sparsify(model, 0.9)
    backward(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for _ in range(2):  # and at every further one
        fails([type(optimizer).__name__, "layer '0'", "snack.sparsify replaced", "model.parameters()"], optimizer.step, lambda: None)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_optimisers_that_are_not_stale():
    model, other = mlp(), mlp()
    early = torch.optim.SGD([{"params": [model[0].bias]}, {"params": list(other.parameters())}], 0.1)
    sparsify(model, 0.9)
    late = torch.optim.Adam(model.parameters())
    for optimizer in (early, late):
        backward(model)
        backward(other)
        optimizer.step()


def test_a_dense_layer_that_another_model_still_trains():
    """The weight was replaced in one model only: an optimiser of the other one is right."""
    shared = nn.Linear(784, 10)
    first, second = nn.Sequential(shared), nn.Sequential(shared)
    sparsify(first, 0.9)
    optimizer = torch.optim.SGD(second.parameters(), 0.1)
    backward(second)
    optimizer.step()


def test_stale_after_a_second_conversion_and_after_densify():
    model = mlp()
    sparsify(model, 0.9, include="0")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(model)
    optimizer.step()
    sparsify(model, 0.9, include="2")
    fails(["layer '2'"], optimizer.step)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backward(model)
    optimizer.step()
    densify(model)
    fails(["layer '0'", "snack.densify"], optimizer.step)


def test_check_costs_nothing_afterwards():
    """Once cleared, a step does not look at the parameters again; replaced parameters are not kept alive."""
    from snack.nn import stale

    model = mlp()
    alive = list(model.parameters())  # noqa: F841  (the check is not over before these are gone)
    sparsify(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    groups, optimizer.param_groups = optimizer.param_groups, None
    stale._check(optimizer, (), {})
    optimizer.param_groups = groups
    dense = mlp()
    ids = {id(dense[i].weight) for i in (0, 2, 4)}
    kept = list(dense.parameters())
    sparsify(dense, 0.9)
    assert ids <= stale._replaced.keys()
    del kept
    gc.collect()
    assert not ids & stale._replaced.keys()
