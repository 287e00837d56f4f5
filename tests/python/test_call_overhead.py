"""An eager call of a layer costs what one of nn.Linear does. The bounds are wide, for machines that do other things too: they
catch a route that does per call what few callers need (arguments bound by name, the registered operators' Python autograd)."""

import time

import pytest
import torch
from torch import nn

from snack.nn import SparseLinear

ROUNDS, CALLS = 60, 60


def no_grad(module, x, dy):
    with torch.no_grad():
        module(x)


def forward(module, x, dy):
    module(x)


def forward_backward(module, x, dy):
    module(x).backward(dy)
    x.grad = None
    for parameter in module._parameters.values():
        parameter.grad = None


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def fastest(runs, enough):
    """The fastest of many short turns of each, taken side by side; stops early where `enough` says so."""
    best = [float("inf")] * len(runs)
    for turn in range(ROUNDS):
        for i, (run, *operands) in enumerate(runs):
            wait(operands[1].device)
            start = time.perf_counter()
            for _ in range(CALLS):
                run(*operands)
            wait(operands[1].device)
            best[i] = min(best[i], (time.perf_counter() - start) / CALLS)
        if turn >= 8 and enough(*best):
            break
    return best


# Next to nothing is multiplied at 64 x 64: there the call is all that is measured. At 500 x 500 the product counts.
@pytest.mark.parametrize("size, run, bound", [(500, no_grad, 2), (500, forward_backward, 2), (64, no_grad, 3), (64, forward, 4)])
def test_call_beside_nn_linear(device, size, run, bound):
    torch.set_num_threads(1)
    x, dy = (torch.randn(1, size, device=device) for _ in range(2))
    modules = SparseLinear(size, size, sparsity=0.95, device=device), nn.Linear(size, size, device=device)
    sparse, dense = fastest([(run, module, x.requires_grad_(), dy) for module in modules], lambda s, d: s <= bound * d)
    assert sparse <= bound * dense, f"SparseLinear {1e6 * sparse:.1f} us a call, nn.Linear {1e6 * dense:.1f} us"


def test_leading_dimensions_cost_little_more():
    """A batch of sequences is flattened, and then takes the route of a matrix."""
    layer, x = SparseLinear(64, 64, sparsity=0.95, device="cpu"), torch.randn(1, 64)
    runs = [(forward, layer, x[None], None), (forward, layer, x, None)]
    deep, flat = fastest(runs, lambda deep, flat: deep <= 3 * flat)
    assert deep <= 3 * flat, f"x (1, 1, 64): {1e6 * deep:.1f} us a call, x (1, 64): {1e6 * flat:.1f} us"
