"""snack plot: the committed results files, and files that cannot be drawn."""

import json
from pathlib import Path

import pytest

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


def test_who_is_slower_and_who_did_not_run(tmp_path):
    """A peer that is faster than ours keeps its bar; one that did not run has none."""
    from snack.cli import bench_figure

    document = json.loads((RESULTS / "h200/cuda.json").read_text())
    record = bench_figure._products(document["records"])[-1]
    record["time_us"] = 1000.0
    record["peers"]["coo_atomics"] = {"not_run": "because"}
    times = bench_figure._times(record, on_card=True)
    assert "COO, atomics" not in times and "torch CSR" not in times and list(times)[-1] == "SNACK"
    assert times["cuSPARSE"] == min(record["peers"][p]["time_us"] for p in ("torch_csr", "torch_coo", "cupy_csr"))
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
