"""The collective backend: all-to-all by torch.distributed, products by torch.

For groups whose ranks cannot map each other's memory (several hosts, a container each), for devices
without a kernel in this build, and as the baseline to beat. It follows the formulas and rounding
points of docs/numerics.md with torch's products, so its results agree with the other backends'
within tolerances, not in bits. It waits for the device to learn the numbers of rows, holds all rows
at once (`ring_rows` means nothing), and is no part of a `torch.compile` graph. Same input, same
bits, for one number of ranks.

Every call does the same collectives on all ranks: a header, counts, rows there, rows back; in
backward the weights and gradients there, and back. A rank that refuses its arguments says so in the
header, and its peers raise PeerAbortedError.

Shapes: T tokens of this rank, K experts per token, E experts in all R ranks, H hidden, I
intermediate, N rows of this rank's experts with padding.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mok import _main_grad
from mok._exchange import Routes, make_routes
from mok._grouped import make_segments
from mok._grouped_experts import BIASES, MATRICES, Experts
from mok.errors import PeerAbortedError
from mok.shapes import (
    GRADIENT_ORDER,
    TENSOR_NAMES,
    LayerSettings,
    LayerTensors,
    check_layer,
    check_tokens,
)

_SHARED = ("shared_gate", "shared_up", "shared_down")


def forward(
    tensors: LayerTensors,
    settings: LayerSettings,
    group: dist.ProcessGroup | None,
    parameters: dict[str, Tensor],
) -> Tensor:
    """out [T, H], differentiable; `parameters` have a main_grad. Raises as `mok.moe` does."""
    try:
        check_layer(tensors, settings)
        check_tokens(tensors, settings)
        for name, parameter in parameters.items():
            _main_grad.main_grad_of(name, parameter)
    except Exception as error:
        tell_peers(group, tensors.x.device, str(error))
        raise
    exchange_header(group, tensors.x.device, _header_of(tensors, settings))
    return _CollectiveMoE.apply(settings, group, parameters, *tensors.in_order())


# What must be equal on all ranks, in the order of the header behind its first word.
_EQUAL = ("max_tokens", "num_experts", "H", "K", "I", "J", "dtype", "gradients", "biases, gate")


def _header_of(tensors: LayerTensors, settings: LayerSettings) -> list[int]:
    shared = tensors.shared_gate
    optional = (tensors.b_gate, tensors.b_up, tensors.b_down, tensors.shared_weight)
    return [
        settings.max_tokens,
        settings.num_experts,
        tensors.x.shape[1],
        tensors.topk_ids.shape[1],
        tensors.w_gate.shape[1],
        0 if shared is None else shared.shape[0],
        tensors.x.dtype.itemsize,
        settings.gradients,
        sum((tensor is not None) << bit for bit, tensor in enumerate(optional)),
    ]


def exchange_header(group, device, values: list[int]) -> None:
    """Compares the ranks' settings; raises PeerAbortedError if one has refused its arguments, and
    ValueError if settings differ, each on all ranks."""
    headers = _gather_headers(group, device, [0, *values])
    failed = [rank for rank, header in enumerate(headers) if header[0]]
    if failed:
        reasons: list[str | None] = [None] * len(headers)
        dist.all_gather_object(reasons, None, group=group)
        raise PeerAbortedError(f"rank {failed[0]} gave up: {reasons[failed[0]]}")
    for rank, header in enumerate(headers):
        for name, value, expected in zip(_EQUAL, header[1:], headers[0][1:], strict=True):
            if value != expected:
                raise ValueError(
                    f"{name} is {value} on rank {rank} and {expected} on rank 0: it must be equal "
                    "on all ranks of the group"
                )


def tell_peers(group, device, reason: str) -> None:
    """In the place of a call that this rank cannot make: the peers' raises PeerAbortedError."""
    if group is None or dist.get_world_size(group) == 1:
        return
    _gather_headers(group, device, [1] + [0] * len(_EQUAL))
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)


def _gather_headers(group, device, header: list[int]) -> list[list[int]]:
    if group is None or dist.get_world_size(group) == 1:
        return [header]
    mine = torch.tensor(header, dtype=torch.int64, device=device)
    headers = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(headers, mine, group=group)
    return [each.tolist() for each in headers]


def _routed_experts(tensors: LayerTensors, routes: Routes, settings) -> Experts:
    weights = (tensors.w_gate, tensors.w_up, tensors.w_down)
    biases = (tensors.b_gate, tensors.b_up, tensors.b_down)
    return Experts(tensors.x, weights, biases, routes.segments, settings)


def _shared_expert(tensors: LayerTensors, settings) -> Experts:
    segments = make_segments([tensors.x.shape[0]], tensors.x.device)
    weights = (tensors.shared_gate[None], tensors.shared_up[None], tensors.shared_down[None])
    return Experts(tensors.x, weights, (None, None, None), segments, settings)


