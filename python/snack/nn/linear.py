"""SparseLinear: a linear layer whose absent connections are neither stored nor multiplied."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .. import _costs, _lib, ops
from ..errors import SnackError, SnackMemoryError, require
from ..formats import Pattern, from_coo, to_coo, to_dense, to_torch_csr
from ..formats.pattern import SLOT_ORDER, call, check_shape, check_sparsity
from ..ops.products import KERNELS, REGIMES, linear, regime_code
from ..ops.recorded import linear_recorded
from . import state as layer_state
from .select import choose, draw_seed
from .slot_map import SlotMap

_PRODUCTS = ("spmm", "spmm_t", "sddmm")


def _require_card(device: torch.device) -> None:
    """SnackError unless this card can run the kernels."""
    problem = _lib.cuda_problem(device)
    require(not problem, f"SparseLinear: device '{device}' was asked for, and {problem}; or use device='cpu'.")


class SparseLinear(nn.Module):
    """y = x W^T + b with a truly sparse W (out_features, in_features): only its connections exist.

    Args:
        in_features, out_features: extents, below 2**31.
        bias: learn an additive bias (out_features,).
        sparsity: fraction of absent connections, 0 <= sparsity < 1; round((1 - sparsity) * out * in) connections are
            placed uniformly at random. Cost: O(nnz log nnz), never O(out * in).
        device, dtype: of the values; fp32 by default. Cards compute in float32, float16 and bfloat16.
        generator: where topology and initial values are drawn from (default: PyTorch's global state on the CPU). Both are
            drawn where the generator is and moved to `device`, so one seed gives one layer, whatever its device.

    Attributes:
        values: Parameter (nnz,), in slot order (`snack.formats.SLOT_ORDER`). Every stock optimiser works on it.
        bias: Parameter (out_features,) or None.
        index, tile_ptr: packed pattern (buffers; `pattern` is the readable view). Rewiring at constant nnz keeps all addresses.

    Shape: x (..., in_features) -> (..., out_features). x and values share a dtype, except under autocast.
    Initialisation: uniform within 1 / sqrt(fan-in), as nn.Linear, with the mean number of connections of a row as fan-in.
    """

    values: nn.Parameter
    bias: nn.Parameter | None
    index: Tensor
    tile_ptr: Tensor
    _recorder = None  # who wants to see x and y of the coming passes, see snack.dst.capture

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sparsity: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ):
        out, in_ = check_shape((out_features, in_features))
        nnz = round((1.0 - check_sparsity(sparsity, "SparseLinear")) * out * in_)
        device = torch.get_default_device() if device is None else torch.device(device)
        require(
            device.type in ("cpu", "cuda", "meta"),
            f"SparseLinear: device '{device}' was asked for, and there are kernels for 'cpu' and 'cuda'; use one of these.",
        )
        if device.type == "cuda":
            _require_card(device)
        seed = draw_seed(generator)
        if device.type == "meta":
            pattern = meta_pattern((out, in_), nnz)
        else:
            pattern = Pattern.random((out, in_), nnz, seed).to(device)
        self._setup(pattern, torch.empty(nnz, device=device, dtype=dtype), bias, seed)
        self.reset_parameters(generator)

    def _setup(self, pattern: Pattern, values: Tensor, bias: bool | Tensor | None, seed: int = 0) -> None:
        super().__init__()
        if not values.dtype.is_floating_point:
            raise SnackError(f"SparseLinear: values are {values.dtype}, expected a floating dtype.")
        self.out_features, self.in_features = pattern.shape
        self._seed = seed  # of the topology; used when a meta layer gets memory
        self._recorder = None  # in every layer's own dictionary, so that compiled code sees two states of it and not three
        self.values = nn.Parameter(values)
        if bias is True:
            bias = torch.empty(self.out_features, device=values.device, dtype=values.dtype)
        self.register_parameter("bias", nn.Parameter(bias) if isinstance(bias, Tensor) else None)
        # Not persistent: files hold the readable triple (rows, cols, values), see state.py.
        self.register_buffer("index", pattern.index, persistent=False)
        self.register_buffer("tile_ptr", pattern.tile_ptr, persistent=False)

    @classmethod
    def _from_parts(cls, pattern: Pattern, values: Tensor, bias: Tensor | None) -> SparseLinear:
        layer = cls.__new__(cls)
        layer._setup(pattern.to(values.device), values, bias)
        return layer

    @classmethod
    def from_coo(
        cls, rows: object, cols: object, values: object, shape: object, bias: Tensor | None = None, *, sum_duplicates: bool = False
    ) -> SparseLinear:
        """A layer from a COO list in any order; an explicit zero is a connection.

        rows, cols: integers (n,); values: floating (n,); shape: (out, in); bias: (out,) or None.
        Raises: SnackError on indices outside the shape, duplicates (unless added), lengths or dtypes that do not fit.
        """
        pattern, slot_values = from_coo(rows, cols, values, shape, sum_duplicates)
        if bias is not None:
            require(
                bias.shape == (pattern.shape[0],),
                f"SparseLinear.from_coo: bias has shape {tuple(bias.shape)}, expected ({pattern.shape[0]},).",
            )
            bias = bias.detach().to(slot_values).clone()
        return cls._from_parts(pattern, slot_values.detach(), bias)

    @classmethod
    def from_dense(
        cls,
        dense: nn.Linear,
        sparsity: float | None = None,
        mask: Tensor | None = None,
        how: str = "magnitude",
        generator: torch.Generator | None = None,
    ) -> SparseLinear:
        """A sparse copy of an nn.Linear; kept connections keep their values exactly.

        Args:
            sparsity: fraction to remove, with how="magnitude" (keep the largest |w|; ties: first in row-major order),
                how="random" (keep uniform positions) or how="row" (as "random", equally many in every row; a remainder in the first rows).
            mask: (out, in), non-zero where a connection stays; instead of `sparsity`.
            how="nonzero": keep what is not zero, for layers that were pruned elsewhere; needs neither.
        """
        require(isinstance(dense, nn.Linear), f"SparseLinear.from_dense: expected an nn.Linear, got {type(dense).__name__}.")
        weight = dense.weight.detach()
        pattern, values = choose(weight, sparsity, mask, how, generator)
        layer = cls._from_parts(pattern, values, None if dense.bias is None else dense.bias.detach().clone())
        layer.values.requires_grad_(dense.weight.requires_grad)
        if layer.bias is not None:
            layer.bias.requires_grad_(dense.bias.requires_grad)
        return layer.train(dense.training)

    @property
    def nnz(self) -> int:
        """Number of connections."""
        return self.values.numel()

    @property
    def sparsity(self) -> float:
        """Fraction of absent connections."""
        return self.pattern.sparsity

    @property
    def density(self) -> float:
        """Fraction of existing connections."""
        return self.pattern.density

    @property
    def pattern(self) -> Pattern:
        """The topology; shares memory with the layer."""
        return Pattern.from_packed(self.index, self.tile_ptr, (self.out_features, self.in_features))

    # The other entries of the state dict, by their names there: torch.distributed.checkpoint looks them up.

    @property
    def rows(self) -> Tensor:
        """Row of every slot, int32 (nnz,), a new tensor."""
        return self.pattern.coordinates()[0]

    @property
    def cols(self) -> Tensor:
        """Column of every slot, int32 (nnz,), a new tensor."""
        return self.pattern.coordinates()[1]

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.out_features, self.in_features

    @property
    def slot_order(self) -> int:
        """Version of the order of slots, see `snack.formats.SLOT_ORDER`."""
        return SLOT_ORDER

    def __getattr__(self, name: str):
        if name == "weight":
            raise AttributeError(
                "SparseLinear has no .weight, because no dense matrix exists; use .values (the connections), "
                ".to_coo() or .to_dense() (a dense copy)."
            )
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "index" and self.index.is_meta:  # what comes is memory as it was found: a topology that nobody drew
            require(
                value.is_meta,
                "SparseLinear: the layer was built without memory (device 'meta'), and its topology cannot be put there piece by piece, as "
                "from_pretrained of transformers tries; build the model with memory and read the file by snack.load(path, like=model).",
            )
        super().__setattr__(name, value)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw values and bias uniformly within 1 / sqrt(mean connections of a row); the topology stays.

        They are drawn where the generator is (default: the CPU) and copied, so a seed means the same on every device.
        """
        if self.values.is_meta:
            return
        fan_in = max(1.0, self.nnz / max(1, self.out_features))
        bound = 1.0 / math.sqrt(fan_in)
        source = torch.device("cpu") if generator is None else generator.device
        for parameter in (self.values, self.bias):
            if parameter is None:
                continue
            drawn = parameter if parameter.device == source else torch.empty_like(parameter, device=source)
            drawn.uniform_(-bound, bound, generator=generator)
            if drawn is not parameter:
                parameter.copy_(drawn)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) -> (..., out_features)."""
        # The dictionaries themselves: attribute access of a module costs as much as a small product.
        buffers, parameters = self._buffers, self._parameters
        # In a data-parallel replica, or where something is parametrised, they are plain attributes.
        values = parameters["values"] if "values" in parameters else self.values
        bias = parameters["bias"] if "bias" in parameters else self.bias
        recorder = self._recorder
        if recorder is not None and torch.compiler.is_compiling():
            return linear_recorded(buffers["index"], buffers["tile_ptr"], values, x, bias, self.out_features, self.in_features)
        y = linear("SparseLinear", buffers["index"], buffers["tile_ptr"], values, x, bias, self.out_features, self.in_features, 0)
        if recorder is not None:
            recorder.watch(x, y)
        return y

    def to_dense(self) -> nn.Linear:
        """An nn.Linear with the same function; its weight holds out * in entries."""
        dense = nn.Linear(
            self.in_features, self.out_features, bias=self.bias is not None, device="meta", dtype=self.values.dtype
        )
        dense.weight = nn.Parameter(to_dense(self.pattern, self.values.detach()), requires_grad=self.values.requires_grad)
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach().clone(), requires_grad=self.bias.requires_grad)
        return dense.train(self.training)

    def to_coo(self) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, cols, values) in slot order: int32, int32, a detached copy."""
        return to_coo(self.pattern, self.values.detach().clone())

    def to_torch_csr(self) -> Tensor:
        """W as a torch.sparse_csr_tensor."""
        return to_torch_csr(self.pattern, self.values)

    def explain(self, batch: int, regime: str = "auto") -> dict[str, str]:
        """How spmm, spmm_t and sddmm would be computed for `batch` rows on the layer's device, and why: {operation: plan}.

        `regime` may be a kernel's name: of the other operations, the plan is then that of 'auto'. On a card a plan names the kernel and
        says what it is predicted to take, the bytes of the format, how long the card needs to copy them (floor), and the second fastest
        kernel; three more lines say where the predictions come from ("costs") and where edits and their choices are made ("rewire",
        "topology rules").
        """
        chosen = regime_code(regime, self.values)

        def problem(name):
            of_another = regime in KERNELS and regime.rsplit("_", 1)[0] != name
            return (self.out_features, self.in_features, self.nnz, batch, self.values.dtype, REGIMES["auto"] if of_another else chosen)

        if not self.values.is_cuda:
            return {name: call(torch.ops.snack.explain, code, *problem(name)) for code, name in enumerate(_PRODUCTS)}
        card = call(torch.ops.snack.cuda_capability, self.values.device.index)
        costs = _costs.text_of(card)
        plans = {name: call(torch.ops.snack.explain_cuda, code, *problem(name), *card, costs) for code, name in enumerate(_PRODUCTS)}
        return plans | {"costs": _costs.source_of(card), "rewire": "on the card", "topology rules": "on the card"}

    @torch.no_grad()
    def rewire(
        self,
        drop: object = None,
        grow: tuple[object, object] | None = None,
        values: Tensor | float | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        state: object = "zero",
    ) -> SlotMap:
        """Change the topology: drop connections, grow others, and move everything that belongs to a connection with it.

        Args:
            drop: slots to remove. grow: (rows, cols) of new connections: empty positions, or ones dropped here.
            values: of the grown connections, in the order of `grow` (default 0).
            optimizer: every state tensor with one entry a connection follows its connection.
            state: what it holds for grown ones: "zero", "mean" (of the layer), a function (key, tensor) -> number, or {state's key: one of
                these}, zero for the others.

        `.grad` is carried too. At constant nnz all memory keeps its address, so captured graphs stay valid; otherwise
        the Parameter object stays and gets new memory. On an error, running out of memory too, nothing is changed. On a
        card everything runs on its current stream, and the host waits once, to read whether the edit is valid.

        Returns: SlotMap (old slots -> new slots).
        """
        rows, cols = (None, None) if grow is None else grow
        layer_state.check_state_policy(state)
        pattern, source = ops.rewire(self.pattern, drop, rows, cols)
        slot_map = SlotMap(source.to(self.values.device), self.nnz)
        fill = 0.0 if values is None else values
        if isinstance(fill, Tensor):
            grown = 0 if rows is None else torch.as_tensor(rows).numel()
            require(
                fill.shape == (grown,),
                f"rewire: values have shape {tuple(fill.shape)}, expected one for each of the {grown} grown connections.",
            )
        try:
            layer_state.carry(self, pattern, slot_map, fill, optimizer, state)
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
            raise SnackMemoryError(f"rewire: out of memory: the layer and the optimiser are as they were: {reason}") from None
        return slot_map

    @torch.no_grad()
    def exchange(
        self,
        drop: str = "magnitude",
        grow: str = "uniform",
        *,
        k: int,
        fraction: float = 0.0,
        key: int = 0,
        x: Tensor | None = None,
        dy: Tensor | None = None,
        values: float = 0.0,
        optimizer: torch.optim.Optimizer | None = None,
        state: object = "zero",
    ) -> Tensor:
        """Replace connections by the built-in rules in one operation: choice, growth and `rewire` together, and on a card without waiting.

        drop, grow, k, fraction, key, x, dy: as in `snack.ops.exchange_`. values: of grown connections. optimizer, state: as in `rewire`.

        Returns: int64 (2,) on the layer's device: connections moved, and an error, see `snack.ops.exchange_`.
        Raises: SnackError; the layer is then as it was. SnackMemoryError, likewise.
        """
        layer_state.check_state_policy(state)
        rules = {"drop": drop, "grow": grow, "k": k, "fraction": fraction, "key": key, "x": x, "dy": dy}
        moved = layer_state.exchange(self, rules, values, optimizer, state)
        require(moved is not None, "exchange: more than 15 tensors belong to the connections, or one is not contiguous; use rewire.")
        return moved

    def _apply(self, fn, recurse: bool = True):
        was_meta = self.index.is_meta
        target = fn(self.index.new_empty(0)).device  # where the layer is about to go, without moving it yet
        if target.type == "cuda" and target != self.index.device and torch.cuda.is_initialized():
            _require_card(target)
        super()._apply(fn, recurse)
        if was_meta and not self.index.is_meta:
            # Memory without content would be a topology out of range: draw the one the meta layer stood for.
            pattern = Pattern.random((self.out_features, self.in_features), self.nnz, self._seed).to(self.index.device)
            self.index, self.tile_ptr = pattern.index, pattern.tile_ptr
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.index.is_meta:
            return
        layer_state.save(self, destination, prefix)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        hooks = self._load_state_dict_pre_hooks
        for hook in hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        layer_state.load(self, state_dict, prefix, local_metadata, missing_keys, unexpected_keys, error_msgs)
        # What a derived class added, and keys that nobody knows, are PyTorch's business.
        own = {prefix + key for key in layer_state.KEYS}
        others = {key: entry for key, entry in state_dict.items() if key not in own}
        missing: list[str] = []
        self._load_state_dict_pre_hooks = type(hooks)()  # they have run
        try:
            super()._load_from_state_dict(others, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs)
        finally:
            self._load_state_dict_pre_hooks = hooks
        missing_keys.extend(key for key in missing if key not in own)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"nnz={self.nnz}, sparsity={self.sparsity:.4g}"
        )


def meta_pattern(shape: tuple[int, int], nnz: int) -> Pattern:
    """Packed tensors of the right shapes without memory."""
    is_narrow, words = torch.ops.snack.geometry(*shape, nnz)
    index = torch.empty(nnz, dtype=torch.int16 if is_narrow else torch.int32, device="meta")
    return Pattern.from_packed(index, torch.empty(words, dtype=torch.int64, device="meta"), shape)


__all__ = ["SLOT_ORDER", "SparseLinear"]
