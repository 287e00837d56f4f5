"""One-shot pruning: dense models in, sparse layers out, with an exact budget; and the rewinding of lottery tickets."""

from .oneshot import grasp, magnitude, snip
from .rewinding import rewind, snapshot

__all__ = ["grasp", "magnitude", "rewind", "snapshot", "snip"]
