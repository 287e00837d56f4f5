"""Updates of a network on a card: as on the processor, without waiting for the card, in little memory."""

import pytest
import torch
from torch import nn

import snack
from snack.dst import Constant
from snack.nn import SparseLinear

pytestmark = pytest.mark.cuda
DEVICE = "cuda"

METHODS = {
    "SET": lambda m, o: snack.SET(m, o, every=3),
    "SET, magnitude": lambda m, o: snack.SET(m, o, every=3, drop="magnitude", drop_fraction=0.9),
    "RigL": lambda m, o: snack.RigL(m, o, every=3, t_end=40, state={"exp_avg_sq": "mean"}, grow_init=0.125),
    "signed, gradient": lambda m, o: snack.DST(m, o, drop="signed", grow="gradient", every=3),
    "SNFS": lambda m, o: snack.SNFS(m, o, every=3, t_end=40),
    "GMP": lambda m, o: snack.GMP(m, o, sparsity=0.95, every=3, t_end=12),
    "MEST": lambda m, o: snack.MEST(m, o, every=3, t_end=40),
    "SRigL": lambda m, o: snack.SRigL(m, o, every=3, t_end=40),
    "global": lambda m, o: snack.SET(m, o, every=3, drop="magnitude", scope="global"),
}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.5),
    "Adam": lambda p: torch.optim.Adam(p, 0.05, betas=(0.5, 0.5)),
    "fused Adam": lambda p: torch.optim.Adam(p, 0.05, fused=p[0].is_cuda),
    "capturable": lambda p: torch.optim.AdamW(p, 0.05, capturable=p[0].is_cuda),
    "fused_grad": lambda p: snack.optim.SGD(p, 0.05, momentum=0.5, fused_grad=True),
}


def network(device, dtype=torch.float32):
    torch.manual_seed(0)
    layers = [SparseLinear(1100, 96, sparsity=0.9), nn.ReLU(), SparseLinear(96, 130, sparsity=0.6), nn.ReLU(), nn.Linear(130, 3)]
    return nn.Sequential(*layers).to(device, dtype)


def steps(model, optimizer, dst, count, device):
    torch.manual_seed(1)
    for _ in range(count):
        x = torch.randn(4, 1100).to(device, next(model.parameters()).dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        dst.step()


@pytest.mark.parametrize("method", METHODS)
def test_one_update_is_that_of_the_processor(method):
    """From the same values and gradients: the card gets the processor's, so that rounding decides nothing."""
    found = {}
    for device in ("cpu", DEVICE):
        model = network(device)
        optimizer = OPTIMIZERS["SGD"](list(model.parameters()))
        dst = METHODS[method](model, optimizer)
        values = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randint(-2, 3, (4, 1100)).float().to(device)  # sums of products of few bits are exact everywhere
            dys = [torch.randint(-2, 3, (4, n)).float().to(device) for n in (96, 130)]
            optimizer.zero_grad()
            (model[0](x) * dys[0]).sum().backward()
            (model[2](x[:, :96]) * dys[1]).sum().backward()
            optimizer.step()
        for parameter, value in zip(model.parameters(), values):
            parameter.data.copy_(value)
        dst.step()
        assert dst.updates == 1 and dst.history[0].dropped > 0
        found[device] = model.state_dict(), optimizer.state_dict()["state"], dst.history[0].as_dict() | {"seconds": 0}
    assert found["cpu"][2] == found[DEVICE][2]
    for name, tensor in found["cpu"][0].items():
        assert torch.equal(tensor, found[DEVICE][0][name].cpu()), name
    for key, state in found["cpu"][1].items():
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(tensor, found[DEVICE][1][key][name].cpu()), (key, name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_training_repeats_and_every_state_follows(method, optimizer):
    runs = []
    for _ in range(2):
        model = network(DEVICE)
        maker = OPTIMIZERS[optimizer](list(model.parameters()))
        dst = METHODS[method](model, maker)
        steps(model, maker, dst, 10, DEVICE)
        assert dst.updates == 3 and sum(u.dropped for u in dst.history) > 0
        for layer in (model[0], model[2]):
            rows, cols, values = layer.to_coo()
            position = rows.long() * layer.in_features + cols
            assert position.unique().numel() == layer.nnz == values.numel()
            assert all(t.shape == values.shape for t in maker.state[layer.values].values() if torch.is_tensor(t) and t.numel() > 1)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        runs.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(runs[0].values(), runs[1].values()))


@pytest.mark.parametrize("method", ["SET", "SET, magnitude", "RigL", "signed, gradient"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_never_waits_for_the_card(method, optimizer):
    model = network(DEVICE)
    maker = OPTIMIZERS[optimizer](list(model.parameters()))
    dst = METHODS[method](model, maker)
    x = torch.randn(4, 1100, device=DEVICE)
    for _ in range(2):  # the first round makes state, workspace and modules
        for _ in range(3):
            maker.zero_grad()
            model(x).square().mean().backward()
            maker.step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            record = dst.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert record is not None
    assert record.dropped > 0


@pytest.mark.parametrize("make", [
    lambda m, o: snack.SET(m, o, every=1),
    lambda m, o: snack.RigL(m, o, every=1, drop_fraction=Constant(0.3)),
], ids=["SET", "RigL"])
def test_memory_of_an_update_is_16_bytes_a_connection(make):
    layer = SparseLinear(4096, 4096, sparsity=0.9, device=DEVICE)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    dst = make(layer, optimizer)
    x = torch.randn(4, 4096, device=DEVICE)
    for _ in range(2):
        layer(x).square().mean().backward()
        optimizer.step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        dst.step()
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 16 * layer.nnz + 2**20


def test_a_gradient_of_nan_keeps_the_connections_and_says_so():
    model = network(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dst = snack.RigL(model, optimizer, every=1, t_end=10)
    pattern = model[0].pattern.clone()
    model(torch.full((4, 1100), torch.nan, device=DEVICE)).sum().backward()
    optimizer.step()
    record = dst.step()
    with pytest.warns(UserWarning, match="layer '0' kept its connections: too few of its positions have a gradient"):
        assert record.layers["0"] == 0
    assert model[0].pattern.equals(pattern)


def test_updates_on_a_stream_of_their_own():
    results = []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        model = network(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
        dst = METHODS["RigL"](model, optimizer)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            steps(model, optimizer, dst, 9, DEVICE)
        torch.cuda.synchronize()
        results.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(results[0].values(), results[1].values()))
