"""snack bench on a card: every routine as a replayed graph, memory under a cap, energy where NVML is.

Collected only where there is a card.
"""

import pytest
import torch

from snack import SnackError
from snack.bench import EnergyMeter
from snack.bench.case import PRODUCTS, ROUTINES, Case, cases
from snack.bench.cuda_timing import CudaMeter
from snack.bench.measure import Bench

pytestmark = pytest.mark.cuda

FACTS = {"copy_tb_s": 4.0, "l2_mb": 0.02}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_a_routine_is_measured_beside_its_peers(routine, dtype):
    bench = Bench(CudaMeter(samples=2), FACTS)
    for case in cases([routine], [(1024, 768)], [0.95], [1, 4], [dtype], l2=["warm", "cold"]):
        record = bench.measure(case)
        dense = record["peers"].get("dense", {})
        if routine == "memory":
            assert 0 < record["kept_bytes"] <= record["peak_bytes"] < dense["peak_bytes"] and record["infer_peak_bytes"] < record["peak_bytes"]
            continue
        assert record["time_us"] > 0 and record["mode"] == ("eager" if routine == "update" else "graph")
        if routine in PRODUCTS and case.l2 == "warm":
            assert record["eager_us"] > 0 and dense["time_us"] > 0 and record["peers"]["coo_atomics"]["time_us"] > 0
        if routine in ("layer_infer", "layer_step"):
            assert 0 < record["peak_bytes"] < dense["peak_bytes"]


def test_a_cap_turns_away_dense_and_is_lifted_afterwards():
    record = Bench(CudaMeter(samples=2), FACTS).measure(
        Case("memory", (4096, 4096), 0.95, 4, optimizer="Adam", cap_gib=0.125, peers=("dense", "dense_mask"))
    )
    assert record["peak_bytes"] < 2**27 and all("out of memory" in side["not_run"] for side in record["peers"].values())
    torch.empty(2**28, dtype=torch.uint8, device="cuda")  # more than the cap


def test_energy_of_work_or_a_sentence():
    try:
        meter = EnergyMeter(seconds=1, rounds=2, idle_seconds=1)
    except SnackError as error:
        assert "energy cannot be measured" in str(error) or "nvidia-ml-py" in str(error)
        return
    a = torch.randn(4096, 4096, device="cuda")
    found = meter.compare({"busy": lambda: a @ a})["busy"]
    assert found["power_w"] > found["idle_w"] and 0 < found["energy_net_mj"] < found["energy_mj"]
