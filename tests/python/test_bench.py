"""snack bench: cases and suites, every routine on the processor, peers that fail, resuming, and what the command refuses."""

import json
import os
import subprocess
import sys

import pytest
import torch

from snack import SnackError
from snack.bench import case, cuda_timing, layers, measure, peers, records, suites, timing
from snack.bench.case import Case, cases
from snack.bench.results import Results
from snack.cli.main import main
from snack.nn import SparseLinear

FACTS = {"copy_tb_s": 4.0, "l2_mb": 0.02}


class QuickMeter(timing.Meter):
    """The host's meter, with what a card's can do: watch memory and take a cap."""

    def eager_us(self, run):
        run()
        return 1.0

    def gpu_us(self, run):
        run()
        return 2.0

    def peak_bytes(self, make):
        make()()
        return 64

    capped = timing.contextlib.contextmanager(lambda self, gib: iter([None]))


@pytest.fixture(autouse=True, scope="module")
def in_short():
    # What is tested is what is measured, not how long it takes.
    seconds, threads, timing.SAMPLE_SECONDS = timing.SAMPLE_SECONDS, torch.get_num_threads(), 1e-5
    torch.set_num_threads(1)
    yield
    timing.SAMPLE_SECONDS = seconds
    torch.set_num_threads(threads)


def bench(**facts):
    return measure.Bench(QuickMeter(2), FACTS | facts)


# ---- cases and suites ----


def test_a_grid_is_all_combinations_and_leaves_out_who_has_no_part():
    found = list(cases(["spmm", "memory"], [(6, 4)], [0.5], [1, 2], ["float32", "bfloat16"], l2=["warm", "cold"], caps=[None, 1.0]))
    assert len({str(c) for c in found}) == 2 * 2 * 2 + 2 * 2 * 2  # spmm has no cap of its own (but is there twice), memory no cold weights
    by_dtype = {c.dtype: set(c.peers) for c in found if c.routine == "spmm" and c.l2 == "warm"}
    assert by_dtype["float32"] - by_dtype["bfloat16"] == {"dense_tf32", "dense_bf16"} and "sputnik" in by_dtype["bfloat16"]
    assert all(c.peers == ("dense",) for c in found if c.l2 == "cold")
    assert {c.cap_gib for c in found if c.routine == "memory"} == {None, 1.0}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", suites.SUITES)
def test_every_suite_has_each_case_once_and_only_known_names(name, device):
    found = suites.suite_cases(name, device)
    assert found and len({str(c) for c in found}) == len(found)
    for c in found:
        assert c.routine in case.ROUTINES and c.dtype in case.DTYPES and set(c.peers) <= set(case.PEERS_OF[c.routine])
        assert c.mode == ("eager" if device == "cpu" else "graph") and (device == "cuda" or c.cap_gib is None)
    assert all(set(c.energy) <= {"snack", *c.peers} for c in found)


def test_the_suites_of_the_paper_cover_its_tables():
    kernels, layer, memory = (suites.suite_cases(f"paper-{name}", "cuda") for name in ("kernels", "layer", "memory"))
    assert {c.shape[0] for c in kernels if c.sparsity == 0.95 and c.batch == 4} == {500, 1000, 2500, 5000, 7500, 10_000}
    assert {c.batch for c in kernels if c.shape == (5000, 5000) and c.sparsity == 0.5} == {1, 2}
    assert {c.shape for c in layer} == {(out, 10_000) for out in (2500, 5000, 7500, 10_000, 12_500)}
    assert {c.batch for c in layer} == {1, 2, 4, 8, 16, 32, 64} and {c.routine for c in layer if c.energy} == {"layer_infer", "layer_step"}
    assert {c.shape[1] for c in memory} == set(range(2500, 30_001, 2500)) and {c.cap_gib for c in memory} == {None, 4.0}


def test_every_peer_of_the_products_has_a_maker():
    assert set(peers.PEERS) == set(case.PRODUCT_PEERS)


# ---- routines ----


@pytest.fixture(scope="module")
def measured(in_short):
    meter = bench()
    grid = cases(case.ROUTINES, [(96, 80)], [0.8], [1, 3], ["float32", "bfloat16"], l2=["warm", "cold"])
    return [meter.measure(c) for c in grid if c.dtype == "float32" or c.batch == 3]


