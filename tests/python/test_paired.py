"""Paired training in float64: SNACK and a masked dense twin take the same 200 steps, with the same edits.

The twin is a page of its own: a dense weight times a mask, SET's and RigL's rules applied to matrices as the papers state them,
and the random stream from its definition. None of snack's edits, selections or random numbers is used on its side.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snack import dst
from snack.nn import SparseLinear

STEPS, EVERY, T_END, FRACTION, SEED = 200, 10, 160, 0.3, 7
SIZES = (1100, 20, 16, 5)  # more than 1024 columns, so that slot order is not row-major order
BATCH = 8


# ---- the twin ----


def mix64(z):
    mask = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def stream(seed, *numbers):
    """Random 64-bit integers: the state walks in steps of the golden ratio from a key mixed of seed and numbers."""
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    key = mix64(seed)
    for number in numbers:
        key = mix64(key ^ mix64(number + golden))
    while True:
        key = (key + golden) & mask
        yield mix64(key)


def by_slot(positions, columns):
    """Sorts linear positions as ties are to be broken: column panel of 1024, row, column."""
    return sorted(positions, key=lambda p: (p % columns // 1024, p // columns, p % columns))


def smallest(weight, positions, k):
    """The k positions of smallest magnitude; sorted() is stable, so the order of `positions` breaks ties."""
    return sorted(positions, key=lambda p: abs(weight[p]))[:k]


class Twin(nn.Module):
    def __init__(self, sparse_layers):
        super().__init__()
        self.weights, self.biases, self.masks = nn.ParameterList(), nn.ParameterList(), []
        for layer in sparse_layers:
            rows, cols, values = layer.to_coo()
            weight = torch.zeros(layer.out_features, layer.in_features, dtype=torch.float64)
            mask = torch.zeros_like(weight)
            for row, col, value in zip(rows.tolist(), cols.tolist(), values.tolist()):
                weight[row, col], mask[row, col] = value, 1
            self.weights.append(weight)
            self.biases.append(layer.bias.detach().clone())
            self.masks.append(mask)

    def forward(self, x):
        self.products = []
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            product = weight * self.masks[i]
            product.retain_grad()  # its gradient is the dense one
            self.products.append(product)
            x = F.linear(x if i == 0 else F.relu(x), product, bias)
        return x

    @torch.no_grad()
    def update(self, method, step, number, optimizer):
        for i, (parameter, mask) in enumerate(zip(self.weights, self.masks)):
            columns = mask.shape[1]
            weight = parameter.flatten().tolist()
            live = by_slot([p for p, m in enumerate(mask.flatten().tolist()) if m], columns)
            if method == "set":
                positive = [p for p in live if weight[p] >= 0]
                negative = [p for p in live if weight[p] < 0]
                dropped = smallest(weight, positive, math.floor(FRACTION * len(positive)))
                dropped += smallest(weight, negative, math.floor(FRACTION * len(negative)))
            else:
                fraction = FRACTION if method == "set-magnitude" else FRACTION / 2 * (1 + math.cos(step * math.pi / T_END))
                dropped = smallest(weight, live, math.floor(fraction * len(live)))
            taken, grown = set(live) - set(dropped), []
            if method == "rigl":
                gradient = self.products[i].grad.flatten().tolist()
                empty = by_slot([p for p in range(len(gradient)) if p not in taken], columns)
                grown = sorted(empty, key=lambda p: -abs(gradient[p]))[: len(dropped)]
            else:
                for draw in stream(SEED, number, i):
                    if len(grown) == len(dropped):
                        break
                    position = draw * mask.numel() // 2**64
                    if position not in taken:
                        taken.add(position)
                        grown.append(position)
            mask.view(-1)[dropped] = 0
            mask.view(-1)[grown] = 1
            state = optimizer.state[parameter]
            for tensor in (parameter, state.get("momentum_buffer"), state.get("exp_avg"), state.get("exp_avg_sq")):
                if tensor is not None:
                    tensor.view(-1)[dropped + grown] = 0


# ---- the comparison ----


@pytest.fixture(autouse=True)
def one_thread():
    """These matrices are tiny: threads would only wait for each other."""
    torch.set_num_threads(1)  # conftest puts it back


def build_sparse():
    torch.manual_seed(3)
    layers = []
    for in_features, out_features in zip(SIZES, SIZES[1:]):
        layers += [SparseLinear(in_features, out_features, sparsity=0.9 if in_features > 1000 else 0.6, dtype=torch.float64), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def optimizer_of(name, parameters):
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4)
    return torch.optim.Adam(parameters, lr=0.01)


def make_dst(method, model, optimizer):
    options = {"every": EVERY, "drop_fraction": FRACTION, "t_end": T_END, "seed": SEED}
    if method == "set-magnitude":
        return dst.SET(model, optimizer, drop="magnitude", **options)
    return {"set": dst.SET, "rigl": dst.RigL, "static": dst.Static}[method](model, optimizer, **options)


def as_matrix(layer, vector):
    rows, cols = layer.pattern.coordinates()
    matrix = torch.zeros(layer.out_features, layer.in_features, dtype=torch.float64)
    matrix[rows.long(), cols.long()] = vector.detach()
    return matrix


def assert_close(ours, theirs, what):
    difference = (ours - theirs).abs().max().item()
    assert difference <= 1e-10, f"{what} differs by {difference}"


def assert_same_state(layers, optimizer, twin, twin_optimizer, step):
    for i, layer in enumerate(layers):
        at = f"step {step}, layer {i}: "
        assert torch.equal(as_matrix(layer, torch.ones_like(layer.values)), twin.masks[i]), at + "mask"
        assert_close(as_matrix(layer, layer.values), twin.weights[i] * twin.masks[i], at + "weight")
        assert_close(layer.bias, twin.biases[i], at + "bias")
        ours, theirs = optimizer.state[layer.values], twin_optimizer.state[twin.weights[i]]
        for key in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            assert (key in ours) == (key in theirs)
            if key in ours:
                # Compared on every entry: an absent connection has no momentum in either.
                assert_close(as_matrix(layer, ours[key]), theirs[key], at + key)


@pytest.mark.parametrize("optimizer_name", ["sgd", "adam"])
@pytest.mark.parametrize("method", ["set", "set-magnitude", "rigl", "static"])
def test_trajectory_equals_masked_twin(method, optimizer_name):
    model = build_sparse()
    layers = [module for module in model if isinstance(module, SparseLinear)]
    twin = Twin(layers)
    optimizer, twin_optimizer = optimizer_of(optimizer_name, model.parameters()), optimizer_of(optimizer_name, twin.parameters())
    stepper = make_dst(method, model, optimizer)
    data = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, SIZES[0], dtype=torch.float64, generator=data)
    labels = torch.randint(SIZES[-1], (64,), generator=data)
    first_masks = [mask.clone() for mask in twin.masks]
    updates = 0
    for step in range(1, STEPS + 1):
        rows = torch.randint(64, (BATCH,), generator=data)
        for net, opt in ((model, optimizer), (twin, twin_optimizer)):
            opt.zero_grad()
            loss = F.cross_entropy(net(inputs[rows]), labels[rows])
            loss.backward()
            opt.step()
        record = stepper.step()
        is_due = method != "static" and step % EVERY == 0 and step < T_END
        assert (record is not None) == is_due
        if is_due:
            twin.update(method, step, updates, twin_optimizer)
            updates += 1
        assert_same_state(layers, optimizer, twin, twin_optimizer, step)
    assert loss.item() < 0.5  # it learned something: the trajectory is not a standstill
    moved = [int((a != b).sum()) // 2 for a, b in zip(first_masks, twin.masks)]
    assert updates == (0 if method == "static" else 15)
    # What moved is a test of the edits: every layer changed, and the large one most of all.
    assert moved == [0, 0, 0] if method == "static" else (min(moved) > 0 and moved[0] > 500), moved
