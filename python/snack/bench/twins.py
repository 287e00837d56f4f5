"""The masked twin: the same sparse network in plain PyTorch, as a dense weight times a mask.

This is what "sparse training" means nearly everywhere else: every weight is stored, multiplied, differentiated and kept in the optimiser,
and a mask makes most of them zero. It is the yardstick of the main job (what does storing no zero save?) and of the tests (does SNACK walk
the same trajectory?). Nothing of SNACK's own code is used here: the drop and grow rules are written again from the papers, on masks.

    y = x (W ⊙ M)ᵀ + b          x (batch, in), W and M (out, in), y (batch, out)

Autograd then gives dW = (dYᵀ X) ⊙ M by itself. The mask has the weight's dtype, as in ``torch.nn.utils.prune`` (a bool mask would need a
quarter of the bytes and makes the product slower: 0.91 against 0.72 ms a step for 784 → 300 at batch 100 on two cores).

Rules. An update drops the weakest connections of every layer and grows as many, so that the number of ones in M never changes:

* ``"set"`` (Mocanu et al. 2018, Nature Communications 9:2383): drops the fraction of the positive weights that is nearest to zero and the
  same fraction of the negative ones; grows uniformly at random.
* ``"rigl"`` (Evci et al. 2020, ICML, algorithm 1): drops the fraction of smallest magnitude; grows where the dense gradient |dYᵀX| is
  largest.
* ``"static"``: never changes.

No more connections move than there were empty positions before the update. A position that was dropped in this update is empty, so it
may be grown again (and then starts anew). A grown weight starts at 0 with the optimiser's moments at 0; a dropped weight loses both.
Ties: the lower slot first, where slots are sorted by (column // 1024, row, column).
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from snack.errors import SnackError

METHODS = ("set", "rigl", "static")
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


# ---- the shared random stream, written from its definition ----------------------------------------------------------------------------


def mix64(z: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014) on a Python integer."""
    z &= _MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK64
    return z ^ (z >> 31)


def random_key(seed: int, *stream: int) -> int:
    """The key of one stream of random numbers: ``mix64(seed)``, then mixed with every number of ``stream`` in turn."""
    key = mix64(seed)
    for number in stream:
        key = mix64(key ^ mix64(number + _GOLDEN))
    return key


def random_positions(key: int, size: int):
    """Endless stream of positions in ``range(size)``: draw i is ``mix64(key + (i + 1)·golden)``, the position ``(draw · size) >> 64``."""
    z = key
    while True:
        z = (z + _GOLDEN) & _MASK64
        yield (mix64(z) * size) >> 64


# ---- the layer -------------------------------------------------------------------------------------------------------------------------


class MaskedLinear(nn.Module):
    """``nn.Linear`` whose weight is multiplied by a mask in every forward pass.

    ``weight`` (out, in) and ``bias`` (out,) or None are taken over from ``linear``; ``mask`` (out, in) is any tensor, non-zero = live.
    The weight is zeroed outside the mask at once.
    """

    def __init__(self, linear: nn.Linear, mask: torch.Tensor):
        super().__init__()
        if mask.shape != linear.weight.shape:
            raise SnackError(
                f"MaskedLinear: the mask has shape {tuple(mask.shape)}, the weight {tuple(linear.weight.shape)}: they must be the same"
            )
        self.weight, self.bias = linear.weight, linear.bias
        self.register_buffer("mask", (mask != 0).to(self.weight))
        with torch.no_grad():
            self.weight.mul_(self.mask)
        self.keep_gradient = False  # of the product, for RigL: set before a forward pass whose dense gradient will be wanted
        self._product = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.weight * self.mask
        if self.keep_gradient and product.requires_grad:
            product.retain_grad()
            self._product = product
        return F.linear(x, product, self.bias)

    @property
    def nnz(self) -> int:
        """Number of live connections."""
        return int(self.mask.count_nonzero())

    def take_dense_gradient(self) -> torch.Tensor:
        """dYᵀX of the last backward pass, (out, in), for every position, live or not; forgotten afterwards."""
        if self._product is None or self._product.grad is None:
            raise SnackError("MaskedTwin: RigL's update needs the gradient of the step it belongs to: call backward() before step()")
        gradient, self._product = self._product.grad, None
        return gradient

    def live_positions(self) -> torch.Tensor:
        """Linear positions row·in + col of the live connections in slot order, int64 (nnz,)."""
        rows, cols = self.mask.nonzero(as_tuple=True)
        return (rows * self.mask.shape[1] + cols)[torch.argsort(_slot_key(rows, cols, self.mask.shape[0]))]


