"""`mok.moe` on this GPU: cases of tests/_numerics moved there, and what they are judged by."""

from dataclasses import replace

import torch

import mok
from mok.reference import moe_reference
from tests._numerics import Case, call, make_case, run

DEVICE = "cuda"

# K, E, H, I
SIZES = {
    "qwen": (8, 32, 512, 192),
    "gpt_oss": (4, 8, 2880, 2880),
    "tiny": (2, 4, 8, 8),
    "narrow": (3, 5, 72, 24),
    "one expert": (1, 1, 256, 264),
    "many experts": (4, 192, 64, 64),
}
FEATURES = {
    "shared": {"shared": 120},
    "shared gate": {"shared": 64, "shared_gate": True},
    "bias": {"bias": True},
    "limit": {"swiglu_limit": 0.7},
    "gpt_oss": {"activation": "gpt_oss", "bias": True},
    "one": {"routing": "one"},
    "uniform": {"routing": "uniform"},
}


def on_gpu(case: Case) -> Case:
    tensors = {name: tensor.to(DEVICE) for name, tensor in case.tensors.items()}
    return replace(
        case,
        tensors=tensors,
        topk_ids_TK=case.topk_ids_TK.to(DEVICE),
        dout_TH=case.dout_TH.to(DEVICE),
    )


def gpu_case(*sizes, **options) -> Case:
    return on_gpu(make_case(*sizes, **options))


def bf16_tensors(case: Case) -> dict[str, torch.Tensor]:
    """The arguments of a BF16 call; the routing's weights stay FP32."""
    wide = ("topk_weights_TK", "shared_weight_T")
    return {
        name: tensor if name in wide else tensor.bfloat16() for name, tensor in case.tensors.items()
    }


@torch.no_grad()
def forward(case: Case, tensors: dict | None = None, **options) -> torch.Tensor:
    tensors = bf16_tensors(case) if tensors is None else tensors
    return call(mok.moe, tensors, case.topk_ids_TK, **case.settings, **options)


@torch.no_grad()
def forward_legs(case: Case) -> tuple[dict, dict, dict]:
    """ours, plain BF16 PyTorch, exact: `three_way` of the forward pass."""
    exact = {name: tensor.double() for name, tensor in case.tensors.items()}
    arguments = (case.topk_ids_TK,)
    return (
        {"out": forward(case)},
        {"out": call(moe_reference, bf16_tensors(case), *arguments, **case.settings)},
        {"out": call(moe_reference, exact, *arguments, **case.settings, mask_dtype=torch.bfloat16)},
    )


def ours(case: Case, **options) -> dict:
    """Forward and backward: {"out": ..., "dx_TH": ..., ...}."""
    return run(mok.moe, case, torch.bfloat16, **options)
