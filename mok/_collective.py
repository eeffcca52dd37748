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

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mok import _main_grad
from mok._contract import Numerics, activation_limit
from mok._grouped import Segments, make_segments, products_for
from mok.errors import PeerAbortedError
from mok.shapes import (
    GRADIENT_ORDER,
    TENSOR_NAMES,
    LayerSettings,
    LayerTensors,
    check_layer,
    check_tokens,
)

_numerics = Numerics(rounding=True, mask_dtype=None)
_ROUTED = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
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


@dataclass(frozen=True)
class _Routes:
    """Who sends what to whom, and where it lies."""

    slots: Tensor  # int64: this rank's routes (token * K + choice), by (expert, slot)
    send: list[int]  # how many of them go to each rank
    receive: list[int]  # how many come from each rank
    by_expert: Tensor  # received routes in the order (expert, source rank, slot)
    segments: Segments
    group: dist.ProcessGroup | None

    def there(self, routes: Tensor) -> Tensor:
        """What this rank's routes carry, at the experts: rows with padding."""
        received = self._exchange(routes, self.send, self.receive)
        return self.segments.spread(received.index_select(0, self.by_expert))

    def back(self, rows: Tensor, num_slots: int) -> Tensor:
        """Rows of this rank's experts, at home: one entry per slot, 0 where there is no route."""
        routes = self.segments.gather(rows)
        received = torch.empty_like(routes).index_copy_(0, self.by_expert, routes)
        mine = self._exchange(received, self.receive, self.send)
        slots = mine.new_zeros(num_slots, *mine.shape[1:])
        return slots.index_copy_(0, self.slots, mine)

    def _exchange(self, rows, send, receive):
        if self.group is None:
            return rows
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=self.group)
        return received


def _route(ids_TK: Tensor, num_experts: int, num_local: int, group) -> _Routes:
    ids = ids_TK.reshape(-1).long()
    is_route = (ids >= 0) & (ids < num_experts)
    ids = torch.where(is_route, ids, num_experts)
    order = torch.sort(ids, stable=True).indices
    send_E = torch.bincount(ids, minlength=num_experts + 1)[:num_experts]
    slots = order[: int(send_E.sum())]
    num_ranks = num_experts // num_local
    receive_E = torch.empty_like(send_E)
    if num_ranks > 1:
        dist.all_to_all_single(receive_E, send_E, group=group)
    else:
        receive_E.copy_(send_E)
    receive_RE = receive_E.reshape(num_ranks, num_local)
    experts = torch.arange(num_local, device=ids.device).repeat(num_ranks)
    received = int(receive_E.sum())
    expert_of = experts.repeat_interleave(receive_RE.reshape(-1), output_size=received)
    by_expert = torch.sort(expert_of, stable=True).indices
    return _Routes(
        slots,
        send_E.reshape(num_ranks, num_local).sum(1).tolist(),
        receive_RE.sum(1).tolist(),
        by_expert,
        make_segments(receive_RE.sum(0).tolist(), ids.device),
        group if num_ranks > 1 else None,
    )


class _Experts:
    """Forward and backward of experts over rows with padding, by the contract's formulas."""

    def __init__(self, x: Tensor, weights, biases, segments: Segments, settings: LayerSettings):
        self.w_gate, self.w_up, self.w_down = weights
        # FP32 parameters are cast like every FP32 parameter, biases among them.
        self.biases = [None if bias is None else bias.to(x.dtype).float() for bias in biases]
        self.segments = segments
        self.products = products_for(x)
        self.dtype = x.dtype
        self.activation = settings.activation
        self.limit = activation_limit(settings.activation, settings.swiglu_limit)

    def _add_bias(self, rows, bias):
        return rows if bias is None else rows + self.segments.per_row(bias)

    def gate_up(self, x_NH):
        b_gate, b_up, _ = self.biases
        g = self._add_bias(self.products.transposed(x_NH, self.w_gate, self.segments), b_gate)
        u = self._add_bias(self.products.transposed(x_NH, self.w_up, self.segments), b_up)
        return g.to(self.dtype), u.to(self.dtype)

    def down(self, g, u):
        p = _numerics.activation(g.float(), u.float(), self.activation, self.limit)[0]
        y = self.products.transposed(p.to(self.dtype), self.w_down, self.segments)
        return self._add_bias(y, self.biases[2]).to(self.dtype)

    def backward(self, x_NH, dout_NH, w_N, g, u, wanted):
        """(dx [N, H], dw [N], {name: FP32 gradient}); `wanted` are names out of _ROUTED."""
        products, segments, rn = self.products, self.segments, lambda value: value.to(self.dtype)
        p, dp_dg, dp_du = _numerics.activation(g.float(), u.float(), self.activation, self.limit)
        a = products.plain(dout_NH, self.w_down, segments)
        dw_N = (p * a).sum(1)
        if self.biases[2] is not None:
            dw_N = dw_N + (dout_NH.float() * segments.per_row(self.biases[2])).sum(1)
        q = w_N[:, None] * a
        dg, du = rn(q * dp_dg), rn(q * dp_du)
        gradients = {}
        for name, left, right in (
            ("w_gate", dg, x_NH),
            ("w_up", du, x_NH),
            ("w_down", dout_NH, rn(w_N[:, None] * p)),
        ):
            if name in wanted:
                gradients[name] = products.outer(left, right, segments)
        for name, rows in (
            ("b_gate", dg),
            ("b_up", du),
            ("b_down", w_N[:, None] * dout_NH.float()),
        ):
            if name in wanted:
                gradients[name] = segments.sums(rows)
        dx = products.plain(dg, self.w_gate, segments) + products.plain(du, self.w_up, segments)
        return rn(dx), dw_N, gradients


