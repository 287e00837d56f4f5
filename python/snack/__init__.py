from . import formats, nn, ops
from .errors import SnackError
from .formats import Pattern
