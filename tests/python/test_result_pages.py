"""The pages of docs/results: every number and every reason of the records, and a check that finds stale ones."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from snack.bench.suites import suite_cases
from test_plot import paper_document

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import gpu_suite  # noqa: E402
import profile_kernels  # noqa: E402
import readme_tables  # noqa: E402
import result_pages  # noqa: E402
import training_page  # noqa: E402


@pytest.mark.parametrize("suite", [suite for suite in result_pages.PAGES if suite.startswith("paper")])
def test_a_page_has_every_record_and_what_the_paper_printed(suite):
    document = paper_document(suite)
    text = result_pages.page(document, "Source: here.", ROOT)
    shapes = {f"{r['out']:,} × {r['in']:,}" for r in document["records"]}
    assert all(f"| {shape} |" in text for shape in shapes) and "Source: here." in text and "as we read it" in text
    if suite == "paper-kernels":
        assert "2.43 ms, mean of 1,000" in text and "the total of 1,000 calls" in text and "* Sputnik: nobody built it" in text
    if suite == "paper-memory":
        assert "out of memory" in text and "where the process may have 4 GiB" in text
    if suite == "paper-layer":
        assert "energy a call" in text and "CO₂" in text


def test_a_page_says_how_many_cases_are_not_measured():
    whole = paper_document("paper-memory")
    part = whole | {"records": whole["records"][3:]}
    assert "Not finished" not in result_pages.page(whole, "Source: here.", ROOT)
    assert f"3 of the suite's {len(whole['records'])} cases are not measured yet" in result_pages.page(part, "Source: here.", ROOT)
    layers = paper_document("paper-layer")  # without the energy that some of its cases ask for
    layers["provenance"]["energy"] = {"rounds": 2, "window_s": 5, "g_per_kwh": 473, "source": "here"}
    for record in layers["records"]:
        for side in (record, *record["peers"].values()):
            side.pop("energy_mj", None)
    watched = sum(bool(case.energy) for case in suite_cases("paper-layer", "cuda"))
    assert 0 < watched and f"{watched} of the suite's {len(layers['records'])} cases" in result_pages.page(layers, "Source: here.", ROOT)


def test_cells_say_how_many_times_and_where_snack_loses():
    records = [{"out": 8, "in": 4, "sparsity": 0.9, "batch": 1, "time_us": 10.0, "peers": {
        "dense": {"time_us": 25.0}, "torch_csr": {"time_us": 5.0}, "torch_coo": {"not_run": "why"}, "dense_mask": {}}}]
    row = result_pages.table("t", records, [result_pages.SHAPE], "time_us", lambda us: f"{us:g} µs")[4]
    assert row == "| 8 × 4 | 10 µs | 25 µs (2.5×) | **5 µs (0.50×)** | not run |"
    assert result_pages.table("t", records, [], "energy_mj", str) == []


def test_the_page_of_one_sample_sets_times_against_the_limit_of_their_bytes():
    def record(time_us):
        return {"out": 8, "in": 4, "sparsity": 0.9, "dtype": "float32", "bytes": 3_400_000, "time_us": time_us, "peers": {"dense": {"time_us": 3.0}}}

    document = {"records": [record(3.4), record(7.0)], "provenance": {"copy_tb_s": 4.0}}  # limit: 2.5 + 3.4 MB / 3.4 TB/s = 3.5 µs
    text = result_pages.batch1_page(document, "Source: here.")
    assert "1 of 2 products keep it" in text
    assert "| 8 × 4 | 90 % | float32 | 3.40 µs | 3.50 µs | 0.97 | **3.00 µs (0.88×)** |" in text
    assert "| 7.00 µs | 3.50 µs | **2.00** | **3.00 µs (0.43×)** |" in text


def test_pages_without_records_and_records_without_pages_are_found(tmp_path, monkeypatch, capsys):
    for name in ("benchmarks", "README.md", "docs"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)

    def tables(*options):
        monkeypatch.setattr(sys, "argv", ["readme_tables.py", *options])
        return readme_tables.main(), capsys.readouterr().out

    (tmp_path / "benchmarks/results/h200/paper-memory.json").write_text(json.dumps(paper_document("paper-memory")))
    assert tables("--check")[0] == 1
    tables()
    page = tmp_path / "docs/results/paper-memory-h200.md"
    assert "Stale" in page.read_text() and "../../benchmarks/results/h200/paper-memory.json" in page.read_text()
    assert tables("--check") == (0, "")
    page.write_text(page.read_text() + "more\n")
    (tmp_path / "docs/results/paper-kernels-gone.md").write_text("of a record that is gone\n")
    status, said = tables("--check")
    assert status == 1 and "paper-memory-h200.md is not" in said and "paper-kernels-gone.md is not" in said
    tables()
    assert tables("--check")[0] == 0 and not (tmp_path / "docs/results/paper-kernels-gone.md").exists()


def ncu_page(*kernels: tuple[str, str]) -> str:
    """What ncu prints of kernels (name, microseconds): only the metrics that it knows."""
    metrics = [metric for metric, _ in profile_kernels.METRICS.values()]

    def cells(of_time, of_bytes, of_others):
        return [of_time if "duration" in metric else of_bytes if metric.endswith("bytes.sum") else of_others for metric in metrics]

    head, units = ["ID", "Kernel Name", *metrics], ["", "", *cells("usecond", "Mbyte", "")]
    rows = [[str(i), name, *cells(time, "1,000.5", "2")] for i, (name, time) in enumerate(kernels)]
    return "\n".join(",".join(f'"{cell}"' for cell in row) for row in (head, units, *rows))


def test_a_profile_has_the_second_call_of_every_case():
    one, two = "void snack::cuda::spmm_t_rows<float, 1, 4>(Args<float>)", "finish_kernel"
    lines, batch = "transpose_lines", "spmm_batch"
    calls = [(one, "9"), (two, "1"), (one, "8"), (two, "2"), (lines, "3"), (batch, "30"), (lines, "4"), (batch, "40")]
    kernels = profile_kernels.launches(ncu_page(*calls))
    assert kernels[0]["name"] == "spmm_t_rows" and kernels[0]["time_us"] == 9 and kernels[0]["dram_bytes"] == 1.0005e9
    facts = {"out": 8, "in": 4, "sparsity": 0.9, "batch": 1, "dtype": "float32"}
    cases = [{"routine": "spmm_t", "kernel": "spmm_t_rows", **facts}, {"routine": "spmm", "kernel": batch, **facts}]
    records = profile_kernels.of_cases(cases, kernels)
    assert [[(k["name"], k["time_us"]) for k in r["kernels"]] for r in records] == [[("spmm_t_rows", 8), (two, 2)], [(lines, 4), (batch, 40)]]
    text = result_pages.profile_page({"records": records}, "Source: here.")
    assert "Source: here." in text and "| spmm_t 8 × 4, 90 %, batch 1, float32 | `spmm_t_rows` | 8.00 µs |" in text and "|  | `spmm_batch` |" in text
    with pytest.raises(AssertionError, match="belong to no case"):
        profile_kernels.of_cases(cases[:1], kernels)
    with pytest.raises(AssertionError, match="was launched"):
        profile_kernels.of_cases([{**cases[0], "kernel": "spmm_rows"}], kernels)


@pytest.mark.parametrize(("status", "expected"), [(3, "not run"), (1, "failed"), (None, "failed"), (0, "failed")])  # 0 without a file
def test_a_profile_that_cannot_be_taken_is_not_passed(tmp_path, status, expected):
    class Fake(gpu_suite.Suite):
        def run(self, command, limit, **environment):
            return gpu_suite.Output(status, "profile: ncu (Nsight Compute) is not installed")

    suite = Fake(out=tmp_path, compiled=tmp_path, data=None, deadline=gpu_suite.time.monotonic() + 500, is_quick=False)
    assert gpu_suite.PARTS["profile"](suite) == {"status": expected, "detail": "profile: ncu (Nsight Compute) is not installed"}


def test_printed_numbers_say_where_and_how_they_are_read():
    paper = json.loads((ROOT / "benchmarks/paper.json").read_text())
    for number in paper["numbers"]:
        assert set(number) == {"suite", "where", "what", "printed", "read"} and number["suite"] in result_pages.PAGES and all(number.values())


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (0, "records: x.json", {"status": "passed", "detail": "1 records"}),
        (0, "3 of 9 records remain; the same command goes on with them\nrecords: x.json", {"status": "not run", "detail": "1 records, 3 remain"}),
        (1, "RuntimeError: broken", {"status": "failed", "detail": "1 records; RuntimeError: broken"}),
        (None, "stopped after 9 s", {"status": "failed", "detail": "1 records; stopped after 9 s"}),
    ],
)
def test_a_suite_of_the_gpu_suite_goes_on_with_the_committed_records(tmp_path, status, text, expected):
    (tmp_path / "out").mkdir()
    (tmp_path / "paper-layer.json").write_text('{"records": [{}]}')
    ran = []

    class Fake(gpu_suite.Suite):
        def run(self, command, limit, **environment):
            ran.append((command, limit))
            return gpu_suite.Output(status, text)

    suite = Fake(out=tmp_path / "out", compiled=tmp_path, data=None, deadline=gpu_suite.time.monotonic() + 500, is_quick=False, committed=tmp_path)
    step = gpu_suite.PARTS["paper-layer"](suite)
    assert step["status"] == expected["status"] and step["detail"].startswith(expected["detail"])
    assert (tmp_path / "out/paper-layer.json").is_file() and "--limit" in ran[0][0] and 400 < ran[0][1] < 500


def test_the_page_of_trainings_sets_accuracies_beside_what_is_published_and_beside_the_mask():
    def side(name, kind, accuracy):
        memory = {"weights": 1024, "indices": 0, "gradients": 0, "optimizer": 0}
        record = {"contender": name, "kind": kind, "seed": 0, "data": "mnist", "network": "784-300-100-10", "sparsity": 0.9, "device": "cuda"}
        entry = {"contender": name, "seeds": [0, 1], "accuracy": accuracy, "accuracy_error": 0.03, "best_accuracy": 99.0}
        return record | {"step_time_us": 100.0, "bytes": memory}, entry

    sides = [side("dense_mask", "dense_mask", 98.4), side("snack", "snack", 98.5)]
    document = {"suite": "train-lenet-300-100", "provenance": {}, "records": [r for r, _ in sides], "summary": [s for _, s in sides]}
    sides[1][1]["minus_mask"] = 0.1
    path = ROOT / "benchmarks/results/h200/train-lenet-300-100-0.9.json"
    text = training_page.training_page({path: document}, lambda path, facts: f"Source: {path.name}.")
    assert "| 90 % | SNACK | 98.50 ± 0.03 % | 99.00 % | 98.39 % | **+0.10 (2.4 s.e.)** | 100 µs | 1.00 KiB |" in text
    assert "2 seeds." in text and "* On cuda. Source: train-lenet-300-100-0.9.json." in text
    assert training_page.recipe_of({"suite": "train-mnist"}) is None
