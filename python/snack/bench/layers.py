"""Whole layers with a bias: inference, a training step, a topology update; ours and the peers', each built anew for what is measured.

`peak_bytes` is everything that lives during the calls: weights, indices or mask, gradients, optimiser state, temporaries; not x and dy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from .. import optim
from ..dst import DST, SET, Constant, RigL
from ..nn import SparseLinear
from .case import Case
from .peers import Peer, Problem, Topology
from .timing import Run


class Masked(nn.Linear):
    """nn.Linear with a mask on its weight: autograd masks the gradient, and the optimiser updates every weight."""

    def __init__(self, out: int, in_: int, sparsity: float, mask_dtype: torch.dtype, **where):
        super().__init__(in_, out, **where)
        self.register_buffer("mask", torch.empty(out, in_, device=where["device"], dtype=mask_dtype).bernoulli_(1 - sparsity))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight * self.mask, self.bias)


class TorchSparse(nn.Module):
    """torch.sparse CSR or COO over a 1-D parameter of values: its own derivatives, and any optimiser."""

    def __init__(self, layer: SparseLinear, layout: str):
        super().__init__()
        pointers, cols, slots = Topology(layer.pattern).compressed(False)
        self.size, self.layout = layer.pattern.shape, layout
        self.values, self.bias = nn.Parameter(layer.values.detach()[slots]), nn.Parameter(layer.bias.detach().clone())
        if layout == "coo":
            rows = torch.repeat_interleave(torch.arange(self.size[0], device=cols.device), pointers.diff().long())
            pointers, cols = torch.stack([rows, cols.long()]), None
        self.register_buffer("where", pointers)
        self.register_buffer("cols", cols)

    def forward(self, x: Tensor) -> Tensor:
        if self.layout == "csr":
            weight = torch.sparse_csr_tensor(self.where, self.cols, self.values, self.size, check_invariants=False)
        else:
            weight = torch.sparse_coo_tensor(self.where, self.values, self.size, is_coalesced=True, check_invariants=False)
        return torch.sparse.mm(weight, x.t()).t() + self.bias


@lru_cache(maxsize=1)
def _drawn(shape: tuple[int, int], sparsity: float, dtype: str, device: torch.device) -> SparseLinear:
    """A random layer. Drawing one takes seconds where it has 60 M connections, so neighbours of a suite get copies of one."""
    generator = torch.Generator().manual_seed(1)
    return SparseLinear(*shape[::-1], sparsity=sparsity, device=device, dtype=getattr(torch, dtype), generator=generator)


def prototype(case: Case, device: torch.device) -> SparseLinear:
    """The layer that those of a case are copies of; it stays in memory until another is asked for."""
    return _drawn(case.shape, case.sparsity, case.dtype, device)


def build(name: str, case: Case, device: torch.device) -> nn.Module:
    """The layer of a contender. ImportError or NotImplementedError where there is none."""
    out, in_ = case.shape
    where = {"device": device, "dtype": torch.bfloat16 if name == "dense_bf16" else getattr(torch, case.dtype)}
    if name in ("dense", "dense_tf32", "dense_bf16"):
        return nn.Linear(in_, out, **where)
    if name in ("dense_mask", "dense_mask_bool"):
        return Masked(out, in_, case.sparsity, where["dtype"] if name == "dense_mask" else torch.bool, **where)
    if name == "sparselab":
        if device.type != "cpu":
            raise NotImplementedError("SparseLab runs on processors alone")
        from sparselab import SparseLinear as Theirs

        return Theirs(in_, out, bias=True, sparsity=case.sparsity)
    if name in ("snack", "snack_fused"):
        return deepcopy(prototype(case, device))
    return TorchSparse(prototype(case, device), name.removeprefix("torch_"))


def operands(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """x (batch, in), dy (batch, out), random."""
    generator = torch.Generator(device).manual_seed(3)
    x, dy = (torch.randn(case.batch, n, device=device, generator=generator) for n in case.shape[::-1])
    return x.to(getattr(torch, case.dtype)), dy.to(getattr(torch, case.dtype))


def _optimizer(name: str, module: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    parameters, momentum = module.parameters(), 0.9 if "momentum" in name else 0.0
    if fused and name == "Adam":
        return optim.AdamW(parameters, lr=1e-6, weight_decay=0.0, fused_grad=True)
    if fused:
        return optim.SGD(parameters, lr=1e-6, momentum=momentum, fused_grad=True)
    return torch.optim.Adam(parameters, lr=1e-6) if name == "Adam" else torch.optim.SGD(parameters, lr=1e-6, momentum=momentum)


def training(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, dy: Tensor) -> Run:
    """A step: gradients forgotten, forward, backward (dX, dW, db), optimiser."""
    dtype = next(module.parameters()).dtype
    x, dy = x.detach().to(dtype).requires_grad_(), dy.to(dtype)

    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        x.grad = None
        module(x).backward(dy)
        optimizer.step()

    return run


def inference(module: nn.Module, x: Tensor) -> Run:
    """y = x Wᵀ + b without a graph."""
    x = x.to(next(module.parameters()).dtype)

    def run() -> Tensor:
        with torch.no_grad():
            return module(x)

    return run


def in_tf32(run: Run) -> Run:
    """The call with TF32 multiplications."""
    def with_tf32() -> object:
        torch.set_float32_matmul_precision("high")
        try:
            return run()
        finally:
            torch.set_float32_matmul_precision("highest")

    return with_tf32


def maker(name: str, case: Case, device: torch.device, copies: int = 1) -> Callable[[], Peer]:
    """Builds a contender of layer_infer or layer_step."""
    x, dy = operands(case, device)

    def make() -> Peer:
        module = build(name, case, device)
        if case.routine == "layer_step":
            runs = [training(module, _optimizer(case.optimizer, module, name == "snack_fused"), x, dy)]
        else:
            runs = [inference(m, x) for m in (module, *(deepcopy(module) for _ in range(copies - 1)))]
        if name == "dense_tf32":
            runs = [in_tf32(run) for run in runs]
        note = {"dense_bf16": "weights, x and y in bfloat16", "snack_fused": "snack.optim with fused_grad"}.get(name, "")
        waits = isinstance(module, TorchSparse) and case.routine == "layer_step"
        why_eager = "the backward of torch.sparse waits for the card" if waits else ""
        return Peer(runs, note=note, parameters=sum(p.numel() for p in module.parameters()), why_eager=why_eager)

    return make


def error_of(layer: SparseLinear, case: Case, device: torch.device) -> float:
    """The largest relative error of y, and of a training step's dx and gradient of the values, sampled, against float64."""
    x, dy = operands(case, device)
    topology, values = Topology(layer.pattern), layer.values.detach()
    weight = torch.zeros(layer.pattern.shape, device=device, dtype=values.dtype)
    weight[topology.rows, topology.cols] = values
    x.requires_grad_(case.routine == "layer_step")
    with torch.no_grad() if case.routine == "layer_infer" else contextlib.nullcontext():
        y = layer(x)
    results = {"spmm": y.detach().float() - layer.bias.detach().float()}
    if case.routine == "layer_step":
        y.backward(dy)
        results |= {"spmm_t": x.grad, "sddmm": layer.values.grad}
        layer.values.grad = layer.bias.grad = None
    mask = torch.ones(1, device=device, dtype=values.dtype).expand_as(weight)
    problems = ((Problem(routine, topology, weight, mask, values, x.detach(), dy), result) for routine, result in results.items())
    return max(problem.error(result) for problem, result in problems)


