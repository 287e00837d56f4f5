"""The project itself: layer check, README example and tables, diagnosis, inspection, results."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import snack
from snack.bench import records
from snack.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def check_layers(root):
    return subprocess.run([sys.executable, ROOT / "tools/check_layers.py", root], capture_output=True, text=True)


def test_layers_point_the_right_way():
    assert check_layers(ROOT).returncode == 0


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("src/cpu/spmm.cpp", "#include <torch/csrc/stable/tensor.h>\n", "torch headers belong in torch/ only"),
        ("src/cpu/spmm.cpp", '#include "../reference/element.hpp"\n', "wrong way"),
        ("include/snack/core/error.hpp", '#include "snack/plan/plan.hpp"\n', "wrong way"),
        ("include/snack/core/error.hpp", "#include <cuda_runtime.h>\n", "CUDA headers"),
        ("src/cuda/finish.cu", "__global__ void __launch_bounds__(f(1), 2) late(int* x) {\n  *x = 1;\n}\n", "kernel late does not call await"),
        ("src/cuda/finish.cu", "__device__ int old(const int* __restrict__ x) { return *x; }\n", "__restrict__, but the kernel before"),
        ("python/snack/formats/pattern.py", "from ..nn import SparseLinear\n", "wrong way"),
        ("python/snack/ops/edits.py", "def late():\n    import snack.cli.main\n", "wrong way"),
    ],
)
def test_layer_check_finds_wrong_arrows(tmp_path, file, text, complaint):
    for top in ("include", "src", "torch", "python"):
        shutil.copytree(ROOT / top, tmp_path / top, ignore=shutil.ignore_patterns("__pycache__"))
    assert check_layers(tmp_path).returncode == 0
    with open(tmp_path / file, "a") as out:
        out.write(text)
    result = check_layers(tmp_path)
    assert result.returncode == 1 and complaint in result.stdout


def test_readme_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"## Quick start\s+```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "model.safetensors").is_file()
    assert "23,520" in capsys.readouterr().out  # 10 % of 784 x 300


def test_readme_tables_are_those_of_the_results():
    result = subprocess.run([sys.executable, ROOT / "tools/readme_tables.py", "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_public_name_is_missing():
    for name in snack.__all__:
        assert getattr(snack, name) is not None
    with pytest.raises(AttributeError):
        snack.nothing_of_that_name  # noqa: B018


def test_import_is_light():
    code = "import snack, sys; sys.exit(any(m in sys.modules for m in ('matplotlib', 'rich', 'sklearn', 'scipy', 'safetensors')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_without_the_library_every_name_says_why(tmp_path):
    environment = {**os.environ, "SNACK_LIB_DIR": str(tmp_path)}
    for code in ("import snack; snack.sparsify", "from snack import Pattern", "import snack.nn"):
        result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert result.returncode == 1 and "libsnack_ops.so were not found" in result.stderr.splitlines()[-1]


# ---- doctor, inspect ----


def test_doctor_passes_and_speaks_json(capsys):
    assert main(["doctor"]) == 0
    assert "spmm_t" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["environment"]["isa"] in ("base", "avx2", "avx512")
    assert all(result["ok"] for result in report["operations"].values()) and len(report["operations"]) == 9


def test_doctor_finds_a_wrong_operation(monkeypatch, capsys):
    from snack.cli import doctor

    monkeypatch.setattr(doctor, "_tests", lambda device: {"spmm": lambda: 1 / 0})
    assert main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_doctor_speaks_without_the_library(tmp_path):
    environment = {**os.environ, "SNACK_LIB_DIR": str(tmp_path)}
    run = [sys.executable, "-m", "snack"]
    result = subprocess.run([*run, "doctor"], env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and "not found at" in result.stdout
    result = subprocess.run([*run, "train"], env=environment, capture_output=True, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr and "SNACK_LIB_DIR" in result.stderr


@pytest.mark.parametrize("isa", ["base", "avx2"])
def test_doctor_passes_on_older_instruction_sets(isa):
    environment = {**os.environ, "SNACK_ISA": isa}
    result = subprocess.run([sys.executable, "-m", "snack", "doctor", "--json"], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert json.loads(result.stdout)["environment"]["isa"] == isa


def test_inspect_lists_layers(tmp_path, capsys):
    model = torch.nn.Sequential(snack.SparseLinear(40, 30, sparsity=0.9), torch.nn.Linear(30, 2))
    snack.save(model, tmp_path / "m.safetensors", metadata={"note": "hello"})
    assert main(["inspect", str(tmp_path / "m.safetensors")]) == 0
    out = capsys.readouterr().out
    assert "120" in out and "30 x 40" in out and "hello" in out and "1.weight" in out
    assert main(["inspect", "--json", str(tmp_path / "m.safetensors")]) == 0
    assert json.loads(capsys.readouterr().out)["layers"][0]["nnz"] == 120


def test_inspect_refuses_other_files(tmp_path, capsys):
    (tmp_path / "x.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    for path in (tmp_path / "x.safetensors", tmp_path / "absent", tmp_path):
        assert main(["inspect", str(path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith("snack: ")


# ---- results ----


def test_results_of_another_schema_are_refused(tmp_path):
    for text in ('{"schema": 2, "records": []}', '{"schema": 1', "[]"):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(snack.SnackError):
            records.read(tmp_path / "r.json")


def test_source_hash_follows_the_sources(tmp_path):
    for top in ("include", "src", "torch", "python", "cmake"):
        shutil.copytree(ROOT / top, tmp_path / top, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    before = records.source_hash(tmp_path)
    assert before == records.source_hash(tmp_path)
    with open(tmp_path / "src/cpu/spmm.cpp", "a") as out:
        out.write("\n")
    assert records.source_hash(tmp_path) != before
