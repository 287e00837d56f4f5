"""Operations on (Pattern, values): products and topology edits. `torch.ops.snack.*` are the same, on packed tensors."""

from .edits import exchange_, grow_gradient, grow_uniform, random_key, random_uniform, rewire, select_smallest
from .products import REGIMES, sddmm, spmm, spmm_t
from .update import AdamWStep, SgdStep, sddmm_update

__all__ = [
    "REGIMES", "AdamWStep", "SgdStep", "exchange_", "grow_gradient", "grow_uniform", "random_key", "random_uniform", "rewire", "sddmm",
    "sddmm_update", "select_smallest", "spmm", "spmm_t",
]
