"""torch.optim.SGD and AdamW that can compute a sparse layer's gradient and its update in one kernel (`fused_grad=True`)."""

from .fused import SGD, AdamW

__all__ = ["SGD", "AdamW"]
