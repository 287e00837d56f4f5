"""Models from elsewhere and to elsewhere: masked state dicts, SparseLab, scipy, npz, pt and safetensors files, ONNX."""

from .files import read, write
from .onnx import export_onnx
from .sparselab import import_sparselab
from .state import as_model, import_state_dict

__all__ = ["as_model", "export_onnx", "import_sparselab", "import_state_dict", "read", "write"]