def test_every_routine_is_measured_at_a_shape_that_is_not_square(measured):
    assert {r["routine"] for r in measured} == set(case.ROUTINES)
    for r in measured:
        assert (r["out"], r["in"], r["nnz"], r["sparsity"]) == (96, 80, 1536, 0.8)
        assert r["routine"] == "memory" or r["time_us"] > 0
        if r["routine"] in case.PRODUCTS:
            assert r["bytes"] == r["nnz"] * ({"float32": 4, "bfloat16": 2}[r["dtype"]] + 2) and r["floor_us"] == round(r["bytes"] / 4e6, 3)
        if r["routine"].startswith("layer"):
            assert r["peak_bytes"] == r["peers"]["dense"]["peak_bytes"] == 64 and r["parameters"] == 1536 + 96
            assert r["peers"]["dense"]["parameters"] == 96 * 80 + 96


def test_everybody_computes_the_product(measured):
    limits = {"float32": 1e-5, "bfloat16": 3e-2}
    for r in measured:
        if r["routine"] in case.PRODUCTS:
            assert 0 <= r["rel_error"] < limits[r["dtype"]] and r["regime"] in ("stream", "panel")
            for name, peer in r["peers"].items():
                limit = 3e-2 if name == "dense_bf16" else limits[r["dtype"]]
                assert "rel_error" not in peer or 0 <= peer["rel_error"] < limit, name
    first = next(r for r in measured if r["routine"] == "spmm")
    ran = {name for name, peer in first["peers"].items() if "time_us" in peer}
    assert {"dense", "dense_tf32", "dense_bf16", "dense_mask", "torch_csr", "torch_coo", "torch_bsr"} <= ran
    assert "not_run" in first["peers"]["coo_atomics"]  # the CPU has no such regime: a peer's failure is a result
    assert first["peers"]["sputnik"]["not_run"].startswith("Sputnik") and first["peers"]["flashsparse"]["not_run"]


def test_layers_have_their_peers_and_sparse_ones_learn(measured):
    step = next(r for r in measured if r["routine"] == "layer_step")
    assert {n for n, p in step["peers"].items() if "time_us" in p} >= {"dense", "dense_bf16", "dense_mask_bool", "torch_csr", "torch_coo"}
    a_case = Case("layer_step", (6, 5), 0.5, 3, optimizer="SGD")
    x, dy = layers.operands(a_case, torch.device("cpu"))
    ours = layers.build("snack", a_case, torch.device("cpu"))
    for layout in ("torch_csr", "torch_coo"):
        theirs = layers.build(layout, a_case, torch.device("cpu"))
        assert torch.allclose(theirs(x), ours(x), atol=1e-6)
        theirs(x).backward(dy)
        assert theirs.values.grad.shape == (15,)


def test_memory_has_what_is_kept_and_an_update_what_the_card_computes(measured):
    memory = next(r for r in measured if r["routine"] == "memory")
    assert memory["kept_bytes"] < 0.3 * memory["peers"]["dense"]["kept_bytes"] and memory["params"] == {"optimizer": "Adam"}
    assert memory["infer_peak_bytes"] == 64
    update = next(r for r in measured if r["routine"] == "update")
    assert update["gpu_us"] == 2.0 and update["mode"] == "eager" and update["peers"]["dense_mask"]["time_us"] > 0
    assert update["peers"]["snack_rigl"]["gpu_us"] == 2.0 and "RigL" in update["peers"]["snack_rigl"]["note"]


@pytest.mark.parametrize("make", [layers.set_update, layers.rigl_update])
def test_an_update_that_is_measured_moves_connections_every_time(make):
    torch.manual_seed(0)
    a_case = Case("update", (40, 30), 0.8, 2, optimizer="SGD(momentum=0.9)")
    moved = []
    original = SparseLinear.rewire
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseLinear, "rewire", lambda layer, drop, *a, **k: moved.append(len(drop)) or original(layer, drop, *a, **k))
        run = make(a_case, torch.device("cpu")).runs[0]
        run(), run()
    assert len(moved) == 2 and all(70 <= count <= 72 for count in moved)  # 30 % of 240


