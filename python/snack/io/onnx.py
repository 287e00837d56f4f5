"""ONNX files, which have no sparse layer: the weights are written dense."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path

import torch
from torch import nn

from ..errors import SnackError, require
from ..nn import SparseLinear, densify


def export_onnx(model: nn.Module, arguments: tuple, path: str | os.PathLike, **options) -> None:
    """Write a dense ONNX file of the function of `model`, which stays as it is; a UserWarning says how much larger that is.

    Args:
        arguments: example inputs, as torch.onnx.export takes them. options: passed on to torch.onnx.export.
    Raises: SnackError when onnx or onnxscript is missing (pip install onnx onnxscript), or the path cannot be written;
        what PyTorch's exporter raises about the model itself.
    """
    require(isinstance(model, nn.Module), f"export_onnx: expected an nn.Module, got {type(model).__name__}.")
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise SnackError(f"export_onnx: {error.name} is not installed, and PyTorch's exporter needs it: pip install onnx onnxscript.") from None
    path = Path(path)
    require(path.parent.is_dir(), f"export_onnx: there is no folder {path.parent}.")
    layers = [module for module in model.modules() if isinstance(module, SparseLinear)]
    if layers:
        nnz, positions = sum(layer.nnz for layer in layers), sum(layer.out_features * layer.in_features for layer in layers)
        warnings.warn(f"snack.io.export_onnx: ONNX has no sparse layers, so {nnz:,} connections are written as {positions:,} weights.", stacklevel=2)
    try:
        torch.onnx.export(densify(copy.deepcopy(model)), arguments, str(path), **options)
    except OSError as error:
        raise SnackError(f"export_onnx: {path} cannot be written: {error}") from None