def _slot_key(rows, cols, out_features):
    """An integer that sorts positions by (column // 1024, row, column)."""
    return ((cols // 1024) * out_features + rows) * 1024 + cols % 1024


# ---- the rules -------------------------------------------------------------------------------------------------------------------------


def drop_set(weights: torch.Tensor, fraction: float, limit: int) -> torch.Tensor:
    """SET's drop: indices of the ``⌊fraction·n⌋`` smallest of the n weights >= 0, and likewise of the negative ones; if these are more than
    ``limit`` (the empty positions), fewer in the same proportion, rounded down."""
    sides = [(weights >= 0).nonzero().flatten(), (weights < 0).nonzero().flatten()]
    counts = [int(fraction * len(indices)) for indices in sides]
    limit = min(limit, int(fraction * len(weights)))
    if sum(counts) > limit:
        counts = [count * limit // sum(counts) for count in counts]
    return torch.cat([indices[_smallest(weights[indices].abs(), count)] for indices, count in zip(sides, counts)])


def drop_magnitude(weights: torch.Tensor, fraction: float, limit: int) -> torch.Tensor:
    """RigL's drop: indices of the ``⌊fraction·nnz⌋`` weights of smallest magnitude, but not more than ``limit``."""
    return _smallest(weights.abs(), min(int(fraction * len(weights)), limit))


def _smallest(magnitudes, k):
    return torch.sort(magnitudes, stable=True).indices[:k]


def grow_uniform(live: set, size: int, k: int, key: int) -> list[int]:
    """The first k distinct positions of the stream ``key`` that are not in ``live``."""
    grown: dict[int, None] = {}
    for position in random_positions(key, size) if k else ():
        if position not in live:
            grown[position] = None
            if len(grown) == k:
                break
    return list(grown)


def grow_gradient(gradient: torch.Tensor, live: torch.Tensor, k: int) -> torch.Tensor:
    """The k positions of largest |gradient| (out, in) outside ``live`` (linear positions); ties: the lower in slot order."""
    out_features, in_features = gradient.shape
    empty = torch.ones(gradient.numel(), dtype=torch.bool, device=gradient.device)
    empty[live] = False
    positions = empty.nonzero().flatten()
    positions = positions[torch.argsort(_slot_key(positions // in_features, positions % in_features, out_features))]
    order = torch.sort(gradient.flatten()[positions].abs(), descending=True, stable=True).indices
    return positions[order[:k]]


def cosine(fraction: float, step: int, t_end: int) -> float:
    """RigL's schedule (its equation 1): ``fraction/2 · (1 + cos(π·step/t_end))``."""
    return fraction / 2 * (1 + math.cos(math.pi * step / t_end))


# ---- the twin --------------------------------------------------------------------------------------------------------------------------


class MaskedTwin(nn.Module):
    """A dense model turned into a masked one, and the method that moves its masks.

    ``model``: a module with ``nn.Linear`` layers, changed in place. ``patterns``: {name of a linear layer: mask (out, in)}; other layers
    stay dense. ``method``: "set", "rigl" or "static". ``seed``: of the growth streams, one an update and layer:
    ``random_key(seed, update, layer)``, both from 0. ``every``: optimiser steps between updates. ``drop_fraction``: of the live
    connections, in [0, 1); constant for SET, decayed by ``cosine`` to 0 at ``t_end`` for RigL (``decay`` overrides). ``t_end``: number of
    the first step without an update (None: never ends).

    Use: build the optimiser on ``twin.parameters()``; after every ``optimizer.step()`` call ``twin.step(optimizer)``.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: dict[str, torch.Tensor],
        method="set",
        seed=0,
        every=100,
        drop_fraction=0.3,
        t_end=None,
        decay=None,
    ):
        super().__init__()
        if method not in METHODS:
            raise SnackError(f"MaskedTwin: unknown method {method!r}: expected one of {', '.join(METHODS)}")
        for name, mask in patterns.items():
            linear = model.get_submodule(name)
            if not isinstance(linear, nn.Linear):
                raise SnackError(f"MaskedTwin: {name!r} is a {type(linear).__name__}: patterns belong to nn.Linear layers")
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, MaskedLinear(linear, mask))
        self.model, self.method, self.seed, self.every, self.drop_fraction, self.t_end = model, method, seed, every, drop_fraction, t_end
        self.decay = decay if decay is not None else (method == "rigl" and t_end is not None)
        self.steps = 0  # optimiser steps taken
        self.updates = 0  # topology updates made
        self._arm()

    def forward(self, *args):
        return self.model(*args)

    @property
    def layers(self) -> dict[str, MaskedLinear]:
        """The masked layers by name, in the order of the model."""
        return {name: module for name, module in self.model.named_modules() if isinstance(module, MaskedLinear)}

    def is_update(self, step: int) -> bool:
        """Whether optimiser step number ``step`` (1, 2, …) is followed by an update."""
        return self.method != "static" and step % self.every == 0 and (self.t_end is None or step < self.t_end)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Call after ``optimizer.step()``; moves the masks if their time has come. Returns whether it did."""
        self.steps += 1
        due = self.is_update(self.steps)
        if due:
            for number, layer in enumerate(self.layers.values()):
                self._update(layer, number, optimizer)
            self.updates += 1
        self._arm()
        return due

    def _arm(self) -> None:
        for layer in self.layers.values():
            layer.keep_gradient = self.method == "rigl" and self.is_update(self.steps + 1)

    @torch.no_grad()
    def _update(self, layer: MaskedLinear, number: int, optimizer) -> None:
        fraction = cosine(self.drop_fraction, self.steps, self.t_end) if self.decay else self.drop_fraction
        live = layer.live_positions()
        weights = layer.weight.flatten()[live]
        dropped = (drop_set if self.method == "set" else drop_magnitude)(weights, fraction, layer.mask.numel() - len(live))
        keep = torch.ones(len(live), dtype=torch.bool, device=live.device)
        keep[dropped] = False
        if self.method == "set":
            key = random_key(self.seed, self.updates, number)
            grown = torch.tensor(
                grow_uniform(set(live[keep].tolist()), layer.mask.numel(), len(dropped), key), dtype=torch.int64, device=live.device
            )
        else:
            grown = grow_gradient(layer.take_dense_gradient(), live[keep], len(dropped))
        self._forget(layer, torch.cat([live[dropped], grown]), optimizer)
        layer.mask.view(-1)[live[dropped]] = 0
        layer.mask.view(-1)[grown] = 1

    @staticmethod
    def _forget(layer: MaskedLinear, positions, optimizer) -> None:
        """Weight, gradient and every moment of the optimiser become 0 at these linear positions."""
        weight = layer.weight
        state = [t for t in optimizer.state.get(weight, {}).values() if torch.is_tensor(t) and t.shape == weight.shape]
        for tensor in [weight.data, *([weight.grad] if weight.grad is not None else []), *state]:
            tensor.view(-1)[positions] = 0
