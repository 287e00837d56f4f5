"""What `sparsify` did to every linear layer, and why. Plain data: picklable, copyable, holds no tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass
class LayerReport:
    """One linear layer of the model."""

    name: str
    """Names the layer is registered under, joined by ' = '; '(model)' for a bare nn.Linear."""
    shape: tuple[int, int]
    """(out_features, in_features)."""
    status: str
    """'converted', 'kept dense' (full by its share of the budget) or 'skipped'."""
    nnz: int
    """Connections after sparsify; out * in for a layer that stays dense."""
    reason: str = ""
    """Why it was not converted, or what is worth knowing about it."""

    @property
    def density(self) -> float:
        """nnz / (out * in); 0 for an empty shape."""
        positions = self.shape[0] * self.shape[1]
        return self.nnz / positions if positions else 0.0


@dataclass
class Report:
    """Every linear layer `sparsify` saw, in the order of the model. `print(report)` is a table."""

    layers: list[LayerReport] = field(default_factory=list)

    def of(self, status: str) -> list[LayerReport]:
        """The layers of one status."""
        return [layer for layer in self.layers if layer.status == status]

    @property
    def converted(self) -> list[LayerReport]:
        return self.of("converted")

    @property
    def kept_dense(self) -> list[LayerReport]:
        return self.of("kept dense")

    @property
    def skipped(self) -> list[LayerReport]:
        return self.of("skipped")

    @property
    def nnz(self) -> int:
        """Connections of the layers the budget covers: those converted and those kept dense."""
        return sum(layer.nnz for layer in self.converted + self.kept_dense)

    @property
    def sparsity(self) -> float:
        """1 - nnz / positions, over the layers the budget covers."""
        positions = sum(layer.shape[0] * layer.shape[1] for layer in self.converted + self.kept_dense)
        return 1.0 - self.nnz / positions if positions else 0.0

    def as_dict(self) -> dict:
        """For JSON."""
        return {"nnz": self.nnz, "sparsity": self.sparsity, "layers": [asdict(layer) for layer in self.layers]}

    def __str__(self) -> str:
        head = ("layer", "out x in", "connections", "density", "status")
        rows = [
            (r.name, f"{r.shape[0]} x {r.shape[1]}", f"{r.nnz:,}", f"{r.density:.4g}", f"{r.status}: {r.reason}" if r.reason else r.status)
            for r in self.layers
        ]
        total = (
            f"{len(self.converted)} of {len(self.layers)} linear layers converted, {self.nnz:,} connections, sparsity {self.sparsity:.6g}"
        )
        return "\n".join([*table(head, rows, left={0, 4}), total])


def table(head: tuple[str, ...], rows: list[tuple[str, ...]], left: set[int]) -> list[str]:
    """Lines of a plain-text table; columns in `left` are aligned left, the others right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: tuple[str, ...]) -> str:
        cells = (cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        return "  ".join(cells).rstrip()

    return [line(head), "  ".join("-" * width for width in widths), *map(line, rows)]
