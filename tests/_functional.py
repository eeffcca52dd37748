"""A step through `mok.functional`, on the device of its case."""

import torch

from mok import functional
from tests._numerics import SHARED, WEIGHTS

BF16 = torch.bfloat16


def arguments(case, dtype=BF16):
    """(x, router_weights, three shared or None, three routed)."""
    tensors = case.tensors
    shared = [tensors[name].to(dtype) if SHARED[0] in tensors else None for name in SHARED]
    routed = [tensors[name].to(dtype) for name in WEIGHTS]
    return tensors["x_TH"].to(dtype), tensors["topk_weights_TK"], *shared, *routed


def get_workspace(config, case, dtype=BF16, num_local_tokens=None):
    num_tokens, hidden = case.tensors["x_TH"].shape
    return functional.get_workspace(
        config,
        None,
        device=case.tensors["x_TH"].device.type,
        num_local_tokens=num_tokens if num_local_tokens is None else num_local_tokens,
        hidden_size=hidden,
        topk=case.topk_ids_TK.shape[1],
        dtype=dtype,
    )


NAMES = (
    *("dx_TH", "dtopk_weights_TK", "dw_gate", "dw_up", "dw_down"),
    *("dshared_gate", "dshared_up", "dshared_down"),
)


def step(config, case, dtype=BF16, recompute=False):
    """Forward and backward, named as `run` names the results of `mok.moe`."""
    workspace = get_workspace(config, case, dtype)
    num_local = len(case.tensors["w_gate"])
    limit = case.settings["swiglu_limit"]
    schedule = functional.build_schedule(
        workspace, config, case.topk_ids_TK, num_local_experts=num_local
    )
    args = arguments(case, dtype)
    out, context = functional.forward(config, workspace, schedule, *args, limit)
    if recompute:
        x, _, shared_gate, shared_up, _, gate, up, _ = args
        context = functional.recompute_forward_context(
            config, workspace, schedule, x, shared_gate, shared_up, gate, up, limit
        )
    gradients = functional.backward(
        config, workspace, schedule, context, case.dout_TH.to(dtype), *args, limit
    )
    named = zip(NAMES, gradients, strict=True)
    return {"out": out} | {name: value for name, value in named if value is not None}
