"""snack plot: the committed results files, and files that cannot be drawn."""

import json
from pathlib import Path

import pytest

from snack.bench.suites import suite_cases
from snack.cli.main import main

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.mark.parametrize("name", ["h200/cuda", "cpu-avx512/cpu", "cpu-avx512/train-digits", "h200/train-mnist"])
def test_a_results_file_is_drawn(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(RESULTS / f"{name}.json")]) == 0
    picture = tmp_path / f"{name.split('/')[1]}.png"
    assert png_size(picture) == (1920, 1080)
    assert picture.name in capsys.readouterr().out


def paper_document(suite, keep=lambda case: True):
    """Times that grow with the bytes, so that the lines cross somewhere."""
    made = []
    for case in filter(keep, suite_cases(suite, "cuda")):
        out, in_ = case.shape
        sizes = {"snack": (1 - case.sparsity) * out * in_ * 1.5 * case.batch**0.5, "dense": out * in_, "dense_mask": 4 * out * in_}
        sides = {name: {} for name in ("snack", *case.peers)}
        for name, side in sides.items():
            size = sizes.get(name, 1.2 * out * in_)
            if name in ("sputnik", "jax_bsr") or (case.cap_gib and size * 16 > case.cap_gib * 2**30):
                side["not_run"] = "OutOfMemoryError: CUDA out of memory" if case.cap_gib else "nobody built it"
            else:
                side |= {"peak_bytes": int(16 * size), "infer_peak_bytes": int(4 * size)}
                side |= {} if case.routine == "memory" else {"time_us": 2 + size / 1e6}
                side |= {"energy_mj": size / 1e6, "power_w": 400.0, "co2_ug": size / 1e7} if name in case.energy else {}
        params = {"params": {"cap_gib": case.cap_gib}} if case.cap_gib else {}
        head = {"case": str(case), "routine": case.routine, "out": out, "in": in_, "batch": case.batch, "sparsity": case.sparsity}
        made.append({**head, "dtype": case.dtype, "l2": case.l2, **params, **sides.pop("snack"), "peers": sides})
    facts = {"device": "h200", "card": "NVIDIA H200", "cuda": "13.0", "torch": "2.11", "date": "2026-01-01", "source_hash": "0"}
    return {"schema": 1, "suite": suite, "provenance": facts, "records": made}


@pytest.mark.parametrize("suite", ["paper-kernels", "paper-layer", "paper-memory"])
def test_a_suite_of_the_paper_is_drawn_whole_and_in_part(suite, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, keep in (("whole", lambda case: True), ("part", lambda case: case.dtype == "bfloat16" or case.cap_gib or case.batch == 64)):
        document = paper_document(suite, keep)
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
        status = main(["plot", f"{name}.json"])
        assert status == (0 if document["records"] else 2)
        assert not document["records"] or png_size(tmp_path / f"{name}.png") == (1920, 1080)


def test_lines_of_a_paper_picture_are_the_records(tmp_path):
    from snack.cli import paper_figure

    record = {"out": 8, "in": 4, "batch": 1, "sparsity": 0.9, "time_us": 2.0, "peers": {
        "torch_csr": {"time_us": 8.0}, "cupy_csr": {"time_us": 6.0}, "torch_coo": {"not_run": "why"}, "dense": {"not_run": "why"}}}
    assert paper_figure._points([record], "size", paper_figure._ratio("time_us"), "cuSPARSE") == [(8, 3.0)]
    assert paper_figure._points([record], "sparsity", paper_figure._side("time_us"), "SNACK") == [(pytest.approx(10), 2.0)]
    assert paper_figure._points([record], "size", paper_figure._side("time_us"), "dense") == []


def test_who_is_slower_and_who_did_not_run(tmp_path):
    """A peer that is faster than ours keeps its bar; one that did not run has none."""
    from snack.cli import bench_figure

    document = json.loads((RESULTS / "h200/cuda.json").read_text())
    record = bench_figure._products(document["records"])[-1]
    record["time_us"] = 1000.0
    record["peers"]["coo_atomics"] = {"not_run": "because"}
    times = bench_figure._times(record, on_card=True)
    assert "COO, atomics" not in times and "torch CSR" not in times and list(times)[-1] == "SNACK"
    assert times["cuSPARSE"] == min(
        record["peers"][p]["time_us"] for p in ("torch_csr", "torch_coo", "cupy_csr", "cupy_coo") if "time_us" in record["peers"].get(p, {})
    )
    assert bench_figure.draw(document, tmp_path / "slow.png").is_file()


@pytest.mark.parametrize(
    ("content", "picture", "sentence"),
    [
        ("{", "a.png", "is not complete JSON"),
        ('{"schema": 2, "records": []}', "a.png", "is not a results file of schema 1"),
        ('{"schema": 1, "records": [], "provenance": {}}', "a.png", "there is nothing to draw"),
        ('{"schema": 1, "records": [], "provenance": {}}', "a.txt", "no suffix of a picture"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(content, picture, sentence, tmp_path, capsys):
    file = tmp_path / "results.json"
    file.write_text(content)
    assert main(["plot", str(file), "--figure", str(tmp_path / picture)]) == 2
    assert sentence in capsys.readouterr().err and not (tmp_path / picture).exists()


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["plot", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err
