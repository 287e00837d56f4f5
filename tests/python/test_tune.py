"""The cost table: its fit, its text, the tool that writes the built-in one, the user's own, and the suite that measures. Without a card."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snack import SnackError, _costs, _lib, ops
from snack.bench import fit, measure, suites, timing, tune
from snack.bench.case import PRODUCTS, Case
from snack.cli import bench as bench_command
from snack.cli.main import main
from snack.nn import SparseLinear
from snack.ops.products import KERNELS, regime_code

ROOT = Path(__file__).resolve().parents[2]
H200 = (9, 0, 132, 232_448, 60 * 2**20, 4916)
needs_cuda_library = pytest.mark.skipif(_lib.CUDA_PATH is None, reason="this build has no CUDA library")


def cost_tool():
    spec = importlib.util.spec_from_file_location("cost_table", ROOT / "tools/cost_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(kernel="spmm_rows", element=4, width=1, variant=0, batch=1, nnz=5_000_000, us=None, costs=(2.0, 0.01, 0.2, 3.0, 0.0, 0.0)):
    """One that the costs explain, unless another time is given; the terms are the plan's own."""
    dtype = torch.float32 if element == 4 else torch.bfloat16
    found = tune.candidates(kernel.rsplit("_", 1)[0], (10_000, 10_000), nnz, batch, dtype, H200, kernel)[0]
    assert (found["element"], found["width"], found["variant"]) == (element, width, variant)
    us = sum(c * t for c, t in zip(costs, found["terms"], strict=True)) if us is None else us
    return {**found, "out": 10_000, "in": 10_000, "sparsity": 1 - nnz / 1e8, "time_us": us}


def document(records, **facts):
    provenance = {"card": "NVIDIA Test", "device": "test", "capability": list(H200), "copy_tb_s": 4.0, "kernels": "abc", "date": "2026-01-01",
                  "command": "snack bench tune", "source_hash": "0123"}  # fmt: skip
    return {"schema": 1, "suite": "tune", "provenance": provenance | facts, "records": records}


# ---- the fit ----


def test_the_fit_finds_the_costs_that_made_the_times():
    records = [record(nnz=n) for n in range(800_000, 40_000_000, 3_000_000)]
    costs = fit.fit(records)
    assert max(abs(fit.predict(costs, r) / r["time_us"] - 1) for r in records) < 1e-3
    assert min(costs) >= 0 and costs[0] >= fit.LAUNCH_US
    assert tune.held_out(records) == (len(records), len(records))


def test_no_cost_is_negative_and_a_launch_is_never_free():
    noisy = [record(nnz=n, us=us) for n, us in ((1_000_000, 9.0), (5_000_000, 3.0), (20_000_000, 1.0))]  # more work, less time
    costs = fit.fit(noisy)
    assert min(costs) >= 0 and costs[0] >= fit.LAUNCH_US
    wild = [record(nnz=n, us=10.0 * (1 + i % 2)) for i, n in enumerate(range(800_000, 8_000_000, 600_000))]
    good, total = tune.held_out(wild)
    assert good < total


def test_every_term_has_a_name_and_every_row_a_form():
    for name in KERNELS:
        routine = name.rsplit("_", 1)[0]
        nnz = 50_000 if name.endswith(("_fixed", "_slots")) else 5_000_000
        for dtype in (torch.float32, torch.bfloat16):
            for batch in (1, 2, 4, 5, 8, 16, 64, 256):
                try:
                    found = tune.candidates(routine, (10_000, 10_000), nnz, batch, dtype, H200, name)
                except SnackError as error:
                    assert name in str(error)
                    continue
                assert [c["kernel"] for c in found] == [name] and len(found[0]["terms"]) == len(fit.TERMS)
                assert (found[0]["width"], found[0]["variant"]) in fit.FORMS[name]


# ---- the table ----


def test_what_was_not_measured_costs_twice_its_neighbour():
    records = [record(nnz=n, batch=4, width=4) for n in range(800_000, 9_000_000, 1_000_000)]
    rows = {tuple(line.split()[:4]): line.split("#")[0].split()[4:] for line in fit.table(records, document([])["provenance"], "a note").splitlines()
            if line.startswith("spmm_rows")}  # fmt: skip
    measured = [float(cost) for cost in rows["spmm_rows", "4", "4", "0"]]
    assert [float(cost) for cost in rows["spmm_rows", "2", "1", "0"]] == pytest.approx([2 * cost for cost in measured], rel=1e-3)
    assert set(rows) == {("spmm_rows", str(e), str(w), str(v)) for e in (2, 4) for w, v in fit.FORMS["spmm_rows"]}


