"""summary: what every layer of a model holds, in connections and bytes. Measured from the tensors, never estimated."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from .linear import SparseLinear
from .report import table


@dataclass
class LayerSummary:
    """One module that owns parameters or buffers. What does not apply or was not there to measure is None."""

    name: str
    kind: str
    """Class of the module."""
    shape: tuple[int, ...] | None
    """(out, in) of a linear layer, else the shape of its `weight`."""
    nnz: int
    """Stored weights: connections of a sparse layer, entries of `weight` of a dense one (0 without weight)."""
    density: float | None
    """nnz / (out * in)."""
    value_bytes: int
    """All parameters of the module: connections, weight, bias."""
    index_bytes: int
    """All buffers of the module; of a sparse layer these are its indices, for both directions."""
    gradient_bytes: int | None
    """The gradients that exist now; None when the model has none."""
    optimizer_bytes: int | None
    """State tensors of its parameters; None when no optimiser was given."""
    dead_rows: int | None
    """Outputs of a sparse layer without any connection."""
    dead_cols: int | None
    """Inputs of a sparse layer without any connection."""


@dataclass
class Summary:
    """Rows and totals; `print(summary)` is a table, `as_dict()` is for JSON."""

    layers: list[LayerSummary] = field(default_factory=list)

    def total(self, column: str) -> int | None:
        """Sum of a column over the layers that have it; None when none has."""
        present = [getattr(layer, column) for layer in self.layers if getattr(layer, column) is not None]
        return sum(present) if present else None

    @property
    def total_bytes(self) -> int:
        """Values, indices, gradients and optimiser state, as far as they exist."""
        return sum(self.total(c) or 0 for c in ("value_bytes", "index_bytes", "gradient_bytes", "optimizer_bytes"))

    def as_dict(self) -> dict:
        """{"layers": [...], "total": {...}}; keys of what was not measured are absent."""
        columns = ("nnz", "value_bytes", "index_bytes", "gradient_bytes", "optimizer_bytes", "dead_rows", "dead_cols")
        total = {c: self.total(c) for c in columns} | {"bytes": self.total_bytes}
        layers = [{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(layer).items() if v is not None} for layer in self.layers]
        return {"layers": layers, "total": {k: v for k, v in total.items() if v is not None}}

    def __str__(self) -> str:
        head = ("layer", "kind", "shape", "nnz", "density", "values", "indices", "gradients", "optimiser", "dead out/in")
        rows = [_cells(layer) for layer in self.layers]
        sizes = [_size(self.total(c)) for c in ("value_bytes", "index_bytes", "gradient_bytes", "optimizer_bytes")]
        dead = "" if self.total("dead_rows") is None else f"{self.total('dead_rows'):,}/{self.total('dead_cols'):,}"
        rows.append(("total", "", "", f"{self.total('nnz') or 0:,}", "", *sizes, dead))
        return "\n".join([*table(head, rows, left={0, 1}), f"{_size(self.total_bytes)} in all"])


def _size(count: int | None) -> str:
    if count is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


def _cells(layer: LayerSummary) -> tuple[str, ...]:
    shape = "" if layer.shape is None else " x ".join(map(str, layer.shape))
    density = "" if layer.density is None else f"{layer.density:.4g}"
    dead = "" if layer.dead_rows is None else f"{layer.dead_rows:,}/{layer.dead_cols:,}"
    sizes = (_size(c) for c in (layer.value_bytes, layer.index_bytes, layer.gradient_bytes, layer.optimizer_bytes))
    return (layer.name or "(model)", layer.kind, shape, f"{layer.nnz:,}", density, *sizes, dead)


def _dead(coordinates: Tensor, extent: int) -> int:
    """How many of range(extent) do not occur; O(nnz + extent), or O(nnz log nnz) where extent is far larger."""
    if extent > 16 * coordinates.numel():
        return extent - coordinates.unique().numel()
    is_live = torch.zeros(extent, dtype=torch.bool, device=coordinates.device)
    is_live[coordinates.long()] = True
    return extent - int(is_live.sum())


def _state_bytes(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> int:
    return sum(t.nbytes for t in optimizer.state.get(parameter, {}).values() if isinstance(t, Tensor))


def _row(name: str, module: nn.Module, parameters: list, buffers: list, has_gradients: bool, optimizer) -> LayerSummary:
    shape, nnz, density, dead_rows, dead_cols = None, 0, None, None, None
    weight = module._parameters.get("weight")
    if isinstance(module, SparseLinear):
        shape, nnz, density = (module.out_features, module.in_features), module.nnz, module.density
        if not module.index.is_meta:
            rows, cols = module.pattern.coordinates()
            dead_rows, dead_cols = _dead(rows, module.out_features), _dead(cols, module.in_features)
    elif weight is not None:
        shape, nnz = tuple(weight.shape), weight.numel()
        density = 1.0 if isinstance(module, nn.Linear) else None
    return LayerSummary(
        name,
        type(module).__name__,
        shape,
        nnz,
        density,
        value_bytes=sum(p.nbytes for p in parameters),
        index_bytes=sum(b.nbytes for b in buffers),
        gradient_bytes=sum(p.grad.nbytes for p in parameters if p.grad is not None) if has_gradients else None,
        optimizer_bytes=None if optimizer is None else sum(_state_bytes(p, optimizer) for p in parameters),
        dead_rows=dead_rows,
        dead_cols=dead_cols,
    )


def summary(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Summary:
    """One row for every module that owns parameters or buffers, and totals. Costs O(nnz + out + in) a layer.

    optimizer: count its state tensors too; before its first step it has none. A parameter that several modules share is
    counted in the first. Gradients are counted as they are now: call it between backward and zero_grad to see them.
    """
    has_gradients = any(p.grad is not None for p in model.parameters())
    seen: set[int] = set()

    def first_time(tensors: dict) -> list[Tensor]:
        fresh = [t for t in tensors.values() if t is not None and id(t) not in seen]
        seen.update(id(t) for t in fresh)
        return fresh

    rows = []
    for name, module in model.named_modules():
        parameters, buffers = first_time(module._parameters), first_time(module._buffers)
        if parameters or buffers:
            rows.append(_row(name, module, parameters, buffers, has_gradients, optimizer))
    return Summary(rows)
