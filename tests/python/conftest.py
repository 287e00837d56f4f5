"""Shared by all tests: the path of helper modules, markers, a fixed hypothesis profile, threads put back."""

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
