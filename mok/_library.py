"""Schemas, implementations, fakes and autograd formulas of `torch.ops.mok.*`; `mok.ops` lists them.

The functional ops allocate their results by the shape functions of `mok.shapes` and call the raw
ones (csrc/bindings/torch); `moe_forward` has the number of rows from there and allocates in C++.
"""

import functools

import torch
from torch import Tensor

from mok import _kernels, _native, errors, workspace
from mok.shapes import (
    GRADIENT_ORDER,
    TENSOR_NAMES,
    LayerSettings,
    LayerTensors,
    check_layer,
    check_tokens,
    context_rows,
    empty_backward,
    empty_forward,
    empty_recompute,
    empty_wanted,
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
    """Allocates and runs in C++, where the arguments are looked at again: what is wrong with them
    is said by the checks of this module, and to the peers too."""
    tensors, settings = LayerTensors(*args[:_NUM_TENSORS]), LayerSettings(*args[_NUM_TENSORS:])
    workspace.ensure(settings.workspace)
    try:
        if tensors.x.is_cuda:
            _check_device(tensors, settings)
        return torch.ops.mok._moe_forward(*args, *context_rows(tensors, settings))
    except Exception as error:
        raise _failure(error, tensors, settings) from None


def _failure(error: Exception, tensors: LayerTensors, settings: LayerSettings) -> Exception:
    """What a failed call raises; the peers hear of it where C++ has not told them."""
    is_from_call = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
    if is_from_call and "mok.untold: " not in str(error):
        return errors.translate(error)
    try:
        prepare(tensors, settings, empty_forward)()  # which also knows torch's class of errors
    except Exception as found:
        error = found.with_traceback(None)
    else:
        error = errors.translate(error)
    workspace.abort(settings.workspace, str(error))
    return error


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
    saved, settings = args[_NUM_TENSORS], LayerSettings(*args[_NUM_TENSORS + 1 :])
    return _run_backward(grad_output, tensors, saved, settings, empty_backward)


def _run_backward(grad_output, tensors, saved, settings, make):
    return run(
        settings,
        prepare(tensors, settings, make),
        lambda results: torch.ops.mok.moe_backward_out(
            grad_output,
            *_kernels.as_kernels_take_them(tensors),
            saved,
            *settings,
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


def _forward_autograd(keyset, *args):
    """The op for tensors that autograd may record; torch.library.register_autograd makes one too,
    which takes 0.2 ms for a schema of 21 arguments."""
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*args[:_NUM_TENSORS]):
        settings = LayerSettings(*args[_NUM_TENSORS:])
        return _Forward.apply(keyset, settings, *args[:_NUM_TENSORS])
    with torch._C._AutoDispatchBelowAutograd():
        return _below_autograd(keyset, args)


def _below_autograd(keyset, args):
    """What the dispatcher does below autograd, with fewer steps for tensors that hold memory."""
    if _holds_memory(keyset.raw_repr()):
        return _forward(*args)
    keyset = keyset & torch._C._after_autograd_keyset
    return torch.ops.mok.moe_forward.default.redispatch(keyset, *args)


@functools.cache
def _holds_memory(keyset: int) -> bool:
    """Whether nothing but a backend's kernel comes below autograd: no fakes, no modes."""
    keys = torch._C.DispatchKeySet.from_raw_repr(keyset) & torch._C._after_autograd_keyset
    return keys.highestPriorityTypeId() in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def forward(tensors: LayerTensors, settings: LayerSettings) -> Tensor:
    """moe_forward's out [T, H], differentiable: the op, or the same by a shorter way in eager mode,
    where nobody asks to see it (no modes, no transforms, no classes of tensors)."""
    if not _is_plain(tensors):
        return torch.ops.mok.moe_forward(*tensors, *settings)[0]
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return _Out.apply(settings, *tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward(*tensors, *settings)[0]


def _is_plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether an op of these tensors is its backend's kernel and nothing else."""
    include = torch._C._dispatch_tls_local_include_set().raw_repr()
    if include not in _ORDINARY or not _PLAIN.issuperset(map(type, tensors)):
        return False
    if torch._C._is_torch_function_mode_enabled():
        return False
    return tensors[0].is_cuda or tensors[0].is_cpu


def _keyset(*keys) -> int:
    result = torch._C.DispatchKeySet(keys[0])
    for key in keys[1:]:
        result = result.add(key)
    return result.raw_repr()


_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
# What this thread includes in every call in eager mode, and in inference mode.
_ORDINARY = frozenset(
    (
        _keyset(torch._C.DispatchKey.BackendSelect, torch._C.DispatchKey.ADInplaceOrView),
        _keyset(torch._C.DispatchKey.BackendSelect),
    )
)


class _Forward(torch.autograd.Function):
    """All of moe_forward's results, as the op returns them."""

    @staticmethod
    def forward(ctx, keyset, settings, *tensors):
        with torch._C._AutoDispatchBelowAutograd():
            results = _below_autograd(keyset, (*tensors, *settings))
        saved = results[1:]
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        ctx.settings = settings
        return results

    @staticmethod
    def backward(ctx, grad_output, *_grads_of_saved):
        return None, None, *_gradients(ctx, ctx.needs_input_grad[2:], grad_output)


class _Out(torch.autograd.Function):
    """moe_forward's out alone."""

    @staticmethod
    def forward(ctx, settings, *tensors):
        with torch._C._AutoDispatchBelowAutograd():
            out_TH, *saved = _forward(*tensors, *settings)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        ctx.settings = settings
        return out_TH

    @staticmethod
    def backward(ctx, grad_output):
        return None, *_gradients(ctx, ctx.needs_input_grad[1:], grad_output)


def _gradients(ctx, is_needed, grad_output) -> list[Tensor | None]:
    """One for each of TENSOR_NAMES."""
    found: list[Tensor | None] = [None] * _NUM_TENSORS
    if grad_output is None:
        return found
    stored = ctx.saved_tensors  # once: checkpointing allows no second look
    bits = sum(1 << bit for bit, index in enumerate(_DIFFERENTIABLE) if is_needed[index])
    settings = ctx.settings._replace(gradients=bits)
    tensors, saved = LayerTensors(*stored[:_NUM_TENSORS]), list(stored[_NUM_TENSORS:])
    grad_output = grad_output.contiguous()
    if torch.is_grad_enabled() or not _is_plain((grad_output, *tensors)):
        results = torch.ops.mok.moe_backward(grad_output, *tensors, saved, *settings)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            results = _run_backward(grad_output, tensors, saved, settings, empty_wanted)
    for bit, index in enumerate(_DIFFERENTIABLE):
        if bits >> bit & 1:
            found[index] = results[bit]
    return found


# Where each tensor of GRADIENT_ORDER stands in TENSOR_NAMES.
_DIFFERENTIABLE = tuple(TENSOR_NAMES.index(name) for name in GRADIENT_ORDER)


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

_library.impl("moe_forward", _forward_autograd, "Autograd", with_keyset=True)
torch.library.register_autograd("mok::moe_backward", _no_double_backward, lib=_library)
torch.library.register_autograd(
    "mok::moe_recompute", _no_recompute_backward, setup_context=_setup_recompute, lib=_library
)
