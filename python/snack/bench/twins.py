"""The masked twin: the same sparse network in plain PyTorch, as a dense weight times a mask.

This is what "sparse training" means nearly everywhere else: every weight is stored, multiplied, differentiated and kept in the optimiser,
and a mask makes most of them zero. It is the yardstick of the main job (what does storing no zero save?) and of the tests (does SNACK walk
the same trajectory?). Nothing of SNACK's own code is used here: the drop and grow rules are written again from the papers, on masks.

    y = x (W ⊙ M)ᵀ + b          x (batch, in), W and M (out, in), y (batch, out)

Autograd then gives dW = (dYᵀ X) ⊙ M by itself. The mask has the weight's dtype, as in ``torch.nn.utils.prune`` (a bool mask would need a
quarter of the bytes and makes the product slower: 0.91 against 0.72 ms a step for 784 → 300 at batch 100 on two cores).

Rules. An update drops the weakest connections of every layer and grows as many, so that the number of ones in M never changes, but for the
last two:

* ``"set"`` (Mocanu et al. 2018, Nature Communications 9:2383): drops the fraction of the positive weights that is nearest to zero and the
  same fraction of the negative ones; grows uniformly at random. ``"set-magnitude"`` drops the fraction of smallest magnitude.
* ``"rigl"`` (Evci et al. 2020, ICML, algorithm 1): drops the fraction of smallest magnitude; grows where the dense gradient |dYᵀX| is
  largest.
* ``"mest"`` (Yuan et al. 2021, NeurIPS): drops where |weight| + |gradient| is smallest; grows uniformly at random.
* ``"snfs"`` (Dettmers and Zettlemoyer 2019): drops the fraction of smallest magnitude; every layer grows a part of what all lost, in
  proportion to the mean |momentum| of its live weights; it grows where |momentum| is largest. The momentum of absent weights is that of the
  dense gradient, kept for every position and step (SNACK estimates it from a window of steps).
* ``"gmp"`` (Zhu and Gupta 2017): drops the smallest magnitudes until the sparsity of a cubic is reached; grows nothing.
* ``"static"``: never changes.

No more connections move than there were empty positions before the update (but with SNFS, where another layer may have room). A position
that was dropped in this update is empty, so it may be grown again (and then starts anew). A grown weight starts at 0 (or
at a drawn number) with the optimiser's moments at 0; a dropped weight loses both.
Ties: the lower slot first, where slots are sorted by (column // 1024, row, column).
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from snack.errors import SnackError

METHODS = ("set", "set-magnitude", "rigl", "mest", "snfs", "gmp", "static")
MOMENTUM = 0.9  # of the dense gradient, in SNFS
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
        self.register_buffer("dense_momentum", None, persistent=False)  # (out, in) of the dense gradient, for SNFS
        self._product = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = self.weight * self.mask
        if self.keep_gradient and product.requires_grad:
            product.retain_grad()
            self._product = product
        if self.dense_momentum is not None and product.requires_grad:
            product.register_hook(self._follow_momentum)
        return F.linear(x, product, self.bias)

    def _follow_momentum(self, gradient: torch.Tensor) -> None:
        self.dense_momentum.mul_(MOMENTUM).add_(gradient)

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


def grow_uniform(live: torch.Tensor, size: int, k: int, key: int) -> torch.Tensor:
    """The first k distinct positions of the stream ``key`` (see :func:`random_positions`) that are not in ``live`` (linear positions)."""
    import numpy as np

    taken = np.zeros(size, dtype=bool)
    taken[live.cpu().numpy()] = True
    grown, drawn = np.empty(0, dtype=np.int64), 0
    while len(grown) < k:
        count = 2 * k + 64
        states = np.uint64(key) + np.arange(drawn + 1, drawn + count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        positions = _scaled(_mix64_all(states), size)
        positions = positions[~taken[positions]]
        positions = positions[np.sort(np.unique(positions, return_index=True)[1])]  # the first of each, in the order of the stream
        grown, drawn = np.concatenate([grown, positions]), drawn + count
        taken[positions] = True
    return torch.from_numpy(grown[:k])


def he_values(key: int, positions: torch.Tensor, in_features: int) -> torch.Tensor:
    """Uniform within sqrt(6/in), float64: of position p, draw p of the stream ``key``, its upper 53 bits."""
    import numpy as np

    draws = _mix64_all(np.uint64(key) + (positions.cpu().numpy().astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))
    return torch.from_numpy(((draws >> 11) * 2.0**-53 * 2 - 1) * math.sqrt(6 / in_features))


def _mix64_all(z):
    """:func:`mix64` of an array of uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


