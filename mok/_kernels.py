"""What the kernels of a GPU can run, and the tensors as they take them.

Legend: I intermediate, H hidden, E experts in all R ranks.
"""

import functools

import torch
from torch import Tensor

from mok import _group, _native
from mok.shapes import LayerTensors

_native.load()

_WEIGHTS = (
    *("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down"),
    *("shared_gate", "shared_up", "shared_down"),
)
_ALIGNMENT = 16  # bytes: what TMA reads
_CAPABILITY = (9, 0)


@functools.cache
def has_kernel(op: str) -> bool:
    """Whether torch.ops.mok.`op` runs on CUDA tensors in this build."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"mok::{op}", "CUDA")


@_group.run_at_trace_time
def why_not(dtype: torch.dtype | None, needs_gradients: bool) -> str | None:
    """Why a layer's call on CUDA tensors cannot take the megakernel, or None if it can.

    Equal on all ranks if their GPUs are of one kind: dtype is x's (None: BF16).
    """
    if not has_kernel("moe_forward_out"):
        return "this build of mok has no kernels of the layer for 'cuda' tensors"
    if needs_gradients and not has_kernel("moe_backward_out"):
        return (
            "this build of mok has no kernels of the layer's backward for 'cuda' tensors, and the "
            "call needs gradients (under torch.no_grad() it takes the megakernel)"
        )
    if dtype not in (None, torch.bfloat16):
        return f"the GPU kernels compute in bfloat16, and x is {str(dtype).removeprefix('torch.')}"
    if not _has_gpu():
        return "no GPU is visible to this process, so there are no kernels to run"
    return _why_not_on(torch.cuda.current_device())


# A process keeps its GPUs, and asking the driver in each call takes longer than all other checks.
_has_gpu = functools.cache(torch.cuda.is_available)


@functools.cache
def _why_not_on(device: int) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if capability == _CAPABILITY:
        return None
    return (
        f"there are no kernels for {torch.cuda.get_device_name(device)} (compute capability "
        f"{capability[0]}.{capability[1]}) in this build of mok"
    )


def as_kernels_take_them(tensors: LayerTensors) -> tuple[Tensor | None, ...]:
    """The tensors in order, with FP32 weights and biases cast to BF16, misaligned ones copied, and
    an expanded x written out.

    CPU tensors are returned as they are.
    """
    x = tensors.x
    if x.device.type != "cuda":
        return tensors.in_order()
    changed = {name: _fit(getattr(tensors, name)) for name in _WEIGHTS}
    if x.shape[0] > 1 and x.stride(0) < x.shape[1]:
        changed["x"] = x.contiguous()
    return tensors._replace(**changed).in_order()


def _fit(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    if tensor.dtype == torch.float32:
        return tensor.to(torch.bfloat16, memory_format=torch.contiguous_format)
    size = tensor.element_size()
    strides = tensor.stride()[:-1] if tensor.dim() > 2 or tensor.shape[0] > 1 else ()
    if tensor.data_ptr() % _ALIGNMENT or any(s * size % _ALIGNMENT for s in strides):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor
