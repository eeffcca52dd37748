"""`mok.memory_estimate(device="cuda")` against what a workspace takes from this GPU."""

import gc

import pytest
import torch

import mok
from mok import functional, workspace
from mok.functional import MoKConfig
from tests._functional import step
from tests.gpu._moe import DEVICE, gpu_case

pytestmark = pytest.mark.usefixtures("needs_sm90")

MIB = 2**20


@pytest.fixture(autouse=True)
def no_workspaces_left():
    functional.clear_workspace_cache()
    yield
    functional.clear_workspace_cache()


def taken() -> int:
    """Bytes of the GPU that are neither free nor in torch's cache."""
    gc.collect()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


# T, K, E, H, I
@pytest.mark.parametrize(
    ("sizes", "shared", "save", "ring_rows"),
    [
        ((4096, 4, 16, 1024, 768), None, "gate_up", 131072),
        ((4096, 4, 16, 1024, 512), 320, "all", 131072),
        ((3000, 4, 8, 512, 1024), None, "none", 1024),
    ],
)
def test_the_workspace_is_as_large_as_estimated(sizes, shared, save, ring_rows):
    tokens, top_k, experts, hidden, intermediate = sizes
    config = MoKConfig(save=save, macrobatch_size=ring_rows)
    case = gpu_case(*sizes, shared=shared)
    step(config, case)  # kernels are loaded
    functional.clear_workspace_cache()
    opened_before, before = workspace.all_open(), taken()
    step(config, case)
    (opened,) = [each for each in workspace.all_open() if each not in opened_before]
    estimate = mok.memory_estimate(
        max_tokens=tokens,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=experts,
        top_k=top_k,
        shared_intermediate_size=shared,
        save=save,
        ring_rows=ring_rows,
        device=DEVICE,
        multiprocessors=torch.cuda.get_device_properties(DEVICE).multi_processor_count,
    )
    expected = estimate.total("workspace")
    # The window's rounding to 2 MiB is not part of memory_bytes.
    assert opened.memory_bytes <= expected < opened.memory_bytes + 2 * MIB
    assert abs(taken() - before - expected) <= 4 * MIB