def _scaled(draws, size: int):
    """``(draw * size) >> 64`` of an array of uint64, in two halves; size below 2^32."""
    low, high = (draws & 0xFFFFFFFF) * size, (draws >> 32) * size
    return ((high + (low >> 32)) >> 32).astype("int64")


def grow_gradient(gradient: torch.Tensor, live: torch.Tensor, k: int) -> torch.Tensor:
    """The k positions of largest |gradient| (out, in) outside ``live`` (linear positions); ties: the lower in slot order."""
    out_features, in_features = gradient.shape
    empty = torch.ones(gradient.numel(), dtype=torch.bool, device=gradient.device)
    empty[live] = False
    positions = empty.nonzero().flatten()
    positions = positions[torch.argsort(_slot_key(positions // in_features, positions % in_features, out_features))]
    order = torch.sort(gradient.flatten()[positions].abs(), descending=True, stable=True).indices
    return positions[order[:k]]


def shares(total: int, weights: list[float], rooms: list[int]) -> list[int]:
    """``total`` in proportion to ``weights``, whole numbers by largest remainder; what a layer has no room for goes to the others."""
    counts, is_open = [0] * len(weights), [w > 0 for w in weights]
    while (left := total - sum(counts)) and any(is_open):
        whole = sum(w for w, o in zip(weights, is_open) if o)
        exact = [left * w / whole if o else 0.0 for w, o in zip(weights, is_open)]
        parts = [int(e) for e in exact]
        for i in sorted(range(len(exact)), key=lambda i: parts[i] - exact[i])[: left - sum(parts)]:
            parts[i] += 1
        counts = [min(c + p, room) for c, p, room in zip(counts, parts, rooms)]
        is_open = [o and c < room for o, c, room in zip(is_open, counts, rooms)]
    return counts


def cubic(initial: float, final: float, step: int, last: int) -> float:
    """The sparsity of gradual pruning: ``final + (initial - final) · (1 - step/last)³`` (Zhu and Gupta, equation 1, from step 0)."""
    return final + (initial - final) * (1 - min(step, last) / last) ** 3


def cosine(fraction: float, step: int, t_end: int) -> float:
    """RigL's schedule (its equation 1): ``fraction/2 · (1 + cos(π·step/t_end))``."""
    return fraction / 2 * (1 + math.cos(math.pi * step / t_end))


# ---- the twin --------------------------------------------------------------------------------------------------------------------------


class MaskedTwin(nn.Module):
    """A dense model turned into a masked one, and the method that moves its masks.

    ``model``: a module with ``nn.Linear`` layers, changed in place. ``patterns``: {name of a linear layer: mask (out, in)}; other layers
    stay dense. ``method``: one of ``METHODS``. ``seed``: of the growth streams, one an update and layer:
    ``random_key(seed, update, layer)``, both from 0. ``every``: optimiser steps between updates. ``drop_fraction``: of the live
    connections, in [0, 1); constant for SET, decayed by ``cosine`` to 0 at ``t_end`` for the others (``decay`` overrides). ``t_end``: number of
    the first step without an update (None: never ends); for GMP the last step at which it may prune. ``sparsity``: that GMP reaches.
    ``grow_init``: a grown weight begins at "zero", or with "he" at a number drawn uniformly within sqrt(6/in), see :func:`he_values`.

    Use: build the optimiser on ``twin.parameters()``; after every ``optimizer.step()`` call ``twin.step(optimizer)``, and clear gradients
    after that or before the backward pass.
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
        sparsity=0.9,
        grow_init="zero",
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
        self.decay = decay if decay is not None else (method in ("rigl", "mest", "snfs") and t_end is not None)
        self.sparsity, self.grow_init = sparsity, grow_init
        self.initial = {name: 1 - layer.nnz / layer.mask.numel() for name, layer in self.layers.items()}
        self.steps = 0  # optimiser steps taken
        self.updates = 0  # topology updates made
        if method == "snfs":
            for layer in self.layers.values():
                layer.dense_momentum = torch.zeros_like(layer.weight.detach())
        self._arm()

    def forward(self, *args):
        return self.model(*args)

    @property
    def layers(self) -> dict[str, MaskedLinear]:
        """The masked layers by name, in the order of the model."""
        return {name: module for name, module in self.model.named_modules() if isinstance(module, MaskedLinear)}

    @property
    def armed(self) -> bool:
        """Whether the coming step keeps the dense gradient: one that was captured in a CUDA graph before does not."""
        return self.method == "rigl" and self.is_update(self.steps + 1)

    def is_update(self, step: int) -> bool:
        """Whether optimiser step number ``step`` (1, 2, …) is followed by an update."""
        if self.method == "gmp":
            return step % self.every == 0 and step <= self.t_end
        return self.method != "static" and step % self.every == 0 and (self.t_end is None or step < self.t_end)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Call after ``optimizer.step()``; moves the masks if their time has come. Returns whether it did."""
        self.steps += 1
        due = self.is_update(self.steps)
        if due:
            self._update(optimizer)
            self.updates += 1
        self._arm()
        return due

    def _arm(self) -> None:
        for layer in self.layers.values():
            layer.keep_gradient = self.armed

    @torch.no_grad()
    def _update(self, optimizer) -> None:
        layers = self.layers
        live = [layer.live_positions() for layer in layers.values()]
        dropped = [self._drop(name, layer, positions) for (name, layer), positions in zip(layers.items(), live)]
        grows = self._shares(list(layers.values()), dropped, live, optimizer)
        for number, (layer, positions, slots) in enumerate(zip(layers.values(), live, dropped)):
            keep = torch.ones(len(positions), dtype=torch.bool, device=positions.device)
            keep[slots] = False
            grown = self._grow(layer, number, positions[keep], grows[number]).to(positions.device)
            self._forget(layer, torch.cat([positions[slots], grown]), optimizer)
            layer.mask.view(-1)[positions[slots]] = 0
            layer.mask.view(-1)[grown] = 1
            if self.grow_init == "he":
                values = he_values(random_key(self.seed, self.updates, number, 1), grown, layer.mask.shape[1])
                layer.weight.data.view(-1)[grown] = values.to(layer.weight)

    def _drop(self, name: str, layer: MaskedLinear, live: torch.Tensor) -> torch.Tensor:
        """Which of the live connections go, as indices of ``live``."""
        size = layer.mask.numel()
        weights = layer.weight.flatten()[live]
        if self.method == "gmp":
            wanted = round((1 - cubic(self.initial[name], self.sparsity, self.steps, self.t_end // self.every * self.every)) * size)
            return _smallest(weights.abs(), max(0, len(live) - wanted))
        fraction = cosine(self.drop_fraction, self.steps, self.t_end) if self.decay else self.drop_fraction
        if self.method == "set":
            return drop_set(weights, fraction, size - len(live))
        if self.method == "mest":
            weights = weights.abs() + layer.weight.grad.flatten()[live].abs()
        # What SNFS gives up may grow in another layer.
        return drop_magnitude(weights, fraction, len(live) if self.method == "snfs" else size - len(live))

    def _shares(self, layers, dropped, live, optimizer) -> list[int]:
        """How many connections every layer grows."""
        if self.method == "gmp":
            return [0] * len(layers)
        if self.method != "snfs":
            return [len(slots) for slots in dropped]
        weights = []
        for layer, positions in zip(layers, live):
            state = optimizer.state[layer.weight]
            momentum = state["momentum_buffer"] if "momentum_buffer" in state else state["exp_avg"]
            weights.append(float(momentum.flatten()[positions].abs().double().mean()))
        rooms = [layer.mask.numel() - len(positions) + len(slots) for layer, positions, slots in zip(layers, live, dropped)]
        return shares(sum(len(slots) for slots in dropped), weights, rooms)

    def _grow(self, layer: MaskedLinear, number: int, kept: torch.Tensor, k: int) -> torch.Tensor:
        """Linear positions of k new connections."""
        if k == 0:
            return kept[:0]
        if self.method == "rigl":
            return grow_gradient(layer.take_dense_gradient(), kept, k)
        if self.method == "snfs":
            return grow_gradient(layer.dense_momentum, kept, k)
        return grow_uniform(kept, layer.mask.numel(), k, random_key(self.seed, self.updates, number))

    @staticmethod
    def _forget(layer: MaskedLinear, positions, optimizer) -> None:
        """Weight, gradient and every moment of the optimiser become 0 at these linear positions."""
        weight = layer.weight
        state = [t for t in optimizer.state.get(weight, {}).values() if torch.is_tensor(t) and t.shape == weight.shape]
        for tensor in [weight.data, *([weight.grad] if weight.grad is not None else []), *state]:
            tensor.view(-1)[positions] = 0
