"""Checks of what `mok.functional` is given."""

import torch
from torch import Tensor

from mok import workspace as _workspaces

_ROUTED = ("w_routed_gate", "w_routed_up", "w_routed_down")
_SHARED = ("w_shared_gate", "w_shared_up", "w_shared_down")


def check_routing(workspace, top_experts, num_local_experts) -> None:
    """Raises TypeError, ValueError for what `build_schedule` cannot take."""
    if not isinstance(top_experts, Tensor):
        raise TypeError(f"top_experts is {_kind(top_experts)}: pass a tensor [T, K]")
    if top_experts.dim() != 2 or top_experts.shape[1] != workspace.topk:
        raise ValueError(
            f"top_experts has shape {tuple(top_experts.shape)}: it must be [T, {workspace.topk}]"
        )
    if top_experts.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"top_experts is {top_experts.dtype}: ids are torch.int32 or torch.int64")
    num_tokens = top_experts.shape[0]
    if num_tokens > workspace.num_local_tokens:
        raise ValueError(
            f"top_experts has T = {num_tokens} tokens, more than the workspace's "
            f"{workspace.num_local_tokens}: create one for the largest T any rank will pass"
        )
    if not isinstance(num_local_experts, int) or num_local_experts < 1:
        raise ValueError(f"num_local_experts is {num_local_experts!r}: it must be an integer >= 1")


def check_call(workspace, tensors, shared, routed, context=None, settings=None) -> None:
    """Raises for arguments that are no tensors (TypeError; NotImplementedError for quantised
    weights), and for a context of other `settings` (ValueError). The peers are told.

    Args:
        tensors: those that must be there, by the argument's name.
        shared, routed: gate, up and, except for a recomputation, down.
    """
    try:
        _check_tensors(tensors)
        _check_weights(_SHARED, shared, optional=True)
        _check_weights(_ROUTED, routed)
        if settings is not None:
            _check_context(context, settings)
    except Exception as error:
        if workspace.num_ranks > 1 and not torch.compiler.is_compiling():
            _workspaces.abort(workspace.name, str(error))
        raise


def _check_tensors(tensors) -> None:
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is {_kind(value)}: it must be a tensor")


def _check_weights(names, weights, optional=False) -> None:
    for name, weight in zip(names, weights, strict=False):
        if isinstance(weight, Tensor) or (optional and weight is None):
            continue
        if isinstance(weight, tuple):
            raise NotImplementedError(
                f"{name} is a tuple: quantised weights (MXFP8 values with scales) are not in this "
                "build; pass a torch.bfloat16 or torch.float32 tensor"
            )
        rule = "a tensor or None" if optional else "a tensor"
        raise TypeError(f"{name} is {_kind(weight)}: it must be {rule}")


def _check_context(context, settings) -> None:
    for name, given in settings.items():
        if not hasattr(context, name):
            raise TypeError(f"context is {_kind(context)}: pass what forward returned")
        made = getattr(context, name)
        if made != given:
            raise ValueError(
                f"context was made with {name} = {made!r}, this backward has {given!r}: pass the "
                "same to both"
            )


def _kind(value) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
