"""Shared by all tests: the path of helper modules, markers, devices, a fixed hypothesis profile, threads put back.

One test source for all backends: a test that takes the fixture `device` (or `on_device`) is collected for the CPU, and for CUDA
where there is a card. Nothing is skipped: what a card does not have (float64, the panel regime) is not collected for it.
"""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile(
    "snack", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("snack")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes seconds (still part of `make test`)")
    config.addinivalue_line("markers", "isa: product tests that are run again for every instruction set")
    config.addinivalue_line("markers", "cuda: runs on a card (collected only where there is one)")
    config.addinivalue_line("markers", "alone: holds times against a prediction, so nothing else may run on the card")
    config.addinivalue_line("markers", "cpu_only: not collected for a card, though its module is; the reason stands beside it")


_DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
# Tests of a card alone, and of two.
_ON_A_CARD = ["test_cuda.py", "test_cuda_bench.py", "test_cuda_dst_graph.py", "test_cuda_plan.py", "test_cuda_training.py"]
collect_ignore = [] if torch.cuda.is_available() else _ON_A_CARD
collect_ignore += [] if torch.cuda.device_count() >= 2 else ["test_cuda_devices.py"]


@pytest.fixture(scope="session", params=[pytest.param(d, marks=[pytest.mark.cuda] * (d == "cuda")) for d in _DEVICES])
def device(request):
    """Every device there is, one after the other."""
    return torch.device(request.param)


@pytest.fixture
def on_device(device):
    """`device` as PyTorch's default, so that tensors and layers without one of their own are made there."""
    if device.type != "cpu":
        torch.set_default_device(device)
    yield device
    torch.set_default_device(None)


def _is_for_a_card(item) -> bool:
    callspec = getattr(item, "callspec", None)
    if callspec is None or callspec.params.get("device") != "cuda":
        return True
    return torch.float64 not in callspec.params.values() and item.get_closest_marker("cpu_only") is None


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if _is_for_a_card(item)]


@pytest.fixture(autouse=True)
def _same_threads_and_seed():
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def two_threads():
    """Whatever the machine has: with one thread the split of the work would not be tested."""
    torch.set_num_threads(2)
