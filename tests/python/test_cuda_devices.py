"""Several cards in one process: the tensors decide where everything runs. Collected only where there are two."""

import copy

import pytest
import torch

from checks import fails, same
from snack import ops
from test_cuda_training import batches, build, on_cpu

pytestmark = pytest.mark.cuda

SECOND = torch.device("cuda", 1)


def test_the_tensors_decide_not_the_current_device():
    assert torch.cuda.current_device() == 0
    model, twin = build(device=SECOND), build()
    optimizer, twin_optimizer = (torch.optim.Adam(m.parameters()) for m in (model, twin))
    for update, (x, x2) in enumerate(zip(batches(4), batches(4, SECOND))):
        for m, o, data in ((model, optimizer, x2), (twin, twin_optimizer, x)):
            o.zero_grad()
            m(data).square().mean().backward()
            o.step()
            m[0].rewire(torch.arange(100), ops.grow_uniform(m[0].pattern, 100, update), optimizer=o)
    assert torch.cuda.current_device() == 0
    assert {t.device for t in (*model.parameters(), *model.buffers())} == {SECOND}
    assert same(on_cpu(model.state_dict()), on_cpu(twin.state_dict()))
    assert "kernel" in model[0].explain(3)["spmm"]


def test_two_cards_do_not_mix():
    a, b = build()[0], build(device=SECOND)[0]
    x = batches(1)[0]
    fails(["cuda:0", "cuda:1", "move one of them"], b, x)
    fails(["cuda:0", "cuda:1", "move one of them"], ops.spmm, b.pattern, a.values, x)
    moved = copy.deepcopy(a).to(SECOND)
    assert moved.index.device == SECOND and moved.pattern.equals(a.pattern)
    slots = ops.select_smallest(a.values, 5)
    b.rewire(slots)  # lists are moved to the pattern's device
    assert b.nnz == a.nnz - 5
