"""Paired training in float64: SNACK and a masked dense twin take the same 500 steps, with the same 20 edits.

The twin is a page of its own: dense weights times masks, the methods' rules applied to matrices as the papers state them, and the
random stream from its definition. None of snack's edits, selections, schedules or random numbers is used on its side.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from snack import dst
from snack.nn import SparseLinear

STEPS, EVERY, UPDATES, T_END, FRACTION, SEED = 500, 25, 20, 600, 0.3, 7
FINAL_SPARSITY = 0.85  # of gradual pruning, which ends at the last step
WINDOW, DECAY = 10, 0.9  # of the momentum that SNFS grows by
SIZES = (1100, 20, 16, 5)  # more than 1024 columns, so that slot order is not row-major order
BATCH, SAMPLES = 8, 64
STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq", "square_avg")


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


def first(score, allowed, k):
    """The k allowed positions (linear) of smallest score; ties: by column panel of 1024, row, column."""
    rows, columns = score.shape
    position = torch.arange(score.numel())
    order = torch.argsort(position % columns // 1024 * score.numel() + position)
    candidates = order[allowed.flatten()[order]]
    return candidates[torch.sort(score.flatten()[candidates], stable=True).indices[:k]]


def cosine(step):
    return FRACTION / 2 * (1 + math.cos(math.pi * step / T_END))


def shares(total, weights, room):
    """`total` in proportion to `weights`, whole numbers by largest remainder; what has no room goes to the others."""
    counts = [0] * len(weights)
    while sum(counts) < total and any(c < r for c, r in zip(counts, room)):
        open_ = [i for i in range(len(weights)) if counts[i] < room[i]]
        left, sum_ = total - sum(counts), sum(weights[i] for i in open_)
        quotas = {i: left * weights[i] / sum_ for i in open_}
        whole = {i: math.floor(quotas[i]) for i in open_}
        for i in sorted(open_, key=lambda i: whole[i] - quotas[i])[: left - sum(whole.values())]:
            whole[i] += 1
        for i in open_:
            counts[i] += min(whole[i], room[i] - counts[i])
    return counts


class Twin(nn.Module):
    def __init__(self, sparse_layers):
        super().__init__()
        self.weights, self.biases, self.masks = nn.ParameterList(), nn.ParameterList(), []
        for layer in sparse_layers:
            rows, cols, values = layer.to_coo()
            weight = torch.zeros(layer.out_features, layer.in_features, dtype=torch.float64)
            weight[rows.long(), cols.long()] = values
            mask = torch.zeros_like(weight, dtype=torch.bool)
            mask[rows.long(), cols.long()] = True
            self.weights.append(weight)
            self.biases.append(layer.bias.detach().clone())
            self.masks.append(mask)
        self.initial = [int(mask.sum()) for mask in self.masks]
        self.gradients = []  # dense ones of the last steps, newest first

    def forward(self, x):
        self.products = []
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            product = weight * self.masks[i]
            product.retain_grad()  # its gradient is the dense one
            self.products.append(product)
            x = F.linear(x if i == 0 else F.relu(x), product, bias)
        return x

    def note_gradients(self):
        self.gradients = [[product.grad for product in self.products], *self.gradients[: WINDOW - 1]]

    # -- which connections go --

    def dropped(self, method, i, step):
        weight, mask, gradient = self.weights[i].detach(), self.masks[i], self.gradients[0][i]
        live, empty = int(mask.sum()), int((~mask).sum())
        if method == "set":  # of each sign its share; 0 counts as positive
            positive, negative = mask & (weight >= 0), mask & (weight < 0)
            return torch.cat([first(weight.abs(), part, math.floor(FRACTION * int(part.sum()))) for part in (positive, negative)])
        if method == "gmp":
            begin = 1 - self.initial[i] / mask.numel()
            sparsity = FINAL_SPARSITY + (begin - FINAL_SPARSITY) * (1 - step / STEPS) ** 3
            return first(weight.abs(), mask, live - round((1 - sparsity) * mask.numel()))
        k = math.floor((FRACTION if method == "set-magnitude" else cosine(step)) * live)
        k = k if method == "snfs" else min(k, empty)  # what SNFS gives up may grow in another layer
        return first(weight.abs() + gradient.abs() if method == "mest" else weight.abs(), mask, k)

    # -- how many come, and where --

    def grown_counts(self, method, drops, optimizer):
        if method == "gmp":
            return [0] * len(drops)
        counts = [len(drop) for drop in drops]
        if method != "snfs":
            return counts
        moving = [i for i, count in enumerate(counts) if count]
        weights = []
        for i in moving:
            state = optimizer.state[self.weights[i]]
            momentum = state.get("momentum_buffer", state.get("exp_avg"))
            weights.append(float(momentum[self.masks[i]].abs().mean()))
        room = [int((~self.masks[i]).sum()) + counts[i] for i in moving]
        for i, count in zip(moving, shares(sum(counts), weights, room)):
            counts[i] = count
        return counts

    def grown(self, method, i, drop, k, number):
        free = ~self.masks[i]
        free.view(-1)[drop] = True
        if method in ("set", "set-magnitude", "mest"):
            taken, positions = ~free.flatten(), []
            for draw in stream(SEED, number, i):
                if len(positions) == k:
                    return torch.tensor(positions, dtype=torch.int64)
                position = draw * free.numel() // 2**64
                if not taken[position]:
                    taken[position] = True
                    positions.append(position)
        gradient = self.gradients[0][i]
        if method == "snfs":
            gradient = sum(DECAY**age * dense[i] for age, dense in enumerate(self.gradients))
        if method != "srigl":
            return first(-gradient.abs(), free, k)
        columns, parts = free.shape[1], []
        for row, lost in zip(*(drop // free.shape[1]).unique(return_counts=True)):
            ranked = torch.sort(-gradient[row].abs().where(free[row], torch.tensor(-1.0)), stable=True).indices
            parts.append(row * columns + ranked[:lost])
        return torch.cat(parts) if parts else drop

    @torch.no_grad()
    def update(self, method, step, number, optimizer):
        drops = [self.dropped(method, i, step) for i in range(len(self.masks))]
        counts = self.grown_counts(method, drops, optimizer)
        grows = [self.grown(method, i, drop, k, number) for i, (drop, k) in enumerate(zip(drops, counts))]
        for parameter, mask, drop, grow in zip(self.weights, self.masks, drops, grows):
            mask.view(-1)[drop] = False
            mask.view(-1)[grow] = True
            state = optimizer.state[parameter]
            for tensor in (parameter, *(state[key] for key in STATES if key in state)):
                tensor.view(-1)[torch.cat([drop, grow])] = 0


# ---- the comparison ----


@pytest.fixture(autouse=True)
def one_thread():
    """These matrices are tiny: threads would only wait for each other."""
    torch.set_num_threads(1)  # conftest puts it back


def build_sparse(method):
    torch.manual_seed(3)
    sparsities = (0.5, 0.5, 0.5) if method == "gmp" else (0.9, 0.6, 0.6)
    layers = []
    for in_features, out_features, sparsity in zip(SIZES, SIZES[1:], sparsities):
        layers += [SparseLinear(in_features, out_features, sparsity=sparsity, dtype=torch.float64), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


# eps is larger than usual: divided by 1e-8, the last bits in which two orders of summation differ would be 1e-10 of a step already.
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=1e-2, eps=1e-5),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.5, eps=1e-5),
}


def make_dst(method, model, optimizer):
    kind = {
        "set": dst.SET, "set-magnitude": dst.SET, "rigl": dst.RigL, "snfs": dst.SNFS, "gmp": dst.GMP, "mest": dst.MEST, "srigl": dst.SRigL,
        "static": dst.Static,
    }[method]
    options = {"every": EVERY, "seed": SEED, "t_end": T_END, "drop_fraction": FRACTION}
    if method == "gmp":
        options = {"every": EVERY, "sparsity": FINAL_SPARSITY, "t_end": STEPS}
    elif method == "snfs":
        options["grow"] = dst.MomentumGrowth(WINDOW, DECAY)
    elif method == "set-magnitude":
        options["drop"] = "magnitude"
    return kind(model, optimizer, **options)


class Comparison:
    """Holds SNACK's layers against the twin's matrices, entry by entry."""

    def __init__(self, layers, optimizer, twin, twin_optimizer):
        self.pairs = list(zip(layers, twin.weights))
        self.layers, self.optimizer, self.twin, self.twin_optimizer = layers, optimizer, twin, twin_optimizer
        self.look_up_positions()

    def look_up_positions(self):
        """After every update; also that the topologies are equal."""
        self.positions = [tuple(t.long() for t in layer.pattern.coordinates()) for layer in self.layers]
        for at, layer, mask in zip(self.positions, self.layers, self.twin.masks):
            assert len(at[0]) == layer.nnz == int(mask.sum()) and bool(mask[at].all())

    def assert_equal(self, step):
        """Values, biases and optimiser state to 1e-10."""
        worst = []
        for at, (layer, weight), bias in zip(self.positions, self.pairs, self.twin.biases):
            ours, theirs = self.optimizer.state[layer.values], self.twin_optimizer.state[weight]
            keys = [key for key in STATES if key in theirs]
            assert all(key in ours for key in keys)
            worst += [layer.values.detach() - weight.detach()[at], layer.bias.detach() - bias.detach()]
            worst += [ours[key] - theirs[key][at] for key in keys]
        worst = float(torch.cat(worst).abs().max())
        assert worst <= 1e-10, f"step {step}: differs by {worst}"

    def assert_nothing_elsewhere(self):
        """An absent connection has neither weight nor momentum in the twin, either."""
        for mask, weight in zip(self.twin.masks, self.twin.weights):
            state = self.twin_optimizer.state[weight]
            assert not any(bool(t.detach()[~mask].any()) for t in (weight, *(state[key] for key in STATES if key in state)))


CASES = [(method, name) for method in ("set", "rigl", "snfs", "gmp") for name in OPTIMIZERS]
CASES += [("set-magnitude", "sgd"), ("mest", "adamw"), ("srigl", "rmsprop"), ("static", "adamw")]


@pytest.mark.parametrize(("method", "optimizer_name"), CASES)
def test_trajectory_equals_masked_twin(method, optimizer_name):
    model = build_sparse(method)
    layers = [module for module in model if isinstance(module, SparseLinear)]
    twin = Twin(layers)
    optimizer, twin_optimizer = (OPTIMIZERS[optimizer_name](net.parameters()) for net in (model, twin))
    stepper = make_dst(method, model, optimizer)
    data = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, SIZES[0], dtype=torch.float64, generator=data)
    labels = torch.randint(SIZES[-1], (SAMPLES,), generator=data)
    comparison = Comparison(layers, optimizer, twin, twin_optimizer)
    first_masks = [mask.clone() for mask in twin.masks]
    losses, updates, changed = [], 0, 0
    for step in range(1, STEPS + 1):
        rows = torch.randint(SAMPLES, (BATCH,), generator=data)
        for net, opt in ((model, optimizer), (twin, twin_optimizer)):
            opt.zero_grad()
            loss = F.cross_entropy(net(inputs[rows]), labels[rows])
            loss.backward()
            opt.step()
        losses.append(loss.item())
        del loss
        twin.note_gradients()
        record = stepper.step()
        is_due = method != "static" and step % EVERY == 0
        assert (record is not None) == is_due
        if is_due:
            before = [mask.clone() for mask in twin.masks]
            twin.update(method, step, updates, twin_optimizer)
            updates += 1
            comparison.look_up_positions()
            comparison.assert_nothing_elsewhere()
            changed += sum(bool((a != b).any()) for a, b in zip(before, twin.masks))
        comparison.assert_equal(step)
    # It learned something, and the topologies moved: the trajectory is not a standstill.
    assert sum(losses[-50:]) < 0.7 * sum(losses[:50])
    assert updates == (0 if method == "static" else UPDATES)
    if method == "static":
        assert all(torch.equal(a, b) for a, b in zip(first_masks, twin.masks))
    else:
        assert changed >= UPDATES and min(int((a != b).sum()) for a, b in zip(first_masks, twin.masks)) > 0
    nnz = [layer.nnz for layer in layers]
    if method == "gmp":
        assert nnz == [round((1 - FINAL_SPARSITY) * mask.numel()) for mask in twin.masks]
    elif method == "snfs":  # connections went from layer to layer
        assert nnz != twin.initial and sum(nnz) == sum(twin.initial)
    else:
        assert nnz == twin.initial
    if method == "srigl":
        assert all(torch.equal(a.sum(1), b.sum(1)) for a, b in zip(first_masks, twin.masks))
