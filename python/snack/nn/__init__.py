"""Layers and models: SparseLinear, conversion of whole models, memory, parameter groups, files."""

from .convert import densify, sparsify
from .groups import param_groups
from .linear import SparseLinear
from .memory import Summary, summary
from .parallel import check_topology, topology_hash
from .persistence import load, read_header, read_patterns, save
from .report import LayerReport, Report
from .sharded import gathered
from .slot_map import SlotMap

__all__ = [
    "LayerReport", "Report", "SlotMap", "SparseLinear", "Summary", "check_topology", "densify", "gathered", "load", "param_groups",
    "read_header", "read_patterns", "save", "sparsify", "summary", "topology_hash",
]
