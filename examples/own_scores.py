"""A training method of your own that serves every scope: give scores instead of choices, and the stepper compares them.

Drop: where the loss would change least without the connection, |w * dL/dw| (first-order Taylor, Molchanov et al. 2017). By `scores`, all layers
are compared as one with scope="global".
Grow: where gradient and input are both large, |dL/dw| * mean |x|. By `row_scores`, every neuron keeps its number of connections with scope="row".

Run it: python examples/own_scores.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import snack
from snack import dst, ops


# ---- the method: about ten lines ----
class DropUnimportant:
    def scores(self, layer, context):  # (nnz,): the smallest go
        return (layer.values * layer.values.grad).abs()

    def __call__(self, layer, k, context):
        return ops.select_smallest(self.scores(layer, context), k)


class GrowWhereItIsLoud:
    needs_gradient = True

    def row_scores(self, layer, rows, context):  # (rows, in): the largest come
        return (context.dy[:, rows].T @ loud(context.x)).abs()

    def __call__(self, layer, k, drop, context):
        return ops.grow_gradient(layer.pattern, loud(context.x), context.dy, k, drop)


def loud(x):
    return x * x.abs().mean(0)


# ---- the training loop it runs in ----
def main(scope: str = "row", steps: int = 300) -> dict[str, object]:
    """Train on a made-up problem; returns what there is to see."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 100)
    labels = inputs[:, :10].abs().sum(1) > 8
    model = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 2))
    snack.sparsify(model, 0.9, how="row", exclude="4")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    method = dst.DST(
        model, optimizer, drop=DropUnimportant(), grow=GrowWhereItIsLoud(), scope=scope, drop_fraction=0.3, every=20, t_end=0.75 * steps
    )

    def iteration() -> float:
        rows = torch.randint(512, (64,))
        optimizer.zero_grad()  # not between `optimizer.step` and `method.step`: the drop rule reads the gradient
        loss = F.cross_entropy(model(inputs[rows]), labels[rows].long())
        loss.backward()
        optimizer.step()
        method.step()
        return loss.item()

    losses = [iteration() for _ in range(steps)]
    return {
        "first loss": losses[0],
        "last loss": losses[-1],
        "updates": method.updates,
        "connections of the layers": [model[0].nnz, model[2].nnz],
        "connections of each neuron": sorted(set(torch.bincount(model[0].pattern.rows.long(), minlength=64).tolist())),
    }


if __name__ == "__main__":
    for scope in ("layer", "row", "global"):
        print(scope, main(scope))
