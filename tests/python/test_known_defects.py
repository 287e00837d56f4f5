"""Defects that other libraries of sparse training have, or had: each has a test here or elsewhere that would show it in SNACK.

What                                                                       | test
-------------------------------------------------------------------------- | -----
**Invariants of dynamic sparse training**                                  |
nnz is constant over 1,000 updates                                         | test_dst::test_a_thousand_updates_keep_nnz
growth chooses no live connection; none is doubled or lost                 | test_fuzz_edits::test_random_edits
optimiser state follows its weight                                         | test_optimizer_state::test_survivors_go_on_as_if_nothing_had_happened
state tagged with coordinates stays with them in SET and RigL              | test_dst::test_state_follows_its_connection
grown connections get the policy's state                                   | test_optimizer_state::test_state_policies
explicit zeros survive saving and loading                                  | test_persistence::test_explicit_zeros_survive
a connection grown at 0 is no absent one                                   | test_a_connection_grown_at_zero_is_a_connection
ties are broken alike everywhere                                           | test_dst::test_ties_go_to_the_lower_slot
more to drop than empty positions                                          | test_dst_methods::test_more_than_there_is_room_for_moves_what_has_room
nothing to drop                                                            | test_nothing_to_drop_changes_nothing
rows and columns without connections                                       | test_empty_rows_and_columns_train_and_are_grown_into
full and empty layers                                                      | test_dst::test_layers_that_cannot_move
one row, one column                                                        | test_fuzz_edits::test_random_edits
a batch without samples                                                    | test_a_batch_without_samples
three dimensions, strides                                                  | test_products::test_leading_dimensions_of_a_strided_view
RigL's gradients of inputs in three dimensions, transposed                 | test_dst_gradient::test_grows_where_the_dense_gradient_is_largest
an input without gradient                                                  | test_sparse_linear::test_no_gradient_for_what_needs_none
frozen values                                                              | test_dst::test_layer_numbers_count_frozen_layers
the gradient of a gradient                                                 | test_the_gradient_of_a_gradient
two streams at once                                                        | test_cuda::test_two_streams_at_once
a move between CPU and card keeps optimiser state                          | test_cuda_training::test_there_and_back_with_optimiser_state
bfloat16 against float32                                                   | test_products::test_equals_reference
RigL's choice is the dense top-k, ties too                                 | test_edits::test_grow_gradient_is_the_dense_top_k
a step that GradScaler skips                                               | test_dst::test_a_step_that_grad_scaler_skips_does_not_count
gradients accumulated over micro-batches                                   | test_dst_gradient::test_grows_where_the_dense_gradient_is_largest
copies                                                                     | test_sparse_linear::test_copies
torch.load with weights_only                                               | test_persistence::test_torch_save_weights_only
safetensors                                                                | test_persistence::test_save_and_load
scipy matrices, unsorted and with duplicates                               | test_formats::test_scipy_unsorted_duplicates_and_explicit_zeros
layers pruned by torch.nn.utils.prune                                      | test_sparsify_obstacles::test_torch_prune
zeros of SparseGPT                                                         | test_io::test_zeros_are_connections_until_they_are_not
a resumed run equals the uninterrupted one bit for bit                     | test_resume::test_stopped_and_resumed_equals_uninterrupted
processes compare their topologies by a hash                               | test_distributed::test_hash_tells_topologies_apart
compiled code survives edits                                               | test_compiled::test_two_variants_and_the_edits_of_eager_training
**Issue threads**                                                          |
pytorch#41128: backward of a sparse product makes a dense gradient         | test_hypersparse::test_under_a_4_gb_address_limit
pytorch#86963: no derivative with respect to the values                    | test_products::test_derivatives
pytorch#144040: backward fails under autocast                              | test_sparse_linear::test_autocast
pytorch#136186: no products of 16-bit numbers                              | test_products::test_equals_reference
pytorch#130687, #171865, #180839, #169119: compilers refuse sparse tensors | test_sparse_linear::test_compile
pytorch#79542, #32444, #22670: data-parallel training of sparse parameters | test_distributed::test_pytorch_79542_data_parallel_of_a_sparse_layer
pytorch#29814, #84537: optimisers refuse sparse parameters                 | test_sparse_linear::test_every_stock_optimiser
pytorch#22616, #16667, #101186: a state dict that cannot be loaded         | test_io_files::test_pytorch_22616_round_trip
pytorch#37322: pruned modules cannot be copied or sent to a process        | test_a_layer_in_another_process
pytorch#36214, #43552, #32928: pruning saves no memory                     | test_what_is_saved_shrinks_with_the_connections
pytorch#65293: masks multiplied into themselves until nothing is left      | test_dst::test_a_thousand_updates_keep_nnz
rigl#12: random pruning of a trained network ruins it                      | test_prune::test_rigl_12_a_trained_network_is_pruned_by_magnitude
rigl#15: training a mask of one's own                                      | test_io::test_rigl_15_a_users_mask
sparse_learning#22: density drifts, as growth picks live connections       | test_redistribution_never_drifts
sparse_learning#20: Erdos-Renyi misses the overall density                 | test_sparsify::test_budget_is_exact
sparseml#429: processes with different seeds have different masks          | test_distributed::test_sparseml_429_ranks_with_different_seeds
sparseml#1807: a model moved or wrapped after the stepper was made         | test_a_model_moved_and_wrapped_after_the_stepper_was_made
sparseml#145, sparsegpt#17, distiller#76, apex#1474: zeros of a file lost  | test_io::test_sparsegpt_17_training_goes_on_from_a_sparse_checkpoint
pytorch_block_sparse#14: backward of a one-layer model fails               | test_a_model_of_one_layer
pytorch_block_sparse#15: no less memory at 1024 x 256, batch 3             | test_a_model_of_one_layer
triton#419, flash-attention#2623: backward is silently wrong               | test_products::test_equals_reference
sten#1: gradients of a wrong shape                                         | test_gradients_have_the_shapes_of_what_they_belong_to
nupic.research#489: RigL learns nothing under AdamW with one-cycle rates   | test_rigl_learns_with_adamw_and_one_cycle
condensed-sparsity#76: MLP-Mixer                                           | test_prune::test_condensed_sparsity_76_mlp_mixer
condensed-sparsity#78: a fan-in of one's own                               | test_io::test_condensed_sparsity_78_a_given_fan_in
condensed-sparsity#76, #78: ablation of the last layer's neurons           | test_dst_scope::test_a_row_may_lose_everything_and_gets_as_many_anew
ao#1425: a stepper called once an epoch never changes the mask             | test_stepping_once_an_epoch_moves_connections
sparselab#5: momentum for sparse layers                                    | test_optimizer_state::test_survivors_go_on_as_if_nothing_had_happened
mttl#108: activations hide what weights need                               | test_summary::test_gradients_and_optimiser_state_are_what_exists
**Defects found in sources**                                               |
regrown weights resume a stale value and stale moments                     | test_a_regrown_connection_starts_anew
a replaced optimizer.step takes no closure                                 | test_closures_and_learning_rate_schedulers
no end of updates: a crash                                                 | test_dst_errors::test_cosine_needs_an_end
LayerNorm and Embedding are sparsified                                     | test_only_linear_layers_become_sparse
processes average the magnitudes of gradients                              | test_distributed::test_equals_one_process_with_the_whole_batch
weights dropped at 0 are taken for absent                                  | test_a_connection_grown_at_zero_is_a_connection
the last layer never evolves                                               | test_every_layer_evolves
"""

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import multiprocessing, nn
from torch.nn import functional as F