def test_memory_of_a_layer_in_training_is_an_eighth_of_dense():
    found = dict(layers.memory("snack", c := Case("memory", (1024, 1024), 0.9, 2, optimizer="Adam"), timing.Meter()))
    assert found["kept_bytes"] <= 0.13 * dict(layers.memory("dense", c, timing.Meter()))["kept_bytes"] and "peak_bytes" not in found


def test_an_update_of_the_masked_twin_moves_connections_and_keeps_their_number():
    device = torch.device("cpu")
    peer = layers.masked_update(Case("update", (40, 30), 0.8, 2, optimizer="SGD(momentum=0.9)"), device)
    layer = next(cell.cell_contents for cell in peer.runs[0].__closure__ if isinstance(cell.cell_contents, torch.Tensor))
    before = layer.clone()
    ones = int((layer > 0).sum())
    peer.runs[0]()
    assert int((layer > 0).sum()) == ones and not torch.equal(before, layer)


def test_cold_weights_take_turns(measured):
    cold = [r for r in measured if r["l2"] == "cold"]
    assert {r["routine"] for r in cold} == {"spmm", "spmm_t", "sddmm", "layer_infer"}
    assert all(r["params"]["copies"]["snack"] >= 2 for r in cold)


def test_a_wrong_result_has_a_large_error():
    topology = peers.Topology.random((64, 48), 0.5, "cpu")
    for routine in case.PRODUCTS:
        problem = peers.Problem.random(Case(routine, (64, 48), 0.5, 4), topology, "cpu")
        right = peers.snack(problem).runs[0]()
        assert problem.error(right) < 1e-5 < 0.1 < problem.error(right.flip(-1))


@pytest.mark.parametrize("broken", [NotImplementedError("nobody made it"), torch.OutOfMemoryError("CUDA out of memory"), ImportError("absent")])
def test_a_peer_that_fails_is_a_record(monkeypatch, broken):
    def fail(problem):
        raise broken

    monkeypatch.setitem(peers.PEERS, "torch_coo", fail)
    record = bench().measure(Case("spmm", (8, 8), 0.5, 1, peers=("torch_coo", "dense")))
    assert str(broken) in record["peers"]["torch_coo"]["not_run"] and record["peers"]["dense"]["time_us"] > 0


