"""Sparse formats: the packed Pattern and conversions from and to what others use."""

from .convert import (
    from_coo,
    from_csc,
    from_csr,
    from_dense,
    from_mask,
    from_scipy,
    from_torch_sparse,
    to_coo,
    to_csc,
    to_csr,
    to_dense,
    to_scipy,
    to_torch_coo,
    to_torch_csc,
    to_torch_csr,
)
from .pattern import SLOT_ORDER, Pattern

__all__ = [
    "SLOT_ORDER", "Pattern", "from_coo", "from_csc", "from_csr", "from_dense", "from_mask", "from_scipy",
    "from_torch_sparse", "to_coo", "to_csc", "to_csr", "to_dense", "to_scipy", "to_torch_coo", "to_torch_csc", "to_torch_csr",
]