# ---- memory ------------------------------------------------------------------------------------------------------------------------------


def memory(name: str, case: Case, meter) -> Iterator[tuple[str, int]]:
    """("kept_bytes" of parameters, gradients, buffers and optimiser state, "peak_bytes" of a training step, "infer_peak_bytes",
    "parameters"), as far as they can be watched; the first that does not fit raises."""
    x, dy = operands(case, meter.device)
    built: list = []

    def step() -> Run:
        built[:] = [build(name, case, meter.device)]
        built.append(_optimizer(case.optimizer, built[0], name == "snack_fused"))
        run = training(*built, x, dy)
        run()
        return run

    peak = meter.peak_bytes(step)
    if peak is None:
        step()
    else:
        yield "peak_bytes", peak
    module, optimizer = built
    parameters = list(module.parameters())
    tensors = [*parameters, *(p.grad for p in parameters), *module.buffers()]
    tensors += [t for p in parameters for t in optimizer.state[p].values() if isinstance(t, Tensor)]
    yield "kept_bytes", sum(t.nbytes for t in tensors if t is not None)
    yield "parameters", sum(p.numel() for p in parameters)
    built.clear()
    del module, optimizer, parameters, tensors
    meter.tidy()
    infer = meter.peak_bytes(lambda: inference(build(name, case, meter.device).requires_grad_(False), x))
    if infer is not None:
        yield "infer_peak_bytes", infer


# ---- topology updates --------------------------------------------------------------------------------------------------------------------

FRACTION = 0.3  # of the connections that an update moves


def _update_of(case: Case, device: torch.device, make: Callable[[nn.Module, torch.optim.Optimizer], DST], note: str) -> Peer:
    """Updates one after another, each with what the training step before the first recorded; gradient and optimiser state are carried."""
    layer = build("snack", case, device)
    optimizer = _optimizer(case.optimizer, layer)
    dst = make(layer, optimizer)
    training(layer, optimizer, *operands(case, device))()
    due = dst._due

    def run() -> None:
        dst._due = due
        dst.step()

    return Peer([run], note=note)


def set_update(case: Case, device: torch.device) -> Peer:
    """One update of SET: drop, grow, rewire, optimiser state carried along."""
    return _update_of(case, device, lambda m, o: SET(m, o, every=1, drop_fraction=FRACTION), f"SET, {FRACTION:g} of the connections")


def rigl_update(case: Case, device: torch.device) -> Peer:
    """One update of RigL, by the gradient of all absent connections."""
    note = f"RigL, {FRACTION:g} of the connections"
    return _update_of(case, device, lambda m, o: RigL(m, o, every=1, drop_fraction=Constant(FRACTION)), note)


def masked_update(case: Case, device: torch.device) -> Peer:
    """The same on a dense weight and its mask, by selections over all positions."""
    layer = build("dense_mask", case, device)
    weight, mask, momentum = layer.weight.detach().view(-1), layer.mask.view(-1), torch.zeros_like(layer.weight).view(-1)
    k = int(FRACTION * int(mask.count_nonzero()))

    def run() -> None:
        dropped = torch.where(mask > 0, weight.abs(), torch.inf).topk(k, largest=False, sorted=False).indices
        grown = torch.where(mask > 0, -1.0, torch.rand_like(weight)).topk(k, sorted=False).indices
        mask[dropped] = 0
        mask[grown] = 1
        for tensor in (weight, momentum):
            tensor[dropped] = 0
            tensor[grown] = 0

    return Peer([run], note="by magnitude and at random, over all positions")


UPDATES: dict[str, Callable[[Case, torch.device], Peer]] = {"snack": set_update, "snack_rigl": rigl_update, "dense_mask": masked_update}
