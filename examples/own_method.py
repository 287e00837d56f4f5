"""A training method of your own in ten lines: say which connections to drop and where to grow; the stepper does the rest.

Drop: the connections that are small and that the loss does not pull at (|w| + 0.1 |dL/dw|, after MEST, Yuan et al. 2021).
Grow: of four random empty positions for every one needed, those whose input feature has the fewest connections so far.

Run it: python examples/own_method.py
"""

import torch
from torch import nn
from torch.nn import functional as F

from snack import dst, ops
from snack.nn import SparseLinear


# ---- the method: ten lines ----
@dst.needs_gradient
def drop_unloved(layer, k, context):
    pull = ops.sddmm(layer.pattern, context.dy, context.x)
    return ops.select_smallest(layer.values.abs() + 0.1 * pull.abs(), k)


def grow_to_lonely_inputs(layer, k, drop, context):
    rows, cols = ops.grow_uniform(layer.pattern, min(4 * k, context.empty + k), context.key, drop)
    connections = torch.bincount(layer.pattern.cols.long(), minlength=layer.in_features)
    chosen = torch.argsort(connections[cols], stable=True)[:k]
    return rows[chosen], cols[chosen]


# ---- the training loop it runs in ----
def unconnected_inputs(layer: SparseLinear) -> int:
    return layer.in_features - layer.pattern.cols.unique().numel()


def main(steps: int = 300) -> dict[str, float]:
    """Train on a made-up problem; returns what there is to see."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 200)
    labels = inputs[:, :10].abs().sum(1) > 8
    model = nn.Sequential(SparseLinear(200, 64, sparsity=0.97), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    method = dst.DST(model, optimizer, drop=drop_unloved, grow=grow_to_lonely_inputs, drop_fraction=0.3, every=20, t_end=0.75 * steps)
    unconnected, losses = unconnected_inputs(model[0]), []
    for _ in range(steps):
        rows = torch.randint(512, (64,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[rows]), labels[rows].long())
        loss.backward()
        optimizer.step()
        method.step()
        losses.append(loss.item())
    return {
        "first loss": losses[0],
        "last loss": losses[-1],
        "updates": method.updates,
        "connections": model[0].nnz,
        "unconnected inputs before": unconnected,
        "unconnected inputs after": unconnected_inputs(model[0]),
    }


if __name__ == "__main__":
    for what, value in main().items():
        print(f"{what}: {value:.3g}")