def _routed_experts(tensors: LayerTensors, routes: _Routes, settings) -> _Experts:
    weights = (tensors.w_gate, tensors.w_up, tensors.w_down)
    biases = (tensors.b_gate, tensors.b_up, tensors.b_down)
    return _Experts(tensors.x, weights, biases, routes.segments, settings)


def _shared_expert(tensors: LayerTensors, settings) -> _Experts:
    segments = make_segments([tensors.x.shape[0]], tensors.x.device)
    weights = (tensors.shared_gate[None], tensors.shared_up[None], tensors.shared_down[None])
    return _Experts(tensors.x, weights, (None, None, None), segments, settings)


def _weighted_sum(tensors: LayerTensors, y_slots, y_shared, num_experts) -> Tensor:
    """FP32 in the contract's order: the shared expert's row, then the choices."""
    num_tokens, top_k = tensors.topk_ids.shape
    total = torch.zeros(tensors.x.shape, dtype=torch.float32, device=tensors.x.device)
    if y_shared is not None:
        w_s = tensors.shared_weight
        total = y_shared.float() if w_s is None else w_s[:, None] * y_shared.float()
    y_TKH = y_slots.unflatten(0, (num_tokens, top_k))
    is_route_TK = (tensors.topk_ids >= 0) & (tensors.topk_ids < num_experts)
    # A no-route is skipped: its weight may be NaN.
    weights_TK = torch.where(is_route_TK, tensors.topk_weights, 0)
    for k in range(top_k):
        total = torch.addcmul(total, weights_TK[:, k, None], y_TKH[:, k].float())
    return total.to(tensors.x.dtype)


class _CollectiveMoE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, settings, group, parameters, *args):
        tensors = LayerTensors(*args)
        num_local, (num_tokens, top_k) = tensors.w_gate.shape[0], tensors.topk_ids.shape
        routes = _route(tensors.topk_ids, settings.num_experts, num_local, group)
        experts = _routed_experts(tensors, routes, settings)
        x_NH = routes.there(tensors.x.index_select(0, routes.slots // top_k))
        g, u = experts.gate_up(x_NH)
        y_slots = routes.back(experts.down(g, u), num_tokens * top_k)
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


def _backward(tensors, settings, routes: _Routes, saved, dout_TH, wanted) -> dict[str, Tensor]:
    """FP32 gradients of weights, x's in its dtype; the same collectives whatever is wanted."""
    (num_tokens, top_k), x = tensors.topk_ids.shape, tensors.x
    dout_TH = dout_TH.contiguous()
    tokens = routes.slots // top_k
    x_NH, g, u, *saved_shared = saved
    if x_NH is None:
        x_NH = routes.there(x.index_select(0, tokens))
    experts = _routed_experts(tensors, routes, settings)
    if g is None:
        g, u = experts.gate_up(x_NH)
    w_N = routes.there(tensors.topk_weights.reshape(-1).index_select(0, routes.slots))
    dout_NH = routes.there(dout_TH.index_select(0, tokens))
    dx_NH, dw_N, gradients = experts.backward(x_NH, dout_NH, w_N, g, u, wanted & set(_ROUTED))
    dx_TKH = routes.back(dx_NH, num_tokens * top_k).unflatten(0, (num_tokens, top_k))
    gradients["topk_weights"] = routes.back(dw_N, num_tokens * top_k).reshape(num_tokens, top_k)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if tensors.shared_gate is not None:
        shared = _shared_expert(tensors, settings)
        spread = shared.segments.spread
        if saved_shared[0] is None:
            saved_shared = shared.gate_up(spread(x))
        w_s = tensors.shared_weight
        w_s = torch.ones(num_tokens, device=x.device) if w_s is None else w_s
        names = [_ROUTED[i] for i, name in enumerate(_SHARED) if name in wanted]
        dx_s, dw_s, of_shared = shared.backward(
            spread(x), spread(dout_TH), spread(w_s), *saved_shared, set(names)
        )
        total = shared.segments.gather(dx_s).float()
        gradients["shared_weight"] = shared.segments.gather(dw_s)
        gradients |= {_SHARED[_ROUTED.index(n)]: part[0] for n, part in of_shared.items()}
    for k in range(top_k):
        total = total + dx_TKH[:, k].float()
    gradients["x"] = total.to(x.dtype)
    assert set(gradients) <= set(GRADIENT_ORDER)
    return gradients
