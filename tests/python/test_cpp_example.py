"""The network that examples/cpp trains and saves without Python, loaded and run here."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import snack
from snack.nn import persistence

ROOT = Path(__file__).resolve().parents[2]
BUILDS = [ROOT / "build" / name for name in ("cuda", "cpu")]


def _package_folder() -> Path:
    """The folder in which the package test left the built example and its network; the test is run if it was not.

    Without a build of the library (someone runs pytest alone) a build for this test is made, which takes minutes.
    """
    for build in BUILDS:
        if (build / "package" / "digits.safetensors").is_file():
            return build / "package"
    build = next((b for b in BUILDS if (b / "snackConfig.cmake").is_file() and (b / "libsnack_defaults.a").is_file()), ROOT / "build" / "python-test")
    if not (build / "libsnack_defaults.a").is_file():
        options = ["-G", "Ninja", "-DSNACK_TORCH=OFF", "-DSNACK_CUDA=OFF"]
        subprocess.run(["cmake", "-S", str(ROOT), "-B", str(build), *options], check=True)
        subprocess.run(["cmake", "--build", str(build)], check=True)
    work = build / "package"
    environment = os.environ | {"PYTHON": sys.executable}
    subprocess.run([str(ROOT / "tests/cpp/package_test.sh"), str(build), str(work), "-DSNACK_CUDA=OFF"], check=True, env=environment)
    return work


@pytest.fixture(scope="module")
def package() -> Path:
    return _package_folder()


def _idx(path: Path) -> np.ndarray:
    content = path.read_bytes()
    shape = np.frombuffer(content, ">u4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape.astype(int))


def _test_rows(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The test images, standardised as the example says it does, and their labels."""
    parts = {part: _idx(folder / f"{part}-images-idx3-ubyte").reshape(-1, 64).astype(np.float64) for part in ("train", "t10k")}
    centre = parts["train"].mean(0)
    deviation = np.sqrt(((parts["train"] - centre) ** 2).mean())
    labels = _idx(folder / "t10k-labels-idx1-ubyte").astype(np.int64)
    return torch.tensor((parts["t10k"] - centre) / deviation, dtype=torch.float32), torch.tensor(labels)


@pytest.mark.timeout(900)
def test_a_network_trained_in_cpp_loads_and_predicts_the_same(package):
    file = package / "digits.safetensors"
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    snack.sparsify(model, 0.5)  # another sparsity than that of the file
    snack.load(file, like=model)
    assert sum(layer.nnz for layer in model if isinstance(layer, snack.SparseLinear)) == 5020
    x, y = _test_rows(package / "example" / "digits")
    accuracy = (model(x).argmax(1) == y).float().mean().item()
    told = float(persistence.read_header(file)["metadata"]["accuracy"])
    assert told > 0.95
    assert abs(accuracy - told) < 1.5 / len(y)  # a tie may fall the other way


@pytest.mark.timeout(900)
def test_inspect_lists_its_layers(package):
    header = persistence.read_header(package / "digits.safetensors")
    assert [(layer["name"], layer["shape"], layer["dtype"]) for layer in header["layers"]] == [
        ("0", (300, 64), "F32"),
        ("2", (100, 300), "F32"),
        ("4", (10, 100), "F32"),
    ]
    assert sum(layer["nnz"] for layer in header["layers"]) == 5020
    assert header["metadata"]["snack"] == persistence.FILE_VERSION and header["metadata"]["epochs"] == "20"
    listed = subprocess.run([sys.executable, "-m", "snack", "inspect", str(package / "digits.safetensors")], capture_output=True, text=True)
    assert listed.returncode == 0 and "300 x 64" in listed.stdout