def test_a_table_decides_and_explains():
    slow, fast = [record(nnz=n, us=900.0) for n in (1_000_000, 5_000_000)], [record("spmm_stream", nnz=n, us=20.0) for n in (1_000_000, 5_000_000)]
    text = fit.table(slow + fast, document([])["provenance"], "a note")
    problem = (0, 10_000, 10_000, 5_000_000, 1, torch.float32, 0, *H200)
    assert torch.ops.snack.explain_cuda(*problem).startswith("kernel spmm_rows: stream, ")
    plan = torch.ops.snack.explain_cuda(*problem, text)
    assert plan.startswith("kernel spmm_stream: stream, ") and "floor 7.5 us, runner-up spmm_rows 900" in plan
    found = tune.candidates("spmm", (10_000, 10_000), 5_000_000, 1, torch.float32, H200, costs=text)
    assert [c["kernel"] for c in found] == ["spmm_stream", "spmm_rows"]
    with pytest.raises(RuntimeError, match="line 8"):
        torch.ops.snack.explain_cuda(*problem, text.replace("spmm_", "spnn_", 1))


def test_the_page_of_the_plan_quotes_what_is_explained():
    card = json.loads((ROOT / "benchmarks/results/h200/tune.json").read_text())["provenance"]["capability"]
    plan = torch.ops.snack.explain_cuda(0, 10_000, 10_000, 5_000_000, 1, torch.float32, 0, *card, "")
    assert plan in " ".join((ROOT / "docs/plan.md").read_text().split())


def test_the_built_in_table_is_what_the_record_gives():
    done = subprocess.run([sys.executable, ROOT / "tools/cost_table.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_tool_writes_and_finds_stale_tables(tmp_path, monkeypatch, capsys):
    tool = cost_tool()
    monkeypatch.setattr(tool, "RECORD", tmp_path / "tune.json")
    monkeypatch.setattr(tool, "TABLE", tmp_path / "cuda_costs.inc")

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["cost_table.py", *options])
        return tool.main(), capsys.readouterr().err

    records = [record(nnz=n) for n in (1_000_000, 5_000_000)]
    (tmp_path / "other.json").write_text(json.dumps(document(records)))
    assert run("--from", str(tmp_path / "other.json"))[0] == 0 and run("--check")[0] == 0  # provisional, and says so
    (tmp_path / "tune.json").write_text(json.dumps(document(records)))
    assert run("--check")[0] == 1
    assert run()[0] == 0 and run("--check") == (0, "")
    assert "provisional" not in (tmp_path / "cuda_costs.inc").read_text()
    (tmp_path / "tune.json").write_text(json.dumps(document(records[:1])))
    status, said = run("--check")
    assert status == 1 and "run python tools/cost_table.py" in said
    (tmp_path / "tune.json").unlink()
    assert run("--check")[0] == 1  # neither a record nor the word


# ---- the user's own ----


def status_with(path, **environment):
    code = "from snack import _costs, _lib; print(_lib.status()['costs']); print(len(_costs._texts))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"SNACK_COSTS": str(path)} | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_cuda_library
def test_the_users_table_is_loaded_or_the_reason_is_told(tmp_path):
    records = [record(nnz=n) for n in (1_000_000, 5_000_000)]
    path = tmp_path / "costs-test.txt"
    tune.write_table(document(records, kernels=torch.ops.snack.cuda_fingerprint()), path)
    assert status_with(path) == [f"from {path}", "1"]
    cache = tmp_path / "cache/snack"
    cache.mkdir(parents=True)
    path.rename(cache / path.name)
    environment = {key: value for key, value in os.environ.items() if key != "SNACK_COSTS"} | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = "from snack import _costs, _lib; print(_costs.status()); print(_costs.source_of((9, 0, 132, 232448, 62914560, 4916)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.count(str(cache / path.name)) == 2, done.stderr
    tune.write_table(document(records), path)
    said, count = status_with(path)
    assert count == "0" and "other kernels" in said and "snack bench tune" in said and said.startswith("the built-in table; ")
    path.write_text("snack-costs 1\nspmm_rows 4\n")
    assert "line 2" in status_with(path)[0]
    path.write_bytes(b"\xff\xfe")
    assert "cannot be read" in status_with(path)[0]
    assert "cannot be read" in status_with(tmp_path / "nowhere.txt")[0]
    assert status_with("") == ["the built-in table", "0"]


# ---- the suite ----


def test_the_grid_measures_every_kernel_in_every_form():
    cases = list(tune.tune_cases())
    assert len({str(case) for case in cases}) == len(cases) and all(case.kernel in str(case) and not case.peers for case in cases)
    forms = set()
    for case in cases:
        nnz = round((1 - case.sparsity) * case.shape[0] * case.shape[1])
        try:
            found = tune.candidates(case.routine, case.shape, nnz, case.batch, getattr(torch, case.dtype), H200, case.kernel)[0]
        except SnackError:
            continue
        forms.add(fit.key_of(found))
    reachable = {(k, e, *form) for k, widths in fit.FORMS.items() for e in (2, 4) for form in widths}
    impossible = {("spmm_rows", 4, 8, 0), ("sddmm_chunks", 4, 8, 0)} | {key for key in reachable if key[0] == "spmm_batch"}
    assert reachable - forms <= impossible
    of_batches = {key[1:] for key in forms if key[0] == "spmm_batch"}
    assert of_batches >= {(4, 16, 0), (4, 32, 0), (4, 32, 1), (2, 16, 1), (2, 32, 0), (2, 64, 0), (2, 64, 1)}


def test_a_kernel_is_measured_alone_or_says_why_not(monkeypatch):
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 1e-5)
    on_processor = ops.sddmm  # which has no such kernels
    monkeypatch.setattr(ops, "sddmm", lambda pattern, dy, x, regime: on_processor(pattern, dy, x))
    bench = measure.Bench(timing.Meter(2), {"capability": H200})
    found = bench.measure(Case("sddmm", (64, 48), 0.5, 2, mode="eager", kernel="sddmm_stream"))
    assert found["kernel"] == "sddmm_stream" and found["time_us"] > 0 and len(found["terms"]) == len(fit.TERMS) and found["peers"] == {}
    found = bench.measure(Case("spmm", (64, 48), 0.5, 2, mode="eager", kernel="spmm_batch"))
    assert "time_us" not in found and "spmm_batch" in found["not_run"]


