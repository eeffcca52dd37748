"""The choice of K experts without ties: on the CPU by torch, on a GPU by one kernel.

Shapes: T tokens, K experts per token, E experts.
"""

import functools

import torch
from torch import Tensor

from mok import _native

_MOST_TOP_K = 32  # csrc/kernels/router_top_k.cuh: kRouterMostTopK

_library = torch.library.Library("mok", "FRAGMENT")
_library.define(
    "router_top_k(Tensor scores, Tensor? bias, int top_k) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def top_k_lowest_first(values_TE: Tensor, top_k: int, bias_E: Tensor | None = None) -> Tensor:
    """Ids [T, K], int64, of the K largest FP32 values + bias, of equal ones the lowest id first.

    A NaN (whatever its sign is) gives K different valid ids. No gradient flows. On CUDA it is one
    kernel, `torch.ops.mok.router_top_k`, for the K (up to 32) and the GPUs that it is built for.

    Args:
        values_TE: [T, E], FP32.
        top_k: K, at most E.
        bias_E: [E], FP32, added to the values for the choice; None is 0.
    """
    values_TE = values_TE.detach()
    if values_TE.is_cuda and _fits_kernel(values_TE, top_k, bias_E):
        bias_E = None if bias_E is None else bias_E.detach().contiguous()
        return torch.ops.mok.router_top_k(values_TE.contiguous(), bias_E, top_k)
    return _by_torch(values_TE, bias_E, top_k)


def _by_torch(values_TE: Tensor, bias_E: Tensor | None, top_k: int) -> Tensor:
    """`torch.topk` leaves the order of ties open (and it differs between devices). Value and id
    make an integer key without ties: the bits of floats >= 0 are ordered like the floats, and those
    of negative ones the other way round."""
    num_experts = values_TE.shape[1]
    if bias_E is not None:
        values_TE = values_TE + bias_E.detach()
    values_TE = values_TE + 0.0  # -0 becomes +0
    bits_TE = values_TE.contiguous().view(torch.int32)
    ordered_TE = torch.where(bits_TE < 0, bits_TE ^ 0x7FFFFFFF, bits_TE).to(torch.int64)
    order_E = torch.arange(num_experts - 1, -1, -1, device=values_TE.device)
    return torch.topk((ordered_TE << 32) + order_E, top_k, dim=1).indices


def _fits_kernel(values_TE: Tensor, top_k: int, bias_E: Tensor | None) -> bool:
    is_fp32 = values_TE.dtype == torch.float32 and (bias_E is None or bias_E.dtype == torch.float32)
    return is_fp32 and 1 <= top_k <= _MOST_TOP_K and _has_kernel(values_TE.device)


@functools.cache
def _has_kernel_on(device: torch.device) -> bool:
    if not _native.is_available():
        return False
    if not torch._C._dispatch_has_kernel_for_dispatch_key("mok::router_top_k", "CUDA"):
        return False
    return _is_built_for(_native.cuda_archs(), torch.cuda.get_device_capability(device))


def _has_kernel(device: torch.device) -> bool:
    return _has_kernel_on(device)


# Dynamo traces no cached function: what it returns is a constant of the graph.
_has_kernel._dynamo_marked_constant = True


def _is_built_for(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether machine code for one of `archs` ("90a", "100f", "80") runs on a GPU."""
    for arch in archs:
        major, minor = divmod(int(arch.rstrip("af")), 10)
        runs_later = not arch.endswith("a")  # on later chips of the same major version
        if capability[0] == major and (
            capability[1] == minor or (runs_later and capability[1] > minor)
        ):
            return True
    return False


def _fake(scores: Tensor, bias: Tensor | None, top_k: int) -> Tensor:
    return scores.new_empty((scores.shape[0], top_k), dtype=torch.int64)


_library.impl("router_top_k", _by_torch, "CPU")
torch.library.register_fake("mok::router_top_k", _fake, lib=_library)
