"""Ten thousand random edits of layers against a Python set: no connection doubled or lost, and everything moves with its connection.

Values, gradient and optimiser state are tagged with the coordinate of their connection before every edit, so whatever a wrong
permutation mixes up, shows. A failure names shape, seed and number of the edit; `python -m pytest -k` of the shape repeats it.
"""

import random

import pytest
import torch

import snack
from checks import real
from snack.nn import SparseLinear

pytestmark = pytest.mark.usefixtures("on_device")

# (out, in): most connections, edits. Connections are packed in 2 bytes from a mean of 32 in each tile of 64 x 1024 on, in 4 bytes below; all
# shapes with 150 connections or more go back and forth across that. 3 x 2100 and 70 x 2100 have several column panels, 300 x 2 several tiles below
# each other.
SHAPES = {
    (1, 1): (1, 600),
    (1, 7): (7, 700),
    (7, 1): (7, 700),
    (1, 3000): (120, 1000),
    (3000, 1): (120, 1000),
    (5, 6): (30, 1000),
    (33, 70): (150, 1000),
    (300, 2): (200, 1000),
    (3, 2100): (160, 1000),
    (70, 1030): (300, 1000),
    (70, 2100): (400, 1000),
}
SEED = 20_240


def slot_order(position, columns):
    return position % columns // 1024, position // columns, position % columns


def random_edit(rng, live, shape, most):
    """(positions to drop, positions to grow) of an edit that `rewire` has to accept; about half of them keep nnz."""
    positions = shape[0] * shape[1]
    drop = rng.sample(sorted(live), rng.choice([0, min(1, len(live)), len(live) // 10, rng.randint(0, len(live)), len(live)]))
    left = live.difference(drop)
    room = min(positions, most) - len(left)
    grows = len(drop) if rng.random() < 0.5 else rng.choice([0, min(1, room), rng.randint(0, room), room])
    grow, seen = [], set(left)
    for position in rng.sample(drop, rng.randint(0, min(grows, len(drop)))):  # given up and taken again in one edit
        seen.add(position)
        grow.append(position)
    if positions <= 4 * most:
        grow += rng.sample([p for p in range(positions) if p not in seen], grows - len(grow))
    while len(grow) < grows:
        position = rng.randrange(positions)
        if position not in seen:
            seen.add(position)
            grow.append(position)
    rng.shuffle(grow)
    return drop, grow


def tensors_of(layer, optimizer):
    state = optimizer.state[layer.values]
    return [layer.values.grad, state["momentum_buffer"], state["exp_avg"]]


def give_state(layer, optimizer):
    """What optimisers keep: two tensors with an entry a connection, and a step counter."""
    layer.values.grad = torch.zeros_like(layer.values)
    state = optimizer.state[layer.values]
    state["momentum_buffer"], state["exp_avg"] = torch.zeros_like(layer.values), torch.zeros_like(layer.values)
    state["step"] = torch.tensor(5.0)


def check_one_edit(rng, layer, optimizer, live, most):
    """One random edit of layer and model; returns the model's connections after it."""
    shape = (layer.out_features, layer.in_features)
    slots = sorted(live, key=lambda p: slot_order(p, shape[1]))
    tags = torch.tensor(slots, dtype=real()) + 1
    tensors = tensors_of(layer, optimizer)
    for tensor in (layer.values.data, *tensors):
        tensor.copy_(tags)
    addresses = [t.data_ptr() for t in (layer.values, layer.index, layer.tile_ptr, *tensors)]
    drop, grow = random_edit(rng, live, shape, most)
    slot_of = {position: slot for slot, position in enumerate(slots)}
    rows, cols = [p // shape[1] for p in grow], [p % shape[1] for p in grow]
    layer.rewire([slot_of[p] for p in drop], (rows, cols), -torch.tensor(grow, dtype=real()) - 1, optimizer)

    survivors, grown = live.difference(drop), set(grow)
    assert survivors.isdisjoint(grown) and len(grown) == len(grow)  # of the model itself
    expected = sorted(survivors | grown, key=lambda p: slot_order(p, shape[1]))
    found = (layer.pattern.rows.long() * shape[1] + layer.pattern.cols.long()).tolist()
    assert found == expected, "the topology is not that of the model"
    assert layer.values.tolist() == [p + 1 if p in survivors else -p - 1 for p in expected], "values are not with their connections"
    state = [p + 1 if p in survivors else 0 for p in expected]
    for name, tensor in zip(("grad", "momentum_buffer", "exp_avg"), tensors_of(layer, optimizer)):
        assert tensor.tolist() == state, f"{name} is not with its connections"
    assert float(optimizer.state[layer.values]["step"]) == 5.0
    if len(drop) == len(grow):
        after = [t.data_ptr() for t in (layer.values, layer.index, layer.tile_ptr, *tensors_of(layer, optimizer))]
        assert after == addresses, "an edit at constant nnz moved memory"
    return survivors | grown


def test_there_are_ten_thousand():
    assert sum(edits for _, edits in SHAPES.values()) == 10_000


@pytest.mark.parametrize(("shape", "most", "edits"), [pytest.param(s, m, e, id=f"{s[0]}x{s[1]}") for s, (m, e) in SHAPES.items()])
def test_random_edits(shape, most, edits):
    torch.set_num_threads(1)  # conftest puts it back
    rng = random.Random(f"{SEED} {shape}")
    positions = shape[0] * shape[1]
    pattern = snack.Pattern.random(shape, min(positions, most) // 2, SEED)
    layer = SparseLinear.from_coo(pattern.rows, pattern.cols, torch.zeros(pattern.nnz, dtype=real(), device="cpu"), shape)
    layer.to(torch.get_default_device())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    give_state(layer, optimizer)
    live = set((layer.pattern.rows.long() * shape[1] + layer.pattern.cols.long()).tolist())
    sizes, widths = set(), set()
    for number in range(edits):
        try:
            live = check_one_edit(rng, layer, optimizer, live, most)
        except Exception as error:
            pytest.fail(f"shape {shape}, seed {SEED}, edit {number}: {error}")
        sizes.add(layer.nnz)
        widths.add(layer.index.dtype)
    assert min(sizes) == 0 and max(sizes) == min(positions, most)  # down to nothing and up to all that is allowed
    assert len(widths) == 2 or most < 150  # both packings
