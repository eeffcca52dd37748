"""Weight gradients that are added to a parameter's `main_grad` instead of returned: Megatron's
protocol, as Transformer Engine speaks it.

A parameter takes part when it has the attribute `grad_added_to_main_grad` (whatever its value) and
a `main_grad` (or `get_main_grad()`): FP32, or BF16 for a BF16 parameter, of its shape, contiguous.
Then each backward, of every micro-batch,

    adds the FP32 sum to main_grad with one rounding (none in FP32), leaving idle experts alone;
        with `overwrite_main_grad` true it replaces main_grad, with zeros for idle experts;
    sets grad_added_to_main_grad = True, so that DDP's hook does not add the gradient again;
    returns zeros as the gradient, so that every hook still fires once.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mok import _kernels
from mok._library import prepare, run
from mok.shapes import (
    GRADIENT_ORDER,
    TENSOR_NAMES,
    LayerSettings,
    LayerTensors,
    empty_backward,
    gradient_bits,
)

_NOT_WEIGHTS = ("x", "topk_weights", "shared_weight")


def participants(tensors: LayerTensors, gradients: int) -> dict[str, Tensor]:
    """The parameters of a call that speak the protocol, by their name in it; `gradients` has a bit
    for each of GRADIENT_ORDER that has one."""
    found = {}
    for bit, name in enumerate(GRADIENT_ORDER):
        if not gradients >> bit & 1 or name in _NOT_WEIGHTS:
            continue
        tensor = getattr(tensors, name)
        if not hasattr(tensor, "grad_added_to_main_grad"):
            continue
        if hasattr(tensor, "get_main_grad") or getattr(tensor, "main_grad", None) is not None:
            found[name] = tensor
    return found


def use_ordinary_gradients(parameters: dict[str, Tensor]) -> None:
    """For a graph of torch.compile, which returns them: DDP's hook has to add them."""
    for parameter in parameters.values():
        parameter.grad_added_to_main_grad = False


def forward(tensors: LayerTensors, settings: LayerSettings, parameters: dict[str, Tensor]):
    """`moe_forward`'s out, differentiable; the gradients of `parameters` go to their main_grad."""
    for name, parameter in parameters.items():
        main_grad_of(name, parameter)  # a wrong one is refused before any rank waits
    return _MainGradMoE.apply(settings, parameters, *tensors.in_order())


def main_grad_of(name: str, parameter: Tensor) -> Tensor:
    """Where the gradient goes; raises ValueError if it cannot go there."""
    getter = getattr(parameter, "get_main_grad", None)
    main_grad = parameter.main_grad if getter is None else getter()
    fits = main_grad.shape == parameter.shape and main_grad.is_contiguous()
    if not fits or main_grad.dtype not in (torch.float32, parameter.dtype):
        raise ValueError(
            f"{name}.main_grad is {main_grad.dtype} {tuple(main_grad.shape)} with strides "
            f"{main_grad.stride()}: it must be contiguous, of the parameter's shape "
            f"{tuple(parameter.shape)}, and torch.float32 or the parameter's {parameter.dtype}"
        )
    return main_grad


def add(name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
    """Adds an FP32 gradient by the protocol and returns what autograd gets instead."""
    main_grad = main_grad_of(name, parameter)
    if getattr(parameter, "overwrite_main_grad", False):
        main_grad.copy_(gradient)
    else:
        main_grad.copy_(main_grad.float() + gradient)
    parameter.grad_added_to_main_grad = True
    return torch.zeros_like(parameter)


class _MainGradMoE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, parameters, *tensors):
        with torch._C._AutoDispatchBelowAutograd():
            out_TH, *saved = torch.ops.mok.moe_forward(*tensors, *settings)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        ctx.settings, ctx.parameters = settings, parameters
        return out_TH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        none = [None] * (2 + len(TENSOR_NAMES))
        if grad_output is None:
            return tuple(none)
        stored = ctx.saved_tensors  # once: checkpointing allows no second look
        args, saved = stored[: len(TENSOR_NAMES)], list(stored[len(TENSOR_NAMES) :])
        needed = ctx.needs_input_grad[2:]
        wanted = {name for name, need in zip(TENSOR_NAMES, needed, strict=True) if need}
        settings = ctx.settings._replace(gradients=gradient_bits(wanted))
        parameters = {name: p for name, p in ctx.parameters.items() if name in wanted}

        def make(tensors, settings):
            results = empty_backward(tensors, settings)
            for i, name in enumerate(GRADIENT_ORDER):
                if name in parameters:
                    results[i] = main_grad_of(name, parameters[name])
                    if getattr(parameters[name], "overwrite_main_grad", False):
                        results[i].zero_()
                elif name not in _NOT_WEIGHTS:
                    results[i].zero_()  # the op adds to all weights' gradients
            return results

        grad_output = grad_output.contiguous()
        tensors = LayerTensors(*args)
        results = run(
            settings,
            prepare(tensors, settings, make),
            lambda results: torch.ops.mok.moe_backward_out(
                grad_output,
                *_kernels.as_kernels_take_them(tensors),
                saved,
                *settings.in_order(),
                True,
                results,
            ),
        )
        for name, gradient in zip(GRADIENT_ORDER, results, strict=True):
            if name in parameters:
                parameters[name].grad_added_to_main_grad = True
                gradient = torch.zeros_like(parameters[name])
            if name in wanted:
                none[2 + TENSOR_NAMES.index(name)] = gradient
        return tuple(none)