def test_the_command_fits_what_it_measured(tmp_path, monkeypatch, capsys):
    """The measuring alone is replaced: there is no card here."""
    class Bench:
        energy_problem = ""

        def measure(self, case):
            nnz = round((1 - case.sparsity) * case.shape[0] * case.shape[1])
            known = tune.candidates(case.routine, case.shape, nnz, case.batch, getattr(torch, case.dtype), H200, case.kernel)[0]
            facts = {"case": str(case), "routine": case.routine, "out": case.shape[0], "in": case.shape[1], "sparsity": case.sparsity, "peers": {}}
            return facts | known | {"time_us": 2.0 + 0.1 * known["terms"][2]}

    def make(device, samples, energy, provenance):
        provenance.update(capability=list(H200), kernels="abc", copy_tb_s=4.0, card="NVIDIA Test")
        return Bench()

    monkeypatch.setattr(bench_command, "_card_problem", lambda: "")
    monkeypatch.setattr(bench_command, "_torch_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(bench_command, "_bench", make)
    monkeypatch.setenv("SNACK_COSTS", str(tmp_path / "mine/costs.txt"))
    grid = [case for case in tune.tune_cases() if case.routine == "spmm" and case.shape == (4096, 4096) and case.batch in (1, 4)]
    monkeypatch.setitem(suites.SUITES, "tune", suites.Suite("cuda", "", lambda: grid))
    command = ["bench", "tune", "--json", str(tmp_path / "tune.json")]
    assert main([*command, "--batch", "1"]) == 0
    said = capsys.readouterr().out
    assert f"{len(grid) // 2} records of the whole suite are missing" in said and not (tmp_path / "mine").exists()
    assert main(command) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "mine/costs.txt") in said.replace("\n", "") and "within 25 %" in said
    text = (tmp_path / "mine/costs.txt").read_text()
    assert text.startswith("snack-costs 1\n") and "card NVIDIA Test\nkernels abc\n" in text and "spmm_stream 4 4 0 " in text
    plan = torch.ops.snack.explain_cuda(0, 10_000, 10_000, 5_000_000, 1, torch.float32, 0, *H200, text)
    assert "predicted" in plan and "not measured" not in plan.split("runner-up")[0]


# ---- forcing a kernel ----


def test_kernels_have_the_same_numbers_everywhere():
    for name in KERNELS:
        operation = PRODUCTS.index(name.rsplit("_", 1)[0])
        nnz = 50_000 if name.endswith(("_fixed", "_slots")) else 5_000_000
        problem = (operation, 10_000, 10_000, nnz, 8 if name.endswith("_batch") else 1, torch.float32, regime_code(name), *H200)
        plan = torch.ops.snack.explain_cuda(*problem)
        assert plan.startswith(f"kernel {name}: ") and plan.endswith("runner-up none")


def test_a_kernel_of_cards_is_no_regime_of_the_processor():
    layer = SparseLinear(8, 8, sparsity=0.5)
    with pytest.raises(SnackError, match="kernel of cards"):
        ops.spmm(layer.pattern, layer.values, torch.ones(2, 8), regime="spmm_rows")
    with pytest.raises(RuntimeError, match="regime 99 does not exist"):
        torch.ops.snack.explain_cuda(0, 8, 8, 8, 1, torch.float32, 99, *H200)
    assert _costs.text_of((1, 2, 3)) == "" and "built-in" in _costs.source_of((1, 2, 3))


def test_records_of_a_card_have_the_choice_and_the_prediction(monkeypatch):
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 1e-5)
    found = measure.Bench(timing.Meter(2), {"capability": H200}).measure(Case("spmm", (96, 128), 0.5, 1, mode="eager"))
    assert found["kernel"] == "spmm_rows" and 1 < found["predicted_us"] < 10 and "floor_us" not in found
