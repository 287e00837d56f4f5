"""Dynamic sparse training inside other people's training loops: callbacks for the Trainers of Hugging Face and of Lightning.

Each is imported when it is first named, so that `import snack` needs neither package.
"""

from __future__ import annotations

import importlib

from ..errors import SnackError

__all__ = ["LightningCallback", "TransformersCallback"]

# name -> (module, what to install, by the name of the extra)
_CALLBACKS = {
    "LightningCallback": ("lightning", "pytorch-lightning (or lightning)"),
    "TransformersCallback": ("hugging_face", "transformers and accelerate"),
}


def __getattr__(name: str):
    if name not in _CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, needed = _CALLBACKS[name]
    try:
        return getattr(importlib.import_module(f".{module}", __name__), name)
    except ImportError as error:
        extra = name.removesuffix("Callback").lower()
        raise SnackError(f"{name} needs {needed}, which cannot be imported ({error}): pip install 'snack-sparse[{extra}]'.") from error