def test_our_own_lack_of_memory_is_a_record_and_our_failure_ends_the_run(monkeypatch):
    build = layers.build

    def scarce(name, *rest):
        if name == "snack":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return build(name, *rest)

    monkeypatch.setattr(layers, "build", scarce)
    for routine in ("layer_step", "memory"):
        record = bench().measure(Case(routine, (8, 8), 0.5, 1, optimizer="SGD", peers=("dense",)))
        assert "out of memory" in record["not_run"] and "not_run" not in record["peers"]["dense"] and "time_us" not in record
    monkeypatch.setattr(measure, "snack", lambda problem, copies: (_ for _ in ()).throw(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken|no form"):
        bench().measure(Case("spmm", (8, 8), 0.5, 1))


def test_a_wrong_result_of_ours_ends_the_run():
    for error, dtype in ((2e-5, "float32"), (0.1, "bfloat16"), (float("nan"), "float32")):
        with pytest.raises(SnackError, match="is off by"):
            bench()._require_right(error, Case("spmm", (8, 8), 0.5, 1, dtype))


def test_players_tell_slow_from_fast_and_wait_at_the_end():
    a, b = torch.randn(2, 2), torch.randn(300, 300)
    waited = []
    meter = timing.Meter(3)
    slow, fast = meter.player([lambda: b @ b @ b], "eager"), meter.player([lambda: a @ a], "eager", lambda: waited.append(1))
    times = meter.compare({"slow": slow, "fast": fast})
    assert times["slow"]["time_us"] > 3 * times["fast"]["time_us"] > 0 and len(waited) > 3
    with pytest.raises(SnackError, match="cannot be capped"), timing.Meter().capped(1.0):
        pass
    assert issubclass(cuda_timing.CudaMeter, timing.Meter)


# ---- files ----


PROVENANCE = {"device": "h200", "source_hash": "a", "torch": "2"}


def record_of(a_case, **more):
    return {"case": str(a_case), "time_us": 1.0, "peers": {name: {"time_us": 2.0} for name in a_case.peers}, **more}


def test_what_is_there_is_not_measured_again():
    grid = list(cases(["spmm"], [(8, 8)], [0.5], [1, 2], peers=["dense"]))
    results = Results("run", PROVENANCE)
    assert results.missing(grid) == grid
    results.add(record_of(grid[0]))
    again = Results("run", PROVENANCE, results.document())
    assert again.missing(grid) == grid[1:] and not again.stale


def test_a_peer_or_energy_that_is_not_there_is_measured_with_all_that_was():
    small, = cases(["spmm"], [(8, 8)], [0.5], [1], peers=["dense"])
    results = Results("run", PROVENANCE)
    results.add(record_of(small, energy_mj=1.0))
    more, = cases(["spmm"], [(8, 8)], [0.5], [1], peers=["torch_csr"])
    missing, = results.missing([more])
    assert set(missing.peers) == {"torch_csr", "dense"} and missing.energy == ("snack",)
    watched, = cases(["spmm"], [(8, 8)], [0.5], [1], peers=["dense"], energy=["snack", "dense"])
    assert results.missing([watched]) == [watched] and results.missing([watched], has_energy=False) == []


def test_how_energy_was_measured_stays_with_the_records():
    before = Results("run", {**PROVENANCE, "energy": {"window_s": 5}}).document()
    assert Results("run", dict(PROVENANCE), before).provenance["energy"] == {"window_s": 5}


def test_records_of_other_sources_are_stale_and_measured_again():
    first, second = cases(["spmm"], [(8, 8)], [0.5], [1, 2], peers=[])
    old = Results("run", PROVENANCE)
    old.add(record_of(first))
    old.add(record_of(second))
    new = Results("run", {**PROVENANCE, "source_hash": "b"}, old.document())
    assert new.missing([first, second]) == [first, second]
    new.add(record_of(first, time_us=3.0))
    document = new.document()
    assert [r["time_us"] for r in document["records"]] == [3.0] and [r["case"] for r in document["stale"]] == [str(second)]
    assert Results("run", {**PROVENANCE, "source_hash": "b"}, document).missing([first, second]) == [second]


@pytest.mark.parametrize(("key", "words"), [("suite", "of the suite other, not run"), ("device", "of the device h100, not h200")])
def test_a_file_of_another_suite_or_device_is_refused(key, words):
    document = Results("run", PROVENANCE).document()
    document = {**document, "suite": "other"} if key == "suite" else {**document, "provenance": {"device": "h100"}}
    with pytest.raises(SnackError, match=words):
        Results("run", PROVENANCE, document, "r.json")


# ---- the command ----


def command(tmp_path, *options):
    fixed = ["--device", "cpu", "--shape", "24x16", "--peers", "dense", "--samples", "2", "--json", str(tmp_path / "r.json")]
    return main(["bench", "run", *fixed, *options])


def test_a_run_stops_at_its_limit_and_goes_on(tmp_path, capsys, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("snack.cli.bench.time.monotonic", lambda: next(clock))
    options = ["--routine", "spmm,layer_step,memory,update", "--batch", "1,2", "--sparsity", "0.5"]
    assert command(tmp_path, *options, "--limit", "4") == 0
    said = capsys.readouterr().out
    first = json.loads((tmp_path / "r.json").read_text())["records"]
    assert len(first) == 3 and "5 of 8 records remain" in said
    assert command(tmp_path, *options) == 0
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["records"][:3] == first and len(document["records"]) == 8 and document["suite"] == "run"
    assert "remain" not in capsys.readouterr().out
    assert command(tmp_path, *options) == 0
    assert json.loads((tmp_path / "r.json").read_text()) == document | {"provenance": json.loads((tmp_path / "r.json").read_text())["provenance"]}


def test_a_failure_keeps_the_records_made_so_far(tmp_path, monkeypatch):
    real = measure.Bench.measure

    def fail_at_two(self, a_case):
        if a_case.batch == 2:
            raise RuntimeError("the card is gone")
        return real(self, a_case)

    monkeypatch.setattr(measure.Bench, "measure", fail_at_two)
    with pytest.raises(RuntimeError, match="gone"):
        command(tmp_path, "--batch", "1,2")
    assert [r["batch"] for r in json.loads((tmp_path / "r.json").read_text())["records"]] == [1]


def test_a_named_suite_is_narrowed_by_the_options(tmp_path, capsys):
    options = ["--device", "cpu", "--shape", "500x500", "--batch", "1", "--routine", "spmm", "--dtype", "float32", "--peers", "none"]
    assert main(["bench", "paper-kernels", *options, "--samples", "2", "--json", str(tmp_path / "k.json")]) == 0
    record, = json.loads((tmp_path / "k.json").read_text())["records"]
    assert record["case"] == "spmm 500x500, 95 %, batch 1, float32, eager" and record["peers"] == {}
    assert "records remain" not in capsys.readouterr().out


def test_stale_records_are_announced(tmp_path, capsys):
    command(tmp_path)
    document = json.loads((tmp_path / "r.json").read_text())
    document["provenance"]["source_hash"] = "0" * 16
    (tmp_path / "r.json").write_text(json.dumps(document))
    capsys.readouterr()
    command(tmp_path)
    assert "1 records of" in (said := capsys.readouterr().out) and "are stale" in said
    assert "stale" not in json.loads((tmp_path / "r.json").read_text())


def test_energy_without_a_card_is_a_sentence_and_the_records_lack_it(tmp_path, capsys):
    assert command(tmp_path, "--energy") == 0
    assert "without energy: energy is measured on cards alone" in capsys.readouterr().out
    assert "energy_mj" not in json.loads((tmp_path / "r.json").read_text())["records"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "'nothing' is no suite; known are cpu, cuda, paper-kernels"),
        (["run", "--device", "cpu", "--routine", "conv"], "'conv' is no routine; known are spmm"),
        (["run", "--device", "cpu", "--peers", "dense,magic"], "'magic' is no peer; known are dense"),
        (["run", "--device", "tpu"], "'tpu' is no device"),
        (["run", "--device", "cpu", "--dtype", "int8"], "'int8' is no dtype"),
        (["run", "--device", "cpu", "--shape", "12"], "shape"),
        (["run", "--device", "cpu", "--shape", "axb"], "is not OUTxIN"),
        (["run", "--device", "cpu", "--batch", "0"], "--batch must be positive"),
        (["run", "--device", "cpu", "--batch", "one"], "is not a list of numbers"),
        (["run", "--device", "cpu", "--sparsity", "1.5"], "1.5"),
        (["run", "--device", "cpu", "--samples", "1"], "--samples must be at least 2"),
        (["run", "--device", "cpu", "--limit", "0"], "--limit must be a positive number"),
        (["run", "--device", "cpu", "--routine", "update", "--l2", "cold"], "cold weights belong to"),
        (["cpu", "--quick"], "belongs to the suite cuda"),
        (["cpu", "--shape", "3x3"], "no case of the suite is left"),
        (["cpu", "--energy"], "--energy belongs to `run`"),
        (["run", "--device", "cpu", "--json", "/nonexistent/x.json"], "cannot be written"),
    ],
)
def test_the_command_refuses_in_one_sentence(arguments, words, capsys):
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_without_a_card_the_suites_of_cards_say_so():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-m", "snack", "bench", "paper-layer"], env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "no card can be measured" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("content", ['{"schema": 1, "rec', '{"schema": 2, "records": []}'])
def test_a_file_that_cannot_be_continued_is_a_sentence_and_stays(tmp_path, capsys, content):
    (tmp_path / "r.json").write_text(content)
    assert command(tmp_path) == 2
    assert (tmp_path / "r.json").read_text() == content and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "count", "folder"), [("NVIDIA H200", 1, "h200"), ("NVIDIA H200", 2, "h200x2"), ("NVIDIA GeForce RTX 4090", 1, "rtx-4090")]
)
def test_results_of_a_card_have_a_folder(name, count, folder):
    assert records.card_name(name, count) == folder
