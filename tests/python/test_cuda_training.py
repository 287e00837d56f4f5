"""Training on a card: graphs of whole steps, scalers, compilers, moves between devices, files.

Collected only where there is a card.
"""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import snack
from checks import same
from snack import ops
from snack.cli.main import main
from snack.nn import SparseLinear

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda", 0)


def build(dtype=torch.float32, device=DEVICE):
    torch.manual_seed(0)
    return nn.Sequential(
        SparseLinear(200, 300, sparsity=0.8, dtype=dtype, device=device), nn.ReLU(), SparseLinear(300, 10, sparsity=0.5, dtype=dtype, device=device)
    )


def batches(count, device=DEVICE, rows=32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 200, generator=generator).to(device) for _ in range(count)]


def on_cpu(tensors):
    return {k: v.cpu() for k, v in tensors.items()}


def edit(layer, update, optimizer=None, k=200):
    drop = ops.select_smallest(layer.values, k)
    layer.rewire(drop, ops.grow_uniform(layer.pattern, k, ops.random_key(0, update), drop), optimizer=optimizer)


# ---- one seed, every device ----


def test_one_seed_gives_one_layer():
    torch.manual_seed(5)
    a = SparseLinear(700, 300, sparsity=0.9)
    torch.manual_seed(5)
    b = SparseLinear(700, 300, sparsity=0.9, device=DEVICE)
    assert b.values.device == b.index.device == b.tile_ptr.device == DEVICE
    assert same(a.state_dict(), on_cpu(b.state_dict()))
    c = SparseLinear(700, 300, sparsity=0.9, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(3))
    d = SparseLinear(700, 300, sparsity=0.9, generator=torch.Generator(DEVICE).manual_seed(3))
    assert same(on_cpu(c.state_dict()), d.state_dict())


@pytest.mark.parametrize("how", ["random", "magnitude"])
def test_one_seed_gives_one_sparsified_model(how):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 10))
    models = [snack.sparsify(copy.deepcopy(dense).to(d), 0.9, how=how, generator=torch.Generator().manual_seed(4)) for d in ("cpu", DEVICE)]
    assert {t.device for t in models[1].state_dict(keep_vars=True).values() if t.is_floating_point()} == {DEVICE}
    assert models[1][0].index.device == DEVICE and same(models[0].state_dict(), on_cpu(models[1].state_dict()))
    back = snack.densify(models[1])
    assert back[0].weight.device == DEVICE and torch.equal(back[0].weight.cpu(), snack.densify(models[0])[0].weight)


@pytest.mark.parametrize("method", [snack.SET, snack.RigL])
def test_training_follows_the_cpu(method):
    """Same topologies through ten updates, same values up to rounding."""
    models = []
    for device in (torch.device("cpu"), DEVICE):
        model = build(device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        stepper = method(model, optimizer, every=2, t_end=20)
        for x in batches(10, device):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            stepper.step()
        assert stepper.updates == 5
        models.append(model)
    for ours, theirs in zip(models[1], models[0]):
        if isinstance(ours, SparseLinear):
            a, b = (snack.formats.to_dense(m.pattern, m.values.detach()).cpu() for m in (ours, theirs))
            assert float(((a != 0) != (b != 0)).float().mean()) < 1e-3  # a near tie may fall the other way
            torch.testing.assert_close(a[(a != 0) & (b != 0)], b[(a != 0) & (b != 0)], rtol=1e-2, atol=1e-3)


def test_deterministic_training_repeats_bit_for_bit():
    torch.use_deterministic_algorithms(True)
    try:
        states = []
        for _ in range(2):
            model = build()
            optimizer = torch.optim.Adam(model.parameters())
            stepper = snack.SET(model, optimizer, every=2)
            for x in batches(8):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                stepper.step()
            states.append(model.state_dict())
        assert same(*states)
    finally:
        torch.use_deterministic_algorithms(False)


# ---- graphs ----


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), 32),
        (lambda p: torch.optim.Adam(p, 1e-3, capturable=True), 32),
        (lambda p: torch.optim.AdamW(p, 1e-3, capturable=True, fused=True), 32),
        (lambda p: torch.optim.AdamW(p, 1e-3, capturable=True, foreach=True), 32),
        (lambda p: snack.optim.SGD(p, 0.05, momentum=0.9, fused_grad=True), 4),
        (lambda p: snack.optim.AdamW(p, 1e-3, capturable=True, fused_grad=True), 4),
    ],
    ids=["sgd", "adam", "adamw-fused", "adamw-foreach", "sgd-fused-grad", "adamw-fused-grad"],
)
def test_a_captured_training_step(make, rows):
    """Values change in every replay and the topology between replays; an eager twin goes the same way."""
    model, twin = build(), build()
    optimizer, twin_optimizer = make(model.parameters()), make(twin.parameters())
    x = torch.zeros(rows, 200, device=DEVICE)

    def step(model, optimizer, x):
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    warm_up, *stream_of_batches = batches(13, rows=rows)
    x.copy_(warm_up)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(model, optimizer, x)
    torch.cuda.current_stream().wait_stream(side)
    for _ in range(3):
        step(twin, twin_optimizer, warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, optimizer, x)
    for update, batch in enumerate(stream_of_batches):
        x.copy_(batch)
        graph.replay()
        expected = step(twin, twin_optimizer, batch)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
        if update % 3 == 0:
            drop = ops.select_smallest(twin[0].values, 200)
            grow = ops.grow_uniform(twin[0].pattern, 200, update, drop)
            for layer, owner in ((model[0], optimizer), (twin[0], twin_optimizer)):
                layer.rewire(drop, grow, optimizer=owner)
    assert model[0].pattern.equals(twin[0].pattern)
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


