"""``snack train``: the masked twin keeps its promises, wrong input is a sentence and status 2, and a small run leaves table, record,
picture and model behind; also when Ctrl-C ends it."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import snack
from snack import _lib, data
from snack.bench import recipes, training, twins
from snack.cli import common
from snack.cli.main import main
from snack.errors import SnackError

# ---- the masked twin -------------------------------------------------------------------------------------------------------------------


def test_random_stream_is_splitmix64():
    """Outputs of SplitMix64 seeded with 0 (the reference implementation by Vigna)."""
    states = [(i + 1) * 0x9E3779B97F4A7C15 for i in range(3)]
    assert [twins.mix64(s) for s in states] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    positions = twins.random_positions(0, 1000)
    assert [next(positions) for _ in range(3)] == [
        0xE220A8397B1DCDAF * 1000 >> 64,
        0x6E789E6AA1B965F4 * 1000 >> 64,
        0x06C45D188009454F * 1000 >> 64,
    ]
    assert len({twins.random_key(s, l, u) for s in range(4) for l in range(4) for u in range(4)}) == 64


def test_set_drops_a_share_of_each_sign_nearest_to_zero():
    weights = torch.tensor([0.5, -0.1, 0.0, -0.9, 0.2, -0.3, 0.1, -0.2])
    assert sorted(twins.drop_set(weights, 0.5, 100).tolist()) == [1, 2, 6, 7]  # 0.0 counts as positive
    assert sorted(twins.drop_set(weights, 0.24, 100).tolist()) == []
    assert sorted(twins.drop_set(weights, 0.8, 3).tolist()) == [1, 2]  # 3 and 3 wanted, cut to 1 and 1


def test_rigl_drops_the_smallest_and_the_lower_slot_first():
    weights = torch.tensor([0.5, -0.1, 0.1, -0.9, 0.1, 0.3])
    assert sorted(twins.drop_magnitude(weights, 0.34, 100).tolist()) == [1, 2]
    assert twins.drop_magnitude(weights, 0.9, 1).tolist() == [1]


def test_growth_takes_only_empty_positions():
    grown = twins.grow_uniform(torch.tensor([0, 1, 2, 5]), 8, 4, key=7)
    assert sorted(grown.tolist()) == [3, 4, 6, 7]
    stream, expected = twins.random_positions(9, 10**6 + 3), {}
    while len(expected) < 50:
        expected[next(stream)] = None
    assert twins.grow_uniform(torch.tensor([]).long(), 10**6 + 3, 50, key=9).tolist() == list(expected)  # the stream, drawn as arrays
    gradient = torch.tensor([[9.0, 1.0, -8.0], [-7.0, 0.0, 7.0]])
    assert twins.grow_gradient(gradient, torch.tensor([0]), 3).tolist() == [2, 3, 5]
    wide = torch.zeros(2, 2048)
    wide[0, 1500] = wide[1, 3] = wide[1, 1030] = 1.0  # ties: column tile first, then row, then column
    assert twins.grow_gradient(wide, torch.tensor([], dtype=torch.int64), 3).tolist() == [2048 + 3, 1500, 2048 + 1030]


@pytest.mark.parametrize(
    "optimizer", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=1e-3), lambda p: torch.optim.Adam(p, 0.01)]
)
@pytest.mark.parametrize("method", twins.METHODS)
def test_twin_keeps_its_number_of_connections_and_nothing_outside_them(method, optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4))
    mask = torch.rand(30, 20) < 0.2
    twin = twins.MaskedTwin(model, {"0": mask}, method, seed=3, every=2, drop_fraction=0.4, t_end=30, sparsity=0.9)
    opt = optimizer(twin.parameters())
    layer, before, x, y = twin.layers["0"], mask.clone(), torch.randn(16, 20), torch.randint(4, (16,))
    changes = 0
    for _ in range(40):
        opt.zero_grad()
        nn.functional.cross_entropy(twin(x), y).backward()
        opt.step()
        changes += twin.step(opt)
        outside = layer.mask == 0
        assert layer.nnz == int(mask.sum()) or method == "gmp"
        for tensor in [layer.weight, *(t for t in opt.state[layer.weight].values() if t.shape == layer.weight.shape)]:
            assert (tensor[outside] == 0).all()
    assert changes == twin.updates == {"static": 0, "gmp": 15}.get(method, 14)
    assert layer.nnz == (60 if method == "gmp" else int(mask.sum()))
    assert torch.equal(layer.mask.bool(), before) == (method == "static")


def test_twin_without_edits_is_the_dense_network_on_the_mask():
    torch.manual_seed(0)
    linear, mask, x = nn.Linear(5, 3), torch.rand(3, 5) < 0.5, torch.randn(4, 5)
    expected = x @ (linear.weight.detach() * mask).T + linear.bias.detach()
    torch.testing.assert_close(twins.MaskedLinear(linear, mask)(x), expected)


def test_twin_refuses():
    with pytest.raises(SnackError, match="unknown method 'srigl'"):
        twins.MaskedTwin(nn.Sequential(nn.Linear(2, 2)), {}, "srigl")
    with pytest.raises(SnackError, match="ReLU"):
        twins.MaskedTwin(nn.Sequential(nn.ReLU()), {"0": torch.ones(2, 2)})
    with pytest.raises(SnackError, match="shape"):
        twins.MaskedTwin(nn.Sequential(nn.Linear(2, 2)), {"0": torch.ones(2, 3)})


# ---- words -----------------------------------------------------------------------------------------------------------------------------


def test_numbers_for_people():
    assert [common.human_bytes(n) for n in (0, 1023, 1024, 1234567, 200 * 2**20)] == ["0 B", "1023 B", "1.00 KiB", "1.18 MiB", "200 MiB"]
    assert [common.human_time(t) for t in (0.5, 87.31, 999.4, 999.6, 12345, 2.5e6)] == [
        "0.50 µs",
        "87.3 µs",
        "999 µs",
        "1.00 ms",
        "12.3 ms",
        "2.50 s",
    ]
    assert [common.human_ratio(r) for r in (47.1, 2.345, 0.996, 0.1, 0.0456)] == ["47×", "2.3×", "1.0×", "0.10×", "0.046×"]


def test_json_keeps_its_numbers_and_is_short(tmp_path):
    document = {
        "a": [1, -2.5, 1e-30],
        "b": [[1.0, 2], [3, 4]],
        "c": ["[ 1,\n 2 ]", 'x"y'],
        "d": [],
        "e": {"f": [{"g": [7]}]},
        "h": [True, None],
    }
    common.write_json(tmp_path / "r.json", document)
    text = (tmp_path / "r.json").read_text()
    assert json.loads(text) == document and "[1, -2.5, 1e-30]" in text
    with pytest.raises(ValueError):
        common.write_json(tmp_path / "r.json", {"a": float("nan")})
    assert json.loads((tmp_path / "r.json").read_text()) == document and len(list(tmp_path.iterdir())) == 1


# ---- wrong input: one sentence, status 2, nothing left behind --------------------------------------------------------------------------

WRONG = {
    "unknown data set": (["--data", "mnits"], ["'mnits'", "'mnist'"]),
    "no such file": (["--data", "nowhere.npz"], ["nowhere.npz", "not found"]),
    "sparsity 1": (["--sparsity", "1"], ["sparsity 1.0", "below 1"]),
    "sparsity below 0": (["--sparsity", "-0.1"], ["sparsity -0.1"]),
    "sparsity NaN": (["--sparsity", "nan"], ["sparsity nan"]),
    "sparsity in words": (["--sparsity", "high"], ["--sparsity", "'high'"]),
    "unknown method": (["--method", "gnp"], ["'gnp'", "set, set-magnitude, rigl, snfs, gmp, mest, itop, srigl, static"]),
    "unknown method among others": (["--compare", "set,gnp"], ["'gnp'", "rigl"]),
    "a method twice": (["--compare", "set,rigl,set"], ["set,rigl,set", "once"]),
    "unknown recipe": (["--recipe", "lenet"], ["lenet", "lenet-300-100, fashion-mlp, fashion-mlp-mse, cifar10-mlp"]),
    "unknown contender": (["--contenders", "dense,masked"], ["'masked'", "dense_mask"]),
    "graph on a CPU": (["--graph"], ["--graph", "--device cuda"]),
    "no epochs": (["--epochs", "0"], ["--epochs", "'0'"]),
    "no batch": (["--batch-size", "-3"], ["--batch-size"]),
    "no width": (["--hidden", "300,0"], ["--hidden", "'300,0'"]),
    "learning rate": (["--lr", "0"], ["lr 0.0"]),
    "weight decay": (["--weight-decay", "nan"], ["weight_decay nan"]),
    "drop fraction": (["--drop-fraction", "1.5"], ["drop_fraction 1.5"]),
    "seed": (["--seed", "-1"], ["seed -1"]),
    "device": (["--device", "abacus"], ["abacus", "cpu or cuda"]),
    "device without kernels": (["--device", "meta"], ["meta", "cpu and cuda"]),
    "unknown option": (["--sparsty", "0.9"], ["--sparsty"]),
    "json path": (["--json", "no/such/folder/r.json"], ["--json", "no/such/folder"]),
    "save path": (["--save", "no/such/folder/m.safetensors"], ["--save"]),
    "save suffix": (["--save", "model.zip"], ["--save", "model.zip", ".safetensors"]),
    "figure path": (["--figure", "no/such/folder/f.png"], ["--figure"]),
    "figure suffix": (["--figure", "f.docx"], ["f.docx", "png"]),
    "figure is a folder": (["--figure", "."], ["figure ."]),
    "one file for two": (["--figure", "a.png", "--json", "a.png"], ["--json and --figure", "different"]),
}


@pytest.fixture(autouse=True)
def own_folder_and_one_thread(tmp_path, monkeypatch):
    """One thread: these networks are small, and threads that wait for each other on a busy machine take most of the time."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case, capsys, tmp_path):
    arguments, words = WRONG[case]
    assert main(["train", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("snack: ") and err.count("\n") == 1 and "Traceback" not in err
    for word in words:
        assert word in err
    assert list(tmp_path.iterdir()) == []


def test_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["train", "--device", "cuda"]) == 2
    assert "--device cuda" in capsys.readouterr().err


def test_gpu_without_kernels(capsys, monkeypatch):
    monkeypatch.setattr(_lib, "CUDA_PATH", None)
    monkeypatch.setattr(_lib, "_cuda_missing", "this build has no kernels for cards")
    assert main(["train", "--device", "cuda"]) == 2
    assert "--device cuda: this build has no kernels for cards" in capsys.readouterr().err


def test_unwritable_file_is_left_as_it_was(tmp_path, capsys):
    (tmp_path / "r.json").write_text("mine")
    assert main(["train", "--json", "r.json", "--save", "no/where.safetensors"]) == 2
    assert (tmp_path / "r.json").read_text() == "mine" and [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_unknown_command_version_and_help(capsys):
    assert main(["trian"]) == 2
    assert "'trian'" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"snack {snack.__version__}\n"
    assert main(["train", "--help"]) == 0
    assert "--sparsity" in capsys.readouterr().out
    assert main([]) == 0


# ---- a small run -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def blobs(tmp_path):
    """Three well separated classes of 4×4 images, 240 rows."""
    rng = np.random.default_rng(0)
    y = np.arange(240) % 3
    x = rng.normal(0, 1, (240, 4, 4)) + 3 * rng.normal(0, 1, (3, 4, 4))[y]
    np.savez(tmp_path / "blobs.npz", x=x, y=y)
    return ["train", "--data", "blobs.npz", "--hidden", "40,20", "--batch-size", "32", "--lr", "0.05", "--sparsity", "0.8", "--every", "5"]


@pytest.mark.parametrize("method", ["set", "rigl", "static"])
def test_run_leaves_table_record_picture_and_model(blobs, method, capsys, tmp_path):
    assert (
        main(
            [
                *blobs,
                "--epochs",
                "6",
                "--method",
                method,
                "--seeds",
                "2",
                "--json",
                "r.json",
                "--figure",
                "f.png",
                "--save",
                "m.safetensors",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    for word in ("test accuracy", "dense + mask", "optimiser state", "time a training step", "inference, one sample", "f.png"):
        assert word in out
    assert (tmp_path / "f.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    document = json.loads((tmp_path / "r.json").read_text())
    assert (
        document["schema"] == 1
        and document["suite"] == "train-blobs"
        and document["provenance"]["command"].startswith("snack train --data blobs.npz")
    )
    assert document["provenance"]["torch"] == torch.__version__
    assert [(r["seed"], r["contender"]) for r in document["records"]] == [(s, c) for s in (0, 1) for c in training.CONTENDERS]
    nnz = round(0.2 * (16 * 40 + 40 * 20)) + 20 * 3
    biases = 40 + 20 + 3
    for r in document["records"]:
        assert r["accuracy"] >= 0.9 and r["steps"] == 36 and len(r["accuracy_curve"]) == 6 and not r["interrupted"]
        assert r["nnz"] == (16 * 40 + 40 * 20 + 20 * 3 if r["contender"] == "dense" else nnz)
        assert r["updates"] == (0 if r["contender"] == "dense" or method == "static" else 5)  # at 5, 10, … 25 of 36 steps, t_end 27
        stored = r["params"] * 4
        assert r["bytes"]["weights"] == r["bytes"]["gradients"] == r["bytes"]["optimizer"] == stored
        assert r["params"] == (nnz + biases if r["contender"] == "snack" else 16 * 40 + 40 * 20 + 20 * 3 + biases)
        assert r["step_time_us"] > 0 and r["infer_time_us"] > 0
    first = document["records"][2]
    assert sum(first["connectivity"]["before"]) == sum(first["connectivity"]["after"])
    assert (first["connectivity"]["before"] == first["connectivity"]["after"]) == (method == "static")
    dataset = data.load("blobs.npz")
    like = training.build(training.Config(hidden=(40, 20), sparsity=0.9, batch_size=32, epochs=1, seed=5), dataset)[2].model
    model = snack.load(tmp_path / "m.safetensors", like)
    assert training.evaluate(model, dataset.x_test, dataset.y_test) == first["accuracy"]


def test_the_three_start_from_the_same_numbers(tmp_path, blobs):
    dataset = data.load("blobs.npz")
    config = training.Config(hidden=(40, 20), sparsity=0.8, batch_size=32, epochs=2)
    dense, masked, sparse = training.build(config, dataset)
    x = torch.randn(7, 16)
    torch.testing.assert_close(masked.model(x), sparse.model(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(dense.model[-1].weight, sparse.model[-1].weight)
    again = training.build(config, dataset)[2]
    assert all(torch.equal(a, b) for a, b in zip(sparse.model.state_dict().values(), again.model.state_dict().values()))
    other = training.build(training.Config(hidden=(40, 20), sparsity=0.8, batch_size=32, epochs=2, seed=1), dataset)[2]
    assert not torch.equal(other.model.state_dict()["0.cols"], sparse.model.state_dict()["0.cols"])


@pytest.mark.parametrize(
    ("method", "optimizer", "values"),
    [("set", "sgd", "zero"), ("set", "adam", "zero"), ("rigl", "sgd", "zero"), ("rigl", "adam", "zero"), ("set", "sgd", "he"), ("rigl", "sgd", "he")],
)
def test_snack_and_its_masked_twin_go_the_same_way(blobs, method, optimizer, values):
    """The same topology after every update, and the same accuracy: the twin shares no code with the rules it checks."""
    dataset = data.load("blobs.npz")
    config = training.Config(hidden=(40, 20), sparsity=0.8, method=method, every=3, batch_size=32, epochs=5, optimizer=optimizer, lr=0.01)
    config = replace(config, init="sparse" if values == "zero" else "he", grow_init=values)
    run = training.train(config, dataset)
    masked, sparse = run.of("dense_mask"), run.of("snack")
    assert masked.updates == sparse.updates > 5
    for name, layer in training.sparse_layers(sparse.model).items():
        mask = torch.zeros(layer.out_features, layer.in_features, dtype=torch.bool)
        mask[layer.pattern.rows.long(), layer.pattern.cols.long()] = True
        assert torch.equal(mask, masked.model.layers[name].mask.bool())
        weight = masked.model.layers[name].weight.detach()
        torch.testing.assert_close(snack.formats.to_dense(layer.pattern, layer.values.detach()), weight, atol=1e-3, rtol=1e-2)
    assert abs(masked.accuracy - sparse.accuracy) < 0.03


METHODS_WITH_TWINS = [m for m in training.METHODS if m in twins.METHODS]


@pytest.mark.parametrize("method", METHODS_WITH_TWINS)
def test_steps_from_counters_train_as_the_loop_does(blobs, method):
    """What --graph captures, run eagerly: the batches, learning rates, topologies and accuracies of the ordinary loop."""
    dataset = data.load("blobs.npz")
    config = training.Config(hidden=(40, 20), sparsity=0.8, method=method, every=4, batch_size=24, epochs=4, lr=0.05)
    assert len(dataset.x_train) % 24 == 0  # a captured step has one size
    ours, expected = (training.train(replace(config, graph=graph), dataset) for graph in (True, False))
    for a, b in zip(ours.contenders, expected.contenders):
        assert a.name == b.name and a.steps == b.steps == 32 and a.updates == b.updates
        assert [x for x, _, _ in a.curve] == [x for x, _, _ in b.curve] and len(a.step_times) > 1
        torch.testing.assert_close([y for _, y, _ in a.curve], [y for _, y, _ in b.curve], atol=0.03, rtol=0)
        torch.testing.assert_close([z for _, _, z in a.curve], [z for _, _, z in b.curve], atol=0.02, rtol=0.02)
    for name, layer in training.sparse_layers(ours.of("snack").model).items():
        same = layer.pattern.equals(training.sparse_layers(expected.of("snack").model)[name].pattern)
        assert same or method == "snfs"  # its shares are whole numbers of what rounding decides


def test_several_methods_in_one_run(blobs, tmp_path, capsys):
    assert main([*blobs, "--epochs", "3", "--compare", "static,set,rigl,gmp,srigl", "--seeds", "2", "--json", "r.json", "--figure", "f.png"]) == 0
    out = capsys.readouterr().out
    for word in ("SNACK static", "dense + mask RigL", "SNACK GMP minus its mask", "mean ± standard error of 2 seeds", "SNACK SRigL"):
        assert word in out
    assert (tmp_path / "f.png").exists()
    document = json.loads((tmp_path / "r.json").read_text())
    names = ["dense", *(f"{kind}:{m}" for m in ("static", "set", "rigl", "gmp") for kind in ("dense_mask", "snack")), "snack:srigl"]
    assert [r["contender"] for r in document["records"]] == 2 * names
    last = {r["contender"]: r for r in document["records"]}
    assert last["snack:gmp"]["nnz"] == last["dense_mask:gmp"]["nnz"] == last["snack:set"]["nnz"] and last["snack:gmp"]["method"] == "gmp"
    entry = {e["contender"]: e for e in document["summary"]}["snack:set"]
    values = [100 * r["accuracy"] for r in document["records"] if r["contender"] == "snack:set"]
    assert entry["accuracy"] == pytest.approx(sum(values) / 2) and entry["accuracy_error"] == pytest.approx(abs(values[0] - values[1]) / 2)
    assert abs(entry["minus_mask"]) < 3 and "minus_mask_error" in entry


def test_recipes_are_the_protocols_of_their_sources():
    train = {name: dict(p) for name, p in training.PROTOCOLS.items()}
    for name, protocol in train.items():
        protocol.pop("data")
        training.check(training.Config(**protocol))
        assert name == "lenet-300-100" or protocol["distribution"] == "er"
    fashion = train["fashion-mlp"]
    sizes = (784, *fashion["hidden"])
    dense = sum(a * b for a, b in zip(sizes, sizes[1:]))
    assert round((1 - fashion["sparsity"]) * dense) == 13 * (1784 + 2000 + 2000)
    lenet = training.Config(**train["lenet-300-100"])
    rates = [lenet.lr * recipes.rate_factor(lenet, step, 54_000) for step in (0, 24_999, 25_000, 53_999)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.001])
    assert training.steps_an_epoch(lenet, 54_000) * lenet.epochs == 54_000


def test_a_recipe_runs_and_what_is_said_goes_first(blobs, tmp_path):
    wanted = ["train", "--recipe", "fashion-mlp-mse", "--data", "blobs.npz", "--hidden", "40,20", "--epochs", "1", "--sparsity", "0.8"]
    assert main([*wanted, "--contenders", "snack,dense", "--json", "r.json", "--no-figure", "--quiet"]) == 0
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["suite"] == "train-fashion-mlp-mse" and [r["contender"] for r in document["records"]] == ["dense", "snack"]
    for record in document["records"]:
        assert record["loss"] == "mse" and record["batch_size"] == 40 and record["schedule"] == "constant" and record["loss_curve"][0][1] < 0.6


def test_initial_and_grown_values_within_he_bounds(blobs):
    config = training.Config(hidden=(40, 20), sparsity=0.8, batch_size=32, epochs=1, every=3, t_end=1.0, init="he", grow_init="he", lr=1e-9)
    dense, masked, sparse = training.build(config, data.load("blobs.npz"))
    layer = sparse.model[0]
    bound = (6 / 16) ** 0.5
    assert 0.9 * bound < layer.values.abs().max() <= bound and not layer.bias.any()
    rows, cols = (t.long() for t in layer.pattern.coordinates())
    assert torch.equal(layer.values, dense.model[0].weight[rows, cols])  # not scaled to the sparse fan-in
    run = training.train(config, data.load("blobs.npz"))
    values = run.of("snack").model[0].values.detach()
    assert run.of("snack").updates == 1 and values.abs().max() <= bound + 1e-6 and values.abs().min() > 0


def test_squared_error_of_sigmoid_outputs():
    outputs, labels = torch.tensor([[0.0, 0.0], [100.0, -100.0]]), torch.tensor([0, 1])
    config = training.Config(loss="mse")
    assert training.loss_of(config, outputs, labels).item() == pytest.approx((0.25 + 0.25 + 1 + 1) / 4)


def test_dropout_draws_from_the_seed_and_leaves_the_global_stream_alone(blobs):
    dataset = data.load("blobs.npz")
    config = training.Config(hidden=(40,), sparsity=0.5, batch_size=32, epochs=2, dropout=0.3, contenders=("snack",))
    state = torch.random.get_rng_state()
    first = training.train(config, dataset)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.randn(3)
    again = training.train(config, dataset)
    assert first.of("snack").curve == again.of("snack").curve


def test_sparse_output_makes_the_last_layer_sparse(blobs, tmp_path):
    assert main([*blobs, "--epochs", "1", "--sparse-output", "--json", "r.json", "--no-figure", "--quiet"]) == 0
    record = json.loads((tmp_path / "r.json").read_text())["records"][2]
    assert record["nnz"] == round(0.2 * (16 * 40 + 40 * 20 + 20 * 3))
    assert not list(tmp_path.glob("*.png"))


def test_diverged_run_is_told_as_it_is(blobs, tmp_path, capsys):
    assert main([*blobs, "--lr", "1e30", "--epochs", "2", "--json", "r.json", "--figure", "f.png"]) == 1
    assert "training diverged" in capsys.readouterr().out
    record = json.loads((tmp_path / "r.json").read_text())["records"][2]
    assert record["accuracy"] < 0.7 and record["loss_curve"] == [] and (tmp_path / "f.png").exists()


@pytest.mark.parametrize("steps, contenders", [(1, 1), (20, 3)])
def test_ctrl_c_keeps_what_there_is(blobs, tmp_path, capsys, monkeypatch, steps, contenders):
    real, count = training._train_step, 0

    def step(*arguments):
        nonlocal count
        count += 1
        if count == steps:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(training, "_train_step", step)
    before = signal.getsignal(signal.SIGINT)
    assert main([*blobs, "--epochs", "50", "--seeds", "2", "--json", "r.json", "--figure", "f.png", "--save", "m.safetensors"]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    out = capsys.readouterr().out
    assert "test accuracy" in out and "Ctrl-C" in out
    document = json.loads((tmp_path / "r.json").read_text())
    assert len(document["records"]) == contenders and all(r["interrupted"] for r in document["records"])
    assert sum(r["steps"] for r in document["records"]) == steps == count
    assert (tmp_path / "f.png").exists() and (tmp_path / "m.safetensors").exists()


def test_second_ctrl_c_leaves_at_once(blobs, tmp_path, capsys, monkeypatch):
    def step(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(training, "_train_step", step)
    assert main([*blobs, "--epochs", "50", "--json", "r.json"]) == 130
    assert "interrupted" in capsys.readouterr().err and not (tmp_path / "r.json").exists()


def test_mean_is_over_the_seeds_that_were_finished(blobs, tmp_path, capsys, monkeypatch):
    real, count = training._train_step, 0

    def step(*arguments):
        nonlocal count
        count += 1
        if count == 3 * 6 + 4:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(training, "_train_step", step)
    assert main([*blobs, "--epochs", "1", "--seeds", "3", "--json", "r.json", "--no-figure"]) == 130
    assert "seed 0" in capsys.readouterr().out
    assert [r["interrupted"] for r in json.loads((tmp_path / "r.json").read_text())["records"]] == [False] * 3 + [True]


def test_digits_reach_96_percent(tmp_path, capsys):
    """The demo of the README, shortened to 6 of its 40 epochs."""
    assert main(["train", "--epochs", "6", "--json", "r.json", "--no-figure", "--quiet"]) == 0
    records = json.loads((tmp_path / "r.json").read_text())["records"]
    assert min(r["accuracy"] for r in records) >= 0.96
