"""Tests of this folder need a CUDA device and a build with kernels for it; elsewhere they skip."""

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


@pytest.fixture(scope="session", autouse=True)
def needs_cuda() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def needs_sm90() -> None:
    if not hasattr(torch.ops.mok, "_sm90_ptx_test"):
        pytest.skip("this copy of mok was built without kernels for sm_90a")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU is not of compute capability 9.0")