# ---- compilers ----


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode):
    """One graph, the eager numbers, no recompilation and no stale addresses after edits."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build()
    fast = torch.compile(model, fullgraph=True, mode=mode)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for update, x in enumerate(batches(8)):
            torch.compiler.cudagraph_mark_step_begin()
            model.zero_grad(set_to_none=True)
            y = fast(x)
            y.square().sum().backward()
            compiled = [y.detach().clone(), *(p.grad.clone() for p in model.parameters())]
            model.zero_grad(set_to_none=True)
            z = model(x)
            z.square().sum().backward()
            for ours, theirs in zip(compiled, [z, *(p.grad for p in model.parameters())]):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.01)
            edit(model[0], update)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    torch._dynamo.reset()


@pytest.mark.slow
def test_compile_under_autocast():
    torch._dynamo.reset()
    model, (x,) = build(), batches(1)
    fast = torch.compile(model, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        y, z = fast(x), model(x)
    assert y.dtype == z.dtype == torch.bfloat16
    torch.testing.assert_close(y, z, rtol=2e-2, atol=2e-2)
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    torch._dynamo.reset()


# ---- mixed precision ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_with_a_scaler(dtype):
    """Master weights in float32, a skipped step, and it learns."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    stepper = snack.RigL(model, optimizer, every=5, t_end=60)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=1000)
    (x,), target = batches(1), torch.randn(32, 10, device=DEVICE)
    losses = []
    for iteration in range(60):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            y = model(x)
            assert y.dtype == dtype
            loss = nn.functional.mse_loss(y.float(), target)
        scaler.scale(loss * (float("inf") if iteration == 7 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        stepper.step()
        losses.append(loss.item())
    assert stepper.steps == 59 and stepper.updates > 5
    assert losses[-1] < 0.5 * losses[0] and all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in model.parameters())


# ---- moves and files ----


def test_there_and_back_with_optimiser_state():
    """Trained on the CPU, on the card, and on the CPU again: state and topology travel along, as on the CPU alone."""
    model, twin = build(device="cpu"), build(device="cpu")
    optimizer, twin_optimizer = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (model, twin))

    def train(model, optimizer, numbers, device):
        for number in numbers:
            x = batches(6, device)[number]
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    for device, numbers in (("cpu", (0, 1)), (DEVICE, (2, 3)), ("cpu", (4, 5))):
        objects = list(model.parameters())
        model.to(device)
        optimizer.load_state_dict(optimizer.state_dict())  # moves the state to where the parameters are
        assert all(a is b for a, b in zip(objects, model.parameters()))
        assert model[0].index.device.type == model[0].tile_ptr.device.type == torch.device(device).type
        train(model, optimizer, numbers, device)
        train(twin, twin_optimizer, numbers, "cpu")
        drop = torch.arange(0, 900, 3)
        grow = ops.grow_uniform(twin[0].pattern, 300, numbers[0], drop)
        model[0].rewire(drop, grow, optimizer=optimizer)
        twin[0].rewire(drop, grow, optimizer=twin_optimizer)
        assert model[0].pattern.equals(twin[0].pattern)
        moments = [o.state[m[0].values]["exp_avg"].cpu() for m, o in ((model, optimizer), (twin, twin_optimizer))]
        torch.testing.assert_close(*moments, rtol=1e-3, atol=1e-6)
    for ours, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_state_left_on_the_cpu_is_carried_too():
    model = build(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(batches(1, "cpu")[0]).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model[0].values]["momentum_buffer"]
    model.to(DEVICE)
    slots = model[0].rewire([0, 1], ops.grow_uniform(model[0].pattern, 2, 1), optimizer=optimizer)
    assert momentum.device.type == "cpu" and not bool(momentum[slots.grown.cpu()].any()) and slots.source.device == DEVICE


