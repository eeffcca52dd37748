"""What every test runs under: one thread, seeded, uninitialised memory poisoned."""

import os

from tests._worker import TEST_ENVIRONMENT

os.environ.update(TEST_ENVIRONMENT)

import pytest
import torch

from tests._harness import close_pools
from tests._poison import poison_uninitialized_memory

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest):
    """NaN in everything that is allocated and not written."""
    poison_uninitialized_memory("no_poison" not in request.keywords)
    yield
    poison_uninitialized_memory(False)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_sessionfinish() -> None:
    close_pools()
