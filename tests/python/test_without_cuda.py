"""What can be known of CUDA without a card: the library loads, plans are made for a stated card, and absence is told in a sentence."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import snack
from checks import fails, layer
from snack import _lib, ops
from snack.cli.main import main
from snack.nn import SparseLinear

H200 = (9, 0, 132, 232_448, 60 * 2**20)  # compute capability, multiprocessors, shared and L2 bytes


# ---- the library ----


def test_the_cuda_library_is_loaded():
    """The same file serves a PyTorch with and without CUDA; a build without nvcc is not what is tested here."""
    assert _lib.CUDA_PATH is not None, _lib._cuda_missing
    for operation in ("spmm", "spmm_t", "sddmm", "rewire", "select_smallest", "grow_uniform", "grow_gradient", "pack", "unpack"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"snack::{operation}", "CUDA"), operation
    assert torch.ops.snack.cuda_runs_on(_lib.architectures(), 9, 0)
    assert torch.ops.snack.cuda_devices() == torch.cuda.device_count()


def test_the_cuda_library_needs_nothing_of_cuda():
    """No cudart, cuBLAS, cuSPARSE or libtorch_cuda: what a CPU-only PyTorch lacks must not be linked."""
    with open(_lib.CUDA_PATH, "rb") as file:
        contents = file.read()
    for name in (b"libcudart.so", b"libcublas", b"libcusparse", b"libtorch_cuda.so", b"libc10_cuda.so"):
        assert name not in contents, name


@pytest.mark.parametrize(
    ("architectures", "capability", "expected"),
    [
        ("80 86 90", (9, 0), True),
        ("80", (8, 6), True),  # machine code runs on later minor versions
        ("86", (8, 0), False),
        ("80", (9, 0), False),  # but not on another major version
        ("90a", (9, 0), True),
        ("100a", (10, 3), False),  # of an architecture with suffix a on that one alone
        ("80 120+PTX", (12, 1), True),
        ("80+PTX", (9, 0), True),
        ("120+PTX", (9, 0), False),
        ("80", (7, 5), False),
        ("", (9, 0), False),
    ],
)
def test_which_cards_the_binary_serves(architectures, capability, expected):
    assert torch.ops.snack.cuda_runs_on(architectures, *capability) == expected


def test_import_initialises_nothing():
    code = "import torch, snack; snack.SparseLinear; raise SystemExit(torch.cuda.is_initialized())"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- plans ----


@pytest.mark.parametrize("batch", [0, 1, 4, 33, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plans_for_a_stated_card(batch, dtype):
    for code, name in enumerate(("spmm", "spmm_t", "sddmm")):
        for nnz in (5_000_000, 500):  # narrow tiles; tall tiles
            plan = torch.ops.snack.explain_cuda(code, 10_000, 10_000, nnz, batch, dtype, 0, *H200)
            assert plan.startswith(f"kernel {name}_") and "stream" in plan and "workspace" in plan
        assert "coo" in torch.ops.snack.explain_cuda(code, 10_000, 10_000, 500, batch, dtype, ops.REGIMES["coo"], *H200)


def test_plans_that_no_card_has():
    for dtype, regime, words in ((torch.float64, "auto", "float64"), (torch.float32, "panel", "panel"), (torch.float32, "tensor", "tensor")):
        with pytest.raises(RuntimeError, match=words):
            torch.ops.snack.explain_cuda(0, 100, 100, 500, 3, dtype, ops.REGIMES[regime], *H200)


# ---- absence ----


def test_no_library(tmp_path):
    """A build without nvcc: the CPU works, and who asks for CUDA hears why not."""
    shutil.copy(_lib.PATH, tmp_path)
    code = (
        "import torch, snack\n"
        "assert snack.SparseLinear(4, 4, sparsity=0.5)(torch.ones(2, 4)).shape == (2, 4)\n"
        "try:\n"
        "    snack.SparseLinear(4, 4, sparsity=0.5, device='cuda')\n"
        "except snack.SnackError as error:\n"
        "    print(error)\n"
    )
    environment = os.environ | {"SNACK_LIB_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SparseLinear: device 'cuda' was asked for") and "has no libsnack_ops_cuda.so" in done.stdout
    assert done.stdout.count("\n") == 1
    doctor = subprocess.run([sys.executable, "-m", "snack", "doctor", "--json"], env=environment, capture_output=True, text=True)
    assert doctor.returncode == 0 and json.loads(doctor.stdout)["environment"]["cuda"].startswith("absent: this build of SNACK has no")


def test_a_library_that_does_not_load(tmp_path):
    shutil.copy(_lib.PATH, tmp_path)
    (tmp_path / _lib.CUDA_LIBRARY).write_bytes(b"not a library")
    environment = os.environ | {"SNACK_LIB_DIR": str(tmp_path)}
    code = "import snack; print(snack._lib.status()['cuda'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "does not load with PyTorch" in done.stdout and done.stdout.count("\n") == 1


def absent(monkeypatch, version="13.0", cards=0):
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "Old Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (5, 2))


@pytest.mark.parametrize(
    ("situation", "words"),
    [
        ({"version": None}, ["built without CUDA", "CUDA build"]),
        ({"cards": 0}, ["no usable CUDA device"]),
        ({"cards": 1}, ["Old Card", "compute capability 5.2", "has code for", "SNACK_CUDA_ARCHITECTURES=52"]),
    ],
    ids=["cpu-only PyTorch", "no card", "old card"],
)
def test_why_there_is_no_cuda(monkeypatch, capsys, situation, words):
    absent(monkeypatch, **situation)
    fails(["SparseLinear", "'cuda'", *words], SparseLinear, 4, 4, sparsity=0.5, device="cuda")
    status = _lib.status()["cuda"]
    assert status.startswith("absent: ") and "\n" not in status and all(word in status for word in words)
    assert main(["train", "--device", "cuda"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("snack: --device cuda: ") and error.count("\n") == 1 and all(word in error for word in words)


def test_a_device_that_does_not_exist(monkeypatch):
    absent(monkeypatch, cards=1)
    fails(["cuda:3 does not exist", "1 CUDA device"], SparseLinear, 4, 4, sparsity=0.5, device="cuda:3")
    fails(["xpu", "'cpu' and 'cuda'"], SparseLinear, 4, 4, sparsity=0.5, device="xpu")


def test_an_old_card_is_told_when_cuda_starts(monkeypatch):
    absent(monkeypatch, cards=1)
    with pytest.warns(UserWarning, match=r"snack: cuda:0 \(Old Card\) has compute capability 5\.2.*has code for"):
        _lib._warn_of_cards()


def test_no_warning_before_cuda_starts(monkeypatch):
    queued = []
    absent(monkeypatch, cards=1)
    monkeypatch.setattr(torch.cuda, "_lazy_call", queued.append)
    _lib._watch_cards()
    assert queued == [_lib._warn_of_cards]
    monkeypatch.setattr(torch.version, "cuda", None)
    _lib._watch_cards()
    assert len(queued) == 1


if torch.version.cuda is None:

    def test_moving_a_layer_is_pytorchs_own_error():
        a = layer()
        for move in (a.cuda, lambda: a.to("cuda")):
            with pytest.raises((AssertionError, RuntimeError)):
                move()
        assert a(torch.ones(2, 70)).shape == (2, 33)


def test_operators_without_cuda_kernels_say_why(monkeypatch):
    """What the dispatcher says of tensors on a card where no CUDA library is loaded becomes a sentence."""
    from snack.formats.pattern import call

    monkeypatch.setattr(_lib, "CUDA_PATH", None)
    monkeypatch.setattr(_lib, "_cuda_missing", "this build of SNACK has no CUDA library")

    def spmm():
        raise NotImplementedError("Could not run 'snack::spmm' with arguments from the 'CUDA' backend. This could be because\nmore")

    fails(["spmm", "on a card", "no CUDA library"], call, spmm)


def test_memory_errors_are_sentences_and_pytorchs_own():
    from snack.formats.pattern import call

    def rewire():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    fails(["rewire: out of memory: CUDA out of memory"], call, rewire)
    with pytest.raises(torch.OutOfMemoryError):
        call(rewire)

    def spmm():
        raise RuntimeError("spmm: out of memory: a tensor of shape (3, 4) does not fit on cuda:0; free memory.\nException raised from x")

    assert isinstance(pytest.raises(torch.OutOfMemoryError, call, spmm).value, snack.SnackError)


def test_both_libraries_come_from_one_folder():
    """A mixed installation cannot be loaded."""
    assert Path(_lib.status()["library"]).parent == _lib.CUDA_PATH.parent