def test_copies_and_conversions():
    layer = build()[0]
    twin = copy.deepcopy(layer)
    assert twin.index.device == twin.values.device == DEVICE and twin.index.data_ptr() != layer.index.data_ptr()
    assert same(layer.state_dict(), twin.state_dict())
    rows, cols, values = layer.to_coo()
    assert {t.device for t in (rows, cols, values, *layer.pattern.coordinates())} == {DEVICE}
    again = SparseLinear.from_coo(rows, cols, values, (300, 200), layer.bias)
    assert again.values.device == again.index.device == DEVICE and same(layer.state_dict(), again.state_dict())
    pattern = snack.Pattern(rows, cols, (300, 200))
    assert pattern.device == DEVICE and pattern.equals(layer.pattern) and pattern.to("cpu").equals(layer.pattern)
    dense = layer.to_dense().weight.detach()
    assert torch.equal(layer.to_torch_csr().to_dense(), dense) and torch.equal(snack.formats.to_torch_coo(pattern, values).to_dense(), dense)
    assert (snack.formats.from_torch_sparse(dense.to_sparse())[0]).equals(pattern)
    row = snack.summary(layer, torch.optim.SGD(layer.parameters(), 0.1)).layers[0]
    assert row.nnz == layer.nnz and row.index_bytes == layer.pattern.nbytes and row.dead_rows == 300 - rows.unique().numel()
    groups = snack.param_groups(layer, 0.1)
    assert groups[0]["params"][0] is layer.values
    torch.optim.AdamW(groups, fused=True)


def test_state_dicts_and_files(tmp_path):
    a, b = build(), build()
    edit(a[0], 1)
    addresses = [t.data_ptr() for t in (b[0].values, b[0].index, b[0].tile_ptr)]
    b.load_state_dict(a.state_dict())
    assert same(a.state_dict(), b.state_dict()) and [t.data_ptr() for t in (b[0].values, b[0].index, b[0].tile_ptr)] == addresses
    torch.save(a.state_dict(), tmp_path / "a.pt")
    c = build(device="cpu")
    c.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True, map_location="cpu"))
    assert same(on_cpu(a.state_dict()), c.state_dict())
    snack.save(a, tmp_path / "a.safetensors")
    for device in ("cpu", DEVICE):
        d = build(device=device)
        assert same(on_cpu(snack.load(tmp_path / "a.safetensors", d).state_dict()), on_cpu(a.state_dict()))
        assert d[0].values.device.type == d[0].index.device.type == torch.device(device).type
    e = SparseLinear(200, 300, sparsity=0.5, device="meta")
    e.load_state_dict(a[0].state_dict())
    assert e.index.device == e.values.device == DEVICE and e.pattern.equals(a[0].pattern)
    assert SparseLinear(200, 300, sparsity=0.8, device="meta").to_empty(device=DEVICE).index.device == DEVICE


def test_train_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 600)
    np.savez("blobs.npz", x=(generator.normal(size=(600, 20)) + 3 * np.eye(3, 20)[y]).astype(np.float32), y=y)
    arguments = ["train", "--data", "blobs.npz", "--hidden", "64,32", "--epochs", "6", "--method", "rigl", "--no-figure"]
    for device in ("cpu", "cuda"):
        assert main([*arguments, "--device", device, "--json", f"{device}.json", "--save", f"{device}.safetensors"]) == 0
    from snack.bench import records

    accuracies = {d: [r["accuracy"] for r in records.read(f"{d}.json")["records"]] for d in ("cpu", "cuda")}
    assert len(accuracies["cuda"]) == 3 and all(abs(a - b) < 0.05 for a, b in zip(*accuracies.values()))
    assert records.read("cuda.json")["records"][0]["device"] == "cuda"
