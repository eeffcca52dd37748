"""`mok.functional` on a GPU: the bits of `mok.moe`, with and without a recomputed context."""

import pytest
import torch

from mok import functional
from mok.functional import MoKConfig
from tests._numerics import SHARED, WEIGHTS, assert_bitwise_equal
from tests.gpu._moe import DEVICE, gpu_case, ours

pytestmark = pytest.mark.usefixtures("needs_sm90")

BF16 = torch.bfloat16
NAMES = (
    *("dx_TH", "dtopk_weights_TK", "dw_gate", "dw_up", "dw_down"),
    *("dshared_gate", "dshared_up", "dshared_down"),
)


@pytest.fixture(autouse=True)
def no_workspaces_left():
    yield
    functional.clear_workspace_cache()


def step(config, case, recompute):
    tensors = case.tensors
    shared = [tensors[name].to(BF16) if name in tensors else None for name in SHARED]
    routed = [tensors[name].to(BF16) for name in WEIGHTS]
    x_TH, weights_TK = tensors["x_TH"].to(BF16), tensors["topk_weights_TK"]
    workspace = functional.get_workspace(
        config,
        None,
        device=DEVICE,
        num_local_tokens=x_TH.shape[0],
        hidden_size=x_TH.shape[1],
        topk=case.topk_ids_TK.shape[1],
        dtype=BF16,
    )
    schedule = functional.build_schedule(
        workspace, config, case.topk_ids_TK, num_local_experts=len(routed[0])
    )
    arguments = (x_TH, weights_TK, *shared, *routed)
    out, context = functional.forward(config, workspace, schedule, *arguments, None)
    if recompute:
        context = functional.recompute_forward_context(
            config, workspace, schedule, x_TH, *shared[:2], *routed[:2], None
        )
    gradients = functional.backward(
        config, workspace, schedule, context, case.dout_TH.to(BF16), *arguments, None
    )
    named = zip(NAMES, gradients, strict=True)
    return {"out": out} | {name: value for name, value in named if value is not None}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("save", ["all", "gate_up", "none"])
@pytest.mark.parametrize("shared", [None, 72])
def test_gives_the_bits_of_moe(shared, save, recompute):
    case = gpu_case(300, 4, 8, 128, 64, shared=shared)
    got = step(MoKConfig(save=save), case, recompute)
    assert_bitwise_equal(got, ours(case))
