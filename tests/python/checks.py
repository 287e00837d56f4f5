"""What several test files ask: does a call fail with one good sentence, and did it leave everything as it was?"""

import pytest
import torch
from torch import nn

from snack.errors import SnackError
from snack.nn import SparseLinear


def fails(words, call, *args, **kwargs):
    """The call raises SnackError, one sentence that has all these words; returns it."""
    with pytest.raises(SnackError) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text and "STD_TORCH_CHECK" not in text
    for word in words:
        assert str(word) in text, f"{word!r} not in: {text}"
    return text


def snapshot(module, optimizer=None):
    """Everything that an error must leave alone, by value."""
    kept = {k: v.clone() for k, v in module.state_dict().items()}
    for k, p in module.named_parameters():
        kept[f"{k}.grad"] = None if p.grad is None else p.grad.clone()
        for name, t in (optimizer.state.get(p, {}) if optimizer else {}).items():
            kept[f"{k}.{name}"] = t.clone() if isinstance(t, torch.Tensor) else t
    return kept


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a)


def layer(in_features=70, out_features=33, **kwargs):
    return SparseLinear(in_features, out_features, **({"sparsity": 0.8} | kwargs))


def mlp():
    return nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


def real():
    """The most exact dtype of the default device: products on a card have no float64."""
    return torch.float64 if torch.get_default_device().type == "cpu" else torch.float32
