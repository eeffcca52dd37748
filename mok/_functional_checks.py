"""Checks of what `mok.functional` is given."""

import torch
from torch import Tensor

from mok import workspace as _workspaces
from mok._checks import check_tensors, kind_of

_ROUTED = ("w_routed_gate", "w_routed_up", "w_routed_down")
_SHARED = ("w_shared_gate", "w_shared_up", "w_shared_down")


def check_routing(workspace, top_experts, num_local_experts) -> None:
    """Raises TypeError, ValueError for what `build_schedule` cannot take."""
    if not isinstance(top_experts, Tensor):
        raise TypeError(f"top_experts is {kind_of(top_experts)}: pass a tensor [T, K]")
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
        check_tensors(tensors)
        _check_weights(_SHARED, shared, optional=True)
        _check_weights(_ROUTED, routed)
        if settings is not None:
            _check_context(context, settings)
    except Exception as error:
        if workspace.num_ranks > 1 and not torch.compiler.is_compiling():
            _workspaces.abort(workspace.name, str(error))
        raise


def _check_weights(names, weights, optional=False) -> None:
    named = dict(zip(names, weights, strict=False))
    for name, weight in named.items():
        if isinstance(weight, tuple):
            raise NotImplementedError(
                f"{name} is a tuple: quantised weights (MXFP8 values with scales) are not in this "
                "build; pass a torch.bfloat16 or torch.float32 tensor"
            )
    check_tensors(named, optional)


def _check_context(context, settings) -> None:
    for name, given in settings.items():
        if not hasattr(context, name):
            raise TypeError(f"context is {kind_of(context)}: pass what forward returned")
        made = getattr(context, name)
        if made != given:
            raise ValueError(
                f"context was made with {name} = {made!r}, this backward has {given!r}: pass the "
                "same to both"
            )
