"""Schemas, implementations, fakes and autograd formulas of `torch.ops.mok.*`; `mok.ops` lists them.

The functional ops allocate their results by the shape functions of `mok.shapes` and call the raw
ones (csrc/bindings/torch).
"""

import torch

from mok import _kernels, _native, errors, workspace
from mok.shapes import (
    GRADIENT_ORDER,
    SETTING_NAMES,
    TENSOR_NAMES,
    LayerSettings,
    LayerTensors,
    check_layer,
    check_tokens,
    empty_backward,
    empty_forward,
    empty_recompute,
    gradient_bits,
)

_native.load()

_TENSORS = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate, Tensor w_up, Tensor w_down, "
    "Tensor? b_gate, Tensor? b_up, Tensor? b_down, Tensor? shared_gate, Tensor? shared_up, "
    "Tensor? shared_down, Tensor? shared_weight"
)
_NUM_TENSORS = len(TENSOR_NAMES)
_SETTINGS = (
    "str workspace, int num_experts, SymInt max_tokens, SymInt ring_rows, str activation, "
    "float? swiglu_limit, str save, int gradients"
)
_NUM_SAVED = 5

_library = torch.library.Library("mok", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(
    f"moe_forward({_TENSORS}, {_SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_tags,
)
_library.define(f"moe_recompute({_TENSORS}, {_SETTINGS}) -> Tensor[]", tags=_tags)
_library.define(
    f"moe_backward(Tensor grad_output, {_TENSORS}, Tensor[] saved, {_SETTINGS}) -> Tensor[]",
    tags=_tags,
)


def run(settings: LayerSettings, prepare, call):
    """prepare() checks and allocates; call(prepared) runs the raw op. A rank that fails before its
    peers are involved tells them first, so that they do not wait for it."""
    workspace.ensure(settings.workspace)
    try:
        prepared = prepare()
    except Exception as error:
        workspace.abort(settings.workspace, str(error))
        raise
    try:
        call(prepared)
    except RuntimeError as error:
        translated = errors.translate(error)
        if translated is error:
            raise
        raise translated from None
    return prepared


def _check_device(tensors: LayerTensors, settings: LayerSettings) -> None:
    device = tensors.x.device
    if device.type == "cpu":
        return
    reason = f"this build of mok has no kernels for {device.type!r} tensors"
    if device.type == "cuda":
        reason = _kernels.why_not(tensors.x.dtype, settings.gradients != 0)
    if reason is not None:
        raise NotImplementedError(
            f'x is on {device}: {reason}; use CPU tensors or backend="collective".'
        )


def prepare(tensors: LayerTensors, settings: LayerSettings, make):
    def check_and_make():
        _check_device(tensors, settings)
        check_layer(tensors, settings)
        check_tokens(tensors, settings)
        return make(tensors, settings)

    return check_and_make


def _forward(*args):
    tensors, settings = LayerTensors(*args[:_NUM_TENSORS]), LayerSettings(*args[_NUM_TENSORS:])
    return run(
        settings,
        prepare(tensors, settings, empty_forward),
        lambda results: torch.ops.mok.moe_forward_out(
            *_kernels.as_kernels_take_them(tensors),
            *settings.in_order(),
            results[0],
            list(results[1:]),
        ),
    )


def _recompute(*args):
    tensors, settings = LayerTensors(*args[:_NUM_TENSORS]), LayerSettings(*args[_NUM_TENSORS:])
    return run(
        settings,
        prepare(tensors, settings, empty_recompute),
        lambda results: torch.ops.mok.moe_recompute_out(
            *_kernels.as_kernels_take_them(tensors), *settings.in_order(), results
        ),
    )


def _backward(grad_output, *args):
    tensors = LayerTensors(*args[:_NUM_TENSORS])
    settings = LayerSettings(*args[_NUM_TENSORS + 1 :])  # between the two: the saved context
    return run(
        settings,
        prepare(tensors, settings, empty_backward),
        lambda results: torch.ops.mok.moe_backward_out(
            grad_output,
            *_kernels.as_kernels_take_them(tensors),
            *args[_NUM_TENSORS:],
            False,
            results,
        ),
    )


def _forward_fake(*args):
    tensors, settings = LayerTensors(*args[:_NUM_TENSORS]), LayerSettings(*args[_NUM_TENSORS:])
    check_layer(tensors, settings)
    return empty_forward(tensors, settings)


def _recompute_fake(*args):
    tensors, settings = LayerTensors(*args[:_NUM_TENSORS]), LayerSettings(*args[_NUM_TENSORS:])
    check_layer(tensors, settings)
    return empty_recompute(tensors, settings)


def _backward_fake(grad_output, *args):
    return empty_backward(
        LayerTensors(*args[:_NUM_TENSORS]), LayerSettings(*args[_NUM_TENSORS + 1 :])
    )


def _setup_context(ctx, inputs, output):
    tensors, settings = LayerTensors(*inputs[:_NUM_TENSORS]), LayerSettings(*inputs[_NUM_TENSORS:])
    saved = output[1:]
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    present = [tensor for tensor in tensors.in_order() if tensor is not None]
    ctx.save_for_backward(*present, *saved)
    ctx.is_present = [tensor is not None for tensor in tensors.in_order()]
    ctx.settings = settings


def _autograd(ctx, grad_output, *_grads_of_saved):
    none = [None] * (_NUM_TENSORS + len(SETTING_NAMES))
    if grad_output is None:
        return tuple(none)
    stored = list(ctx.saved_tensors)
    saved = stored[len(stored) - _NUM_SAVED :]
    remaining = iter(stored)
    args = [next(remaining) if present else None for present in ctx.is_present]
    names = list(LayerTensors.__dataclass_fields__)
    wanted = {name for name, needed in zip(names, ctx.needs_input_grad, strict=False) if needed}
    settings = LayerSettings(
        **{**vars(ctx.settings), "gradients": gradient_bits(wanted & set(GRADIENT_ORDER))}
    )
    results = torch.ops.mok.moe_backward(
        grad_output.contiguous(), *args, saved, *settings.in_order()
    )
    for name, gradient in zip(GRADIENT_ORDER, results, strict=True):
        if name in wanted:
            none[TENSOR_NAMES.index(name)] = gradient
    return tuple(none)


def _setup_recompute(ctx, inputs, output):
    ctx.mark_non_differentiable(*output)


def _no_recompute_backward(ctx, *_grads):
    raise RuntimeError("torch.ops.mok.moe_recompute is not differentiable.")


def _no_double_backward(ctx, *_grads):
    raise RuntimeError(
        "mok.moe is differentiable once: its backward has no derivative, so gradients of gradients "
        "(create_graph=True followed by a second backward) are not available."
    )


for _name, _implementation, _fake in (
    ("moe_forward", _forward, _forward_fake),
    ("moe_recompute", _recompute, _recompute_fake),
    ("moe_backward", _backward, _backward_fake),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mok::{_name}", _fake, lib=_library)
    # Inductor would delete the forward of a rank whose output is unused or empty (T = 0) while its
    # peers still run theirs and wait.
    torch.fx.node.has_side_effect(getattr(torch.ops.mok, _name).default)

torch.library.register_autograd(
    "mok::moe_forward", _autograd, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd("mok::moe_backward", _no_double_backward, lib=_library)
torch.library.register_autograd(
    "mok::moe_recompute", _no_recompute_backward, setup_context=_setup_recompute, lib=_library
)
