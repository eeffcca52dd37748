"""Spells out `torch.ops.mok.*` calls of one rank from the cases of tests/_numerics.py."""

import torch

from mok import ops
from mok.shapes import TENSOR_NAMES, LayerSettings, LayerTensors
from tests._numerics import BIASES, SHARED, WEIGHTS, Case

CONTEXT = ("x_rows", "gate", "up", "shared_gate", "shared_up")


def op_arguments(
    case: Case, *, save: str, ring_rows: int, dtype=torch.bfloat16, gradients: int = 0, **changes
) -> tuple[LayerTensors, LayerSettings]:
    """The tensors and settings of a call; `changes` replaces settings."""
    renamed = {"x_TH": "x", "topk_weights_TK": "topk_weights", "shared_weight_T": "shared_weight"}
    tensors = {"topk_ids": case.topk_ids_TK}
    for name, tensor in case.tensors.items():
        name = renamed.get(name, name)
        tensors[name] = tensor if name in ("topk_weights", "shared_weight") else tensor.to(dtype)
    settings = {
        "workspace": ops._local_workspace(),
        "num_experts": len(tensors["w_gate"]),
        "max_tokens": len(case.topk_ids_TK),
        "ring_rows": ring_rows,
        "save": save,
        "gradients": gradients,
    }
    return LayerTensors(**tensors), LayerSettings(**{**settings, **case.settings, **changes})


def moe_arguments(case: Case, **changes) -> dict:
    """The arguments of `mok.moe` by name, with some of them changed."""
    names = [
        name for name in ("x_TH", "topk_weights_TK", *WEIGHTS, *BIASES) if name in case.tensors
    ]
    arguments = {name: case.tensors[name] for name in names}
    arguments["topk_ids_TK"] = case.topk_ids_TK
    if SHARED[0] in case.tensors:
        arguments["shared"] = tuple(case.tensors[name] for name in SHARED)
        arguments["shared_weight_T"] = case.tensors.get("shared_weight_T")
    return arguments | case.settings | changes


def flat_arguments(case: Case, *, requires_grad=(), save="gate_up", ring_rows=256, **options):
    """The positional arguments of moe_forward."""
    tensors, settings = op_arguments(case, save=save, ring_rows=ring_rows, **options)
    values = []
    for name, tensor in zip(TENSOR_NAMES, tensors.in_order(), strict=True):
        needs_grad = name in requires_grad and tensor is not None
        values.append(tensor.clone().requires_grad_() if needs_grad else tensor)
    return (*values, *settings.in_order())
