"""The CUDA suite: its problems, peers, errors and records, computed on the CPU with another meter; and the command without a card."""

import json
import os
import subprocess
import sys

import pytest
import torch

from snack.bench import cuda, cuda_peers, records, timing


class HostMeter:
    """What the suite asks of a meter, with the host's clock."""

    mode = "eager"
    device = torch.device("cpu")

    def compare(self, contenders, samples=2):
        return {name: timing.interleave({name: lambda r=runs: [f() for f in r]}, 2)[name] for name, runs in contenders.items()}

    def eager_us(self, run):
        run()
        return 1.0

    def peak_bytes(self, make):
        make()()
        return 1

    def tidy(self):
        pass


FACTS = {"copy_tb_s": 4.0, "l2_mb": 0.02}
GRID = cuda.Grid(shapes=(cuda.Shape(96, (0.8,), (1, 3), cold=(1,)),), steps=((96, 0.8, 4),))


@pytest.fixture(scope="module")
def measured():
    # One sample is enough here: what is tested is what is measured, not how long it takes.
    seconds, timing.SAMPLE_SECONDS = timing.SAMPLE_SECONDS, 1e-5
    try:
        return list(cuda.run(GRID, HostMeter(), FACTS))
    finally:
        timing.SAMPLE_SECONDS = seconds


def test_every_routine_dtype_and_batch_is_measured(measured):
    products = [r for r in measured if r["routine"] != "layer_step"]
    warm = {(r["routine"], r["dtype"], r["batch"]) for r in products if r["l2"] == "warm"}
    assert warm == {(r, d, b) for r in cuda.ROUTINES for d in ("float32", "bfloat16") for b in (1, 3)}
    assert sum(r["l2"] == "cold" for r in products) == 6 and len(measured) == 19
    for r in products:
        assert r["time_us"] > 0 and r["eager_us"] > 0 and r["bytes"] == r["nnz"] * ({"float32": 4, "bfloat16": 2}[r["dtype"]] + 2)
        assert r["sparsity"] == 0.8 and r["floor_us"] == round(r["bytes"] / 4e6, 3)


def test_everybody_computes_the_product(measured):
    limits = {"float32": 1e-5, "bfloat16": 3e-2}
    for r in measured:
        assert 0 < r["rel_error"] < limits[r["dtype"]] and r["regime"] == "stream"
        for name, peer in r["peers"].items():
            assert "not_run" in peer or "rel_error" not in peer or 0 <= peer["rel_error"] < limits[r["dtype"]], name
    ran = {name for r in measured if r["l2"] == "warm" and r["dtype"] == "float32" for name, peer in r["peers"].items() if "time_us" in peer}
    assert {"dense", "dense_tf32", "dense_mask", "torch_csr", "torch_coo"} <= ran
    coo = next(r for r in measured if r["routine"] == "spmm")["peers"]["coo_atomics"]
    assert "not_run" in coo  # the CPU has no such regime: a peer's failure is a result
    assert not any("dense_tf32" in r["peers"] for r in measured if r["dtype"] == "bfloat16")


def test_cold_weights_take_turns(measured):
    cold = next(r for r in measured if r["l2"] == "cold")
    assert cold["params"]["copies"] >= 2 and "copies of W" in cold["peers"]["dense"]["note"]


def test_a_wrong_result_has_a_large_error():
    topology = cuda_peers.Topology.random(64, 0.5, "cpu")
    weight, x, dy = torch.randn(64, 64), torch.randn(4, 64), torch.randn(4, 64)
    mask = torch.zeros_like(weight)
    mask[topology.rows, topology.cols] = 1
    for routine in cuda.ROUTINES:
        case = cuda_peers.Case(routine, topology, weight, mask, weight[topology.rows, topology.cols], x, dy)
        right = cuda_peers.snack(case).runs[0]()
        assert case.error(right) < 1e-5 < 0.1 < case.error(right.flip(-1))


def test_a_step_that_fails_to_run_ends_the_suite():
    with pytest.raises(RuntimeError, match="SNACK itself did not run"):
        cuda._required({"not_run": "out of memory"}, 0.0, torch.float32)
    for error, dtype in ((2e-5, torch.float32), (0.1, torch.bfloat16), (float("nan"), torch.float32)):
        with pytest.raises(RuntimeError, match="off by"):
            cuda._required({"time_us": 1.0}, error, dtype)


@pytest.mark.parametrize(
    ("name", "count", "folder"), [("NVIDIA H200", 1, "h200"), ("NVIDIA H200", 2, "h200x2"), ("NVIDIA GeForce RTX 4090", 1, "rtx-4090")]
)
def test_results_of_a_card_have_a_folder(name, count, folder):
    assert records.card_name(name, count) == folder


def bench(*arguments):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-m", "snack", "bench", *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cuda"], "no card can be measured"),
        (["cuda", "--batch", "3"], "belong to --size"),
        (["cuda", "--quick", "--size", "64"], "--quick has sizes of its own"),
        (["cpu", "--quick"], "belongs to the suite cuda"),
    ],
)
def test_the_command_refuses_in_one_sentence(arguments, words):
    result = bench(*arguments)
    assert result.returncode == 2 and words in result.stderr and result.stderr.count("\n") == 1


def test_an_interrupted_suite_keeps_its_records(tmp_path, monkeypatch):
    from snack.cli import bench as command

    def measure(progress, provenance):
        yield {"routine": "spmm", "time_us": 1.0}
        raise RuntimeError("the card is gone")

    document = {"schema": 1, "suite": "cuda", "provenance": {}, "records": []}
    with pytest.raises(RuntimeError):
        command._measure(measure, document, tmp_path / "cuda.json", lambda: False)
    assert json.loads((tmp_path / "cuda.json").read_text())["records"] == [{"routine": "spmm", "time_us": 1.0}]