import snack
from snack import dst
from snack.nn import SparseLinear


@pytest.fixture(autouse=True)
def one_thread():
    """These layers are tiny: threads would only wait for each other."""
    torch.set_num_threads(1)  # conftest puts it back


def build(*sizes, sparsity=0.8, dtype=torch.float32):
    torch.manual_seed(0)
    layers = []
    for in_features, out_features in zip(sizes, sizes[1:]):
        layers += [SparseLinear(in_features, out_features, sparsity=sparsity, dtype=dtype), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def sparse_layers(model):
    return [m for m in model.modules() if isinstance(m, SparseLinear)]


def connected(layer):
    return set(zip(layer.pattern.rows.tolist(), layer.pattern.cols.tolist()))


def take_step(model, optimizer, stepper=None, batch=8):
    first = sparse_layers(model)[0]
    optimizer.zero_grad()
    model(torch.randn(batch, first.in_features, dtype=first.values.dtype)).square().mean().backward()
    optimizer.step()
    return None if stepper is None else stepper.step()


# ---- the table ----


def test_every_test_of_the_table_exists():
    here = Path(__file__)
    rows = [line.split("|") for line in __doc__.splitlines() if "|" in line]
    named = [row[1].strip() for row in rows[2:] if row[1].strip()]
    assert len(named) > 50
    functions = {}
    for name in named:
        file, _, function = name.rpartition("::")
        file = file or here.stem
        if file not in functions:
            tree = ast.parse((here.parent / f"{file}.py").read_text())
            functions[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function in functions[file], f"{name} does not exist"
    in_this_file = set(re.findall(r"^def (test_\w+)", here.read_text(), re.MULTILINE)) - {"test_every_test_of_the_table_exists"}
    assert in_this_file == {name for name in named if "::" not in name}


# ---- invariants ----


def test_a_connection_grown_at_zero_is_a_connection():
    """It counts in nnz, gets a gradient, and learns; nobody takes it for absent because its value is 0."""
    model = build(20, 10)
    layer = model[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer.rewire([0, 1, 2], grown := snack.ops.grow_uniform(layer.pattern, 3, 5), None, optimizer)
    at = {(int(r), int(c)) for r, c in zip(*grown)}
    assert at <= connected(layer) and layer.nnz == 40 and int((layer.values == 0).sum()) == 3
    take_step(model, optimizer)
    assert int((layer.values.grad != 0).sum()) == 40 and int((layer.values == 0).sum()) == 0
    assert snack.summary(model).total("nnz") == 40


@pytest.mark.parametrize("kind", [dst.SET, dst.RigL, dst.SNFS, dst.MEST, dst.SRigL])
def test_nothing_to_drop_changes_nothing(kind):
    """A fraction of 0, and one so small that it is less than a connection."""
    for fraction in (0.0, 0.02):
        model = build(20, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        stepper = kind(model, optimizer, every=1, t_end=100, drop_fraction=dst.Constant(fraction))
        before = connected(model[0])
        record = take_step(model, optimizer, stepper)
        assert record.dropped == record.grown == 0 and connected(model[0]) == before and stepper.updates == 1


@pytest.mark.parametrize("kind", [dst.SET, dst.RigL, dst.SNFS, dst.MEST])
def test_empty_rows_and_columns_train_and_are_grown_into(kind):
    rows, cols = [0, 0, 4, 4, 4], [0, 6, 0, 6, 9]  # rows 1, 2, 3, 5 and most columns hold nothing
    layer = SparseLinear.from_coo(rows, cols, torch.tensor([1.0, -2, 3, -4, 0.1]), (6, 12), torch.zeros(6))
    y = layer(torch.randn(3, 12))
    assert bool((y[:, [1, 2, 3, 5]] == 0).all())
    model = nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepper = kind(model, optimizer, every=1, t_end=100, drop_fraction=dst.Constant(0.5))
    for _ in range(10):
        take_step(model, optimizer, stepper)
    assert layer.nnz == 5 and connected(layer) - set(zip(rows, cols))
    assert torch.isfinite(layer.values).all() and layer.pattern.rows.unique().numel() > 1


@pytest.mark.parametrize("kind", [dst.SET, dst.RigL, dst.SNFS, dst.SRigL])
def test_a_batch_without_samples(kind):
    """Its gradient is 0 everywhere: all positions tie, and the update goes on by the rule for ties."""
    model = build(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepper = kind(model, optimizer, every=1, t_end=100)
    optimizer.zero_grad()
    model(torch.empty(0, 20)).sum().backward()
    optimizer.step()
    assert stepper.step().dropped > 0 and model[0].nnz == 40 and torch.isfinite(model[0].values).all()


def test_the_gradient_of_a_gradient():
    """Products are differentiable twice; a penalty on the gradient is that of a masked dense layer."""
    layer = SparseLinear(6, 5, sparsity=0.5, dtype=torch.float64)
    dense, mask = layer.to_dense(), torch.zeros(5, 6, dtype=torch.float64)
    mask[layer.pattern.rows.long(), layer.pattern.cols.long()] = 1
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def penalty(y, of):
        (gradient,) = torch.autograd.grad(y.tanh().square().sum(), of, create_graph=True)
        return gradient.square().sum()

    penalty(layer(x), x).backward()
    ours, x.grad = x.grad.clone(), None
    penalty(F.linear(x, dense.weight * mask, dense.bias), x).backward()
    torch.testing.assert_close(ours, x.grad)
    torch.testing.assert_close(layer.values.grad, dense.weight.grad[layer.pattern.rows.long(), layer.pattern.cols.long()])
    assert torch.autograd.gradgradcheck(lambda v, z: snack.ops.spmm(layer.pattern, v, z), (layer.values, x))


# ---- issue threads ----


def _train_shared(model):
    torch.set_num_threads(1)
    model[0].values.data.add_(1.0)


def test_a_layer_in_another_process():
    """Shared memory: what the other process writes into the values arrives here."""
    model = build(20, 10).share_memory()
    before = model[0].values.detach().clone()
    process = multiprocessing.get_context("fork").Process(target=_train_shared, args=(model,))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and torch.equal(model[0].values, before + 1)


def test_what_is_saved_shrinks_with_the_connections():
    """A state dict has 12 bytes a connection (value and coordinates), a layer in memory 6 and a little for each tile."""
    dense = nn.Linear(1024, 1024)
    layer = SparseLinear.from_dense(dense, sparsity=0.95)
    nnz = round(0.05 * 1024**2)
    assert sum(t.nbytes for t in layer.state_dict().values()) <= 12 * nnz + 4 * 1024 + 100
    held = sum(t.nbytes for t in (*layer.parameters(), *layer.buffers()))
    assert held <= 6.1 * nnz + 4 * 1024 < 0.09 * dense.weight.nbytes


@pytest.mark.parametrize(("kind", "options"), [(dst.SNFS, {}), (dst.DST, {"drop": "magnitude", "grow": "gradient", "scope": "global"})])
def test_redistribution_never_drifts(kind, options):
    """As many grow as were dropped, at positions without a connection, for 100 updates; the overall density stays what it was."""
    model = build(30, 40, 20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    stepper = kind(model, optimizer, every=1, t_end=1000, **options)
    total = sum(layer.nnz for layer in sparse_layers(model))
    for _ in range(100):
        record = take_step(model, optimizer, stepper)
        assert record.grown == record.dropped > 0
        assert [len(connected(layer)) for layer in sparse_layers(model)] == list(record.nnz.values())
        assert sum(record.nnz.values()) == total
    assert len(set(map(str, (u.nnz for u in stepper.history)))) > 1  # connections went from layer to layer


@pytest.mark.parametrize("kind", [dst.SET, dst.RigL, dst.SNFS])
def test_a_model_moved_and_wrapped_after_the_stepper_was_made(kind):
    model = build(20, 16, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    stepper = kind(model, optimizer, every=1, t_end=100)
    model.double().to("cpu")
    wrapped = nn.ModuleDict({"inner": nn.Sequential(model)})
    before = [connected(layer) for layer in sparse_layers(model)]
    record = take_step(wrapped["inner"], optimizer, stepper)
    assert record.dropped > 0 and all(connected(layer) != old for layer, old in zip(sparse_layers(wrapped), before))
    assert take_step(model, optimizer, stepper).dropped > 0


def test_a_model_of_one_layer():
    layer = SparseLinear(256, 1024, sparsity=0.9)
    layer(torch.randn(3, 256)).sum().backward()
    assert torch.isfinite(layer.values.grad).all() and layer.bias.grad.shape == (1024,)
    dense = nn.Linear(256, 1024)
    held = sum(t.nbytes for t in (*layer.parameters(), *layer.buffers(), layer.values.grad, layer.bias.grad))
    assert held < 0.15 * 2 * sum(p.nbytes for p in dense.parameters())


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (7, 2100), (130, 5)])
@pytest.mark.parametrize("leading", [(), (3,), (2, 0), (2, 3)])
def test_gradients_have_the_shapes_of_what_they_belong_to(shape, leading):
    layer = SparseLinear(shape[1], shape[0], sparsity=0.3)
    x = torch.randn(*leading, shape[1], requires_grad=True)
    layer(x).square().sum().backward()
    for tensor in (x, layer.values, layer.bias):
        assert tensor.grad.shape == tensor.shape and tensor.grad.dtype == tensor.dtype


def test_rigl_learns_with_adamw_and_one_cycle():
    """A problem of ten relevant inputs among 200: RigL finds them, and ends below the static network it began as."""

    def final_loss(kind):
        torch.manual_seed(0)
        x = torch.randn(400, 200)
        y = x[:, :10].sum(1, keepdim=True).tanh()
        model = nn.Sequential(SparseLinear(200, 32, sparsity=0.97), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=300)
        stepper = kind(model, optimizer, every=10, t_end=225)
        for step in range(300):
            rows = torch.arange(64) + step * 64 % 336
            optimizer.zero_grad()
            F.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
            rates.step()
            stepper.step()
        assert stepper.steps == 300
        with torch.no_grad():
            return float(F.mse_loss(model(x), y))

    assert final_loss(dst.RigL) < 0.5 * final_loss(dst.Static)


@pytest.mark.parametrize("kind", [dst.SET, dst.RigL])
def test_stepping_once_an_epoch_moves_connections(kind):
    """`step()` makes the update that became due last, so a loop that calls it once an epoch has one update an epoch."""
    model = build(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stepper = kind(model, optimizer, every=10, t_end=1000)
    for _ in range(4):
        before = connected(model[0])
        for _ in range(25):
            take_step(model, optimizer)
        record = stepper.step()
        assert record.dropped > 0 and connected(model[0]) != before
    assert stepper.updates == 4 and stepper.steps == 100


# ---- defects found in sources ----


def test_a_regrown_connection_starts_anew():
    """Dropped with a value and moments, grown again at the same place later: it begins at grow_init, and its moments at 0."""
    layer = SparseLinear.from_coo([0, 0, 1], [0, 1, 2], torch.tensor([5.0, 6.0, 7.0]), (2, 3))
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    for _ in range(3):
        take_step(nn.Sequential(layer), optimizer)
    state = optimizer.state[layer.values]
    layer.rewire([0], ([1], [0]), 1.0, optimizer)
    take_step(nn.Sequential(layer), optimizer)
    assert bool((state["exp_avg"] != 0).all())
    layer.rewire([1], ([0], [0]), 0.25, optimizer)  # (1, 0) goes or (0, 1), whichever has slot 1; (0, 0) comes back
    rows, cols = layer.pattern.coordinates()
    slot = int(((rows == 0) & (cols == 0)).nonzero())
    assert layer.values[slot] == 0.25 and state["exp_avg"][slot] == 0 and state["exp_avg_sq"][slot] == 0 and layer.values.grad[slot] == 0


@pytest.mark.parametrize("kind", [dst.SET, dst.RigL])
def test_closures_and_learning_rate_schedulers(kind):
    model = build(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    stepper = kind(model, optimizer, every=5, t_end=100)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(8, 20)).square().mean()
        loss.backward()
        return loss

    for _ in range(20):
        assert optimizer.step(closure) > 0
        rates.step()
        stepper.step()
    assert stepper.steps == 20 and [u.step for u in stepper.history] == [5, 10, 15, 20] and rates.get_last_lr()[0] < 0.01


def test_only_linear_layers_become_sparse():
    model = nn.Sequential(nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Conv1d(8, 8, 1), nn.PReLU())
    snack.sparsify(model, 0.5)
    assert [type(m).__name__ for m in model] == ["Embedding", "LayerNorm", "SparseLinear", "BatchNorm1d", "Conv1d", "PReLU"]


@pytest.mark.parametrize("kind", [dst.SET, dst.RigL, dst.SNFS, dst.MEST, dst.SRigL, dst.ITOP])
def test_every_layer_evolves(kind):
    """Of every method, the last layer too."""
    model = build(30, 20, 16, 10, sparsity=0.6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    stepper = kind(model, optimizer, every=1, t_end=1000)
    before = [connected(layer) for layer in sparse_layers(model)]
    for _ in range(5):
        take_step(model, optimizer, stepper)
    assert all(connected(layer) != old for layer, old in zip(sparse_layers(model), before))
