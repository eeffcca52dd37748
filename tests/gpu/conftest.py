"""Tests of this folder need a CUDA device and a build with kernels for it; elsewhere they skip.

MOK_REQUIRE_GPU=1 makes them fail instead: for machines that are there to run them.
"""

import os

import pytest
import torch

import mok


def why_not() -> str | None:
    """One sentence, or None where the tests can run."""
    if not torch.cuda.is_available():
        return "no CUDA device is visible to this process"
    if mok._C is None or not hasattr(torch.ops.mok, "_ptx_test"):
        return "this copy of mok was built without CUDA"
    return None


def skip(reason: str) -> None:
    (pytest.fail if os.environ.get("MOK_REQUIRE_GPU") == "1" else pytest.skip)(reason)


@pytest.fixture(scope="session", autouse=True)
def needs_cuda() -> None:
    if reason := why_not():
        skip(reason)


@pytest.fixture
def needs_sm90() -> None:
    if not hasattr(torch.ops.mok, "_sm90_ptx_test"):
        skip("this copy of mok was built without kernels for sm_90a")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU is not of compute capability 9.0")
