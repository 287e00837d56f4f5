"""What is measured. A `Case` describes one record; a suite is a list of cases (`suites`), measured one by one (`measure`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..errors import require

PRODUCTS = ("spmm", "spmm_t", "sddmm")
ROUTINES = (*PRODUCTS, "layer_infer", "layer_step", "memory", "update")
DTYPES = ("float32", "bfloat16", "float16")

# Every peer that can be asked for; what it is stands in `peers` and `layers`.
PRODUCT_PEERS = (
    "dense", "dense_tf32", "dense_bf16", "dense_mask", "dense_mask_bool", "coo_atomics", "torch_csr", "torch_coo", "torch_bsr",
    "cupy_csr", "cupy_coo", "jax_bsr", "sparselab", "sputnik", "flashsparse",
)
LAYER_PEERS = ("dense", "dense_tf32", "dense_bf16", "dense_mask", "dense_mask_bool", "torch_csr", "torch_coo", "sparselab")
PEERS_OF = {
    **dict.fromkeys(PRODUCTS, PRODUCT_PEERS), "layer_infer": LAYER_PEERS, "layer_step": (*LAYER_PEERS, "snack_fused"),
    "memory": ("dense", "dense_bf16", "dense_mask", "dense_mask_bool", "torch_csr", "torch_coo", "snack_fused"),
    "update": ("snack_rigl", "dense_mask"),
}
_OF_FLOAT32 = ("dense_tf32", "dense_bf16")  # what a record of float32 is compared with beside its own dtype
_COLD = ("dense",)  # peers that can take turns through copies of their weights
OPTIMIZERS = {"layer_step": "SGD", "memory": "Adam", "update": "SGD(momentum=0.9)"}


@dataclass(frozen=True)
class Case:
    """One record to be. `energy`: whose energy is measured ("snack" and names of peers); `cap_gib`: memory that may be used."""

    routine: str
    shape: tuple[int, int]  # out, in
    sparsity: float
    batch: int
    dtype: str = "float32"
    l2: str = "warm"
    mode: str = "graph"
    optimizer: str = ""
    cap_gib: float | None = None
    peers: tuple[str, ...] = ()
    energy: tuple[str, ...] = ()
    kernel: str = ""  # of the suite `tune`: that one instead of the plan's choice

    def __str__(self) -> str:
        """What makes two cases the same: all but the peers and the energy. Stands in the record and on the screen."""
        words = [f"{self.routine} {self.shape[0]}x{self.shape[1]}", f"{100 * self.sparsity:g} %", f"batch {self.batch}", self.dtype]
        words += [word for word in (self.optimizer, self.kernel) if word]
        words += [word for word in (self.l2, self.mode) if word not in ("warm", "graph")]
        words += [] if self.cap_gib is None else [f"within {self.cap_gib:g} GiB"]
        return ", ".join(words)

    def with_peers(self, names: Iterable[str]) -> Case:
        """The same with those of the names that know the routine and dtype."""
        return replace(self, peers=_taking_part(self.routine, self.dtype, self.l2, tuple(names)))


def _taking_part(routine: str, dtype: str, l2: str, names: tuple[str, ...] | None) -> tuple[str, ...]:
    found = [p for p in PEERS_OF[routine] if names is None or p in names]
    if dtype != "float32":
        found = [p for p in found if p not in _OF_FLOAT32]
    if l2 == "cold":
        found = [p for p in found if p in _COLD and routine != "sddmm"]  # dense reads no weights there
    return tuple(found)


def cases(
    routines: Iterable[str],
    shapes: Iterable[tuple[int, int]],
    sparsities: Iterable[float],
    batches: Iterable[int],
    dtypes: Iterable[str] = ("float32",),
    *,
    l2: Iterable[str] = ("warm",),
    mode: str = "graph",
    optimizer: str = "",
    caps: Iterable[float | None] = (None,),
    peers: Iterable[str] | None = None,
    energy: Iterable[str] = (),
) -> Iterator[Case]:
    """All combinations, in an order in which neighbours share their weights. `peers`: default all that the routine knows; those that
    have no part in a routine or dtype are left out, and so are cold weights where a routine has none."""
    names = None if peers is None else tuple(peers)
    axes = product(shapes, sparsities, dtypes, batches, routines, l2, caps)
    for shape, sparsity, dtype, batch, routine, temperature, cap in axes:
        if temperature == "cold" and routine not in (*PRODUCTS, "layer_infer"):
            continue
        yield Case(
            routine, shape, sparsity, batch, dtype, temperature, mode, (optimizer or OPTIMIZERS[routine]) if routine in OPTIMIZERS else "",
            cap if routine == "memory" else None, _taking_part(routine, dtype, temperature, names), tuple(energy) if routine != "memory" else (),
        )


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """The names; SnackError naming the known ones when one is none of them."""
    names, known = tuple(names), tuple(known)
    for name in names:
        require(name in known, f"snack bench: {name!r} is no {what}; known are {', '.join(known)}.")
    return names