def _weighted_sum(tensors: LayerTensors, y_slots, y_shared, num_experts) -> Tensor:
    """FP32 in the contract's order: the shared expert's row, then the choices."""
    num_tokens, top_k = tensors.topk_ids.shape
    total = torch.zeros(tensors.x.shape, dtype=torch.float32, device=tensors.x.device)
    if y_shared is not None:
        w_s = tensors.shared_weight
        total = y_shared.float() if w_s is None else w_s[:, None] * y_shared
    y_TKH = y_slots.unflatten(0, (num_tokens, top_k))
    is_route_TK = (tensors.topk_ids >= 0) & (tensors.topk_ids < num_experts)
    # A no-route is skipped: its weight may be NaN.
    weights_TK = torch.where(is_route_TK, tensors.topk_weights, 0)
    for k in range(top_k):
        total.addcmul_(weights_TK[:, k, None], y_TKH[:, k].float())
    return total.to(tensors.x.dtype)


class _CollectiveMoE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, group, parameters, *args):
        tensors = LayerTensors(*args)
        num_local = tensors.w_gate.shape[0]
        routes = make_routes(tensors.topk_ids, settings.num_experts, num_local, group)
        experts = _routed_experts(tensors, routes, settings)
        x_NH = routes.tokens_there(tensors.x)
        g, u = experts.gate_up(x_NH)
        y_slots = routes.back(experts.down(g, u))
        y_shared, saved_shared = None, (None, None)
        if tensors.shared_gate is not None:
            shared = _shared_expert(tensors, settings)
            saved_shared = shared.gate_up(shared.segments.spread(tensors.x))
            y_shared = shared.segments.gather(shared.down(*saved_shared))
        saved = [None] * 5
        if settings.save != "none":
            saved = [x_NH if settings.save == "all" else None, g, u, *saved_shared]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args, *saved)
        ctx.settings, ctx.routes, ctx.parameters = settings, routes, parameters
        return _weighted_sum(tensors, y_slots, y_shared, settings.num_experts)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        none = [None] * (3 + len(TENSOR_NAMES))
        if grad_output is None:
            return tuple(none)
        stored = ctx.saved_tensors
        tensors = LayerTensors(*stored[: len(TENSOR_NAMES)])
        needed = zip(TENSOR_NAMES, ctx.needs_input_grad[3:], strict=True)
        wanted = {name for name, need in needed if need}
        gradients = _backward(
            tensors, ctx.settings, ctx.routes, stored[len(TENSOR_NAMES) :], grad_output, wanted
        )
        for name in wanted:
            gradient, tensor = gradients[name], getattr(tensors, name)
            if name in ctx.parameters:
                gradient = _main_grad.add(name, ctx.parameters[name], gradient)
            none[3 + TENSOR_NAMES.index(name)] = gradient.to(tensor.dtype)
        return tuple(none)


def _backward(tensors, settings, routes: Routes, saved, dout_TH, wanted) -> dict[str, Tensor]:
    """Gradients, x's in its dtype; the same collectives whatever is wanted."""
    (num_tokens, top_k), x = tensors.topk_ids.shape, tensors.x
    x_NH, g, u, *saved_shared = saved
    if x_NH is None:
        x_NH = routes.tokens_there(x)
    experts = _routed_experts(tensors, routes, settings)
    if g is None:
        g, u = experts.gate_up(x_NH)
    w_N = routes.slots_there(tensors.topk_weights.reshape(-1))
    dout_NH = routes.tokens_there(dout_TH)
    routed = wanted & {*MATRICES, *BIASES}
    dx_NH, dw_N, gradients = experts.backward(x_NH, dout_NH, w_N, g, u, routed)
    dx_TKH = routes.back(dx_NH).unflatten(0, (num_tokens, top_k))
    gradients["topk_weights"] = routes.back(dw_N).reshape(num_tokens, top_k)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if tensors.shared_gate is not None:
        shared = _shared_expert(tensors, settings)
        spread = shared.segments.spread
        if saved_shared[0] is None:
            saved_shared = shared.gate_up(spread(x))
        w_s = tensors.shared_weight
        w_s = torch.ones(num_tokens, device=x.device) if w_s is None else w_s
        of_routed = dict(zip(MATRICES, _SHARED, strict=True))
        names = {routed for routed, name in of_routed.items() if name in wanted}
        dx_s, dw_s, of_shared = shared.backward(
            spread(x), spread(dout_TH), spread(w_s), *saved_shared, names
        )
        total = shared.segments.gather(dx_s).float()
        gradients["shared_weight"] = shared.segments.gather(dw_s)
        gradients |= {of_routed[name]: part[0] for name, part in of_shared.items()}
    for k in range(top_k):
        total.add_(dx_TKH[:, k])
    gradients["x"] = total.to(x.dtype)
    assert set(gradients) <= set(GRADIENT_ORDER)
    return gradients
