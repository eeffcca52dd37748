"""The layer in plain PyTorch: slow, obviously right, and what tests and users compare with.

`moe_reference` is what a careful PyTorch user would write, differentiated by autograd. In FP64 it
is the truth, in BF16 the baseline that mok's error is measured against. `contract_reference` writes
out the forward and backward formulas of the numerics contract (docs/numerics.md) with their
rounding points, or without any.

Shapes: T tokens of this rank, K choices per token, E experts in all ranks, H hidden, I
intermediate, J the shared expert's intermediate size, N rows (routes) of one expert.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mok._contract import (
    GPT_OSS_ALPHA,
    ContractResults,
    ExpertRows,
    RankInputs,
    RankResults,
    activation_limit,
    contract_reference,
)

__all__ = [
    "ContractResults",
    "ExpertRows",
    "RankInputs",
    "RankResults",
    "contract_reference",
    "gated_activation",
    "moe_reference",
]


class _Clamp(torch.autograd.Function):
    """Clamp whose gradient passes where a rounded copy of the input lies inside the bounds."""

    @staticmethod
    def forward(ctx, value, low, high, mask_dtype):
        # Back in the wide dtype, because a BF16 tensor is compared with a rounded limit.
        rounded = value.to(mask_dtype).to(value.dtype)
        ctx.save_for_backward((rounded >= low) & (rounded <= high))
        return value.clamp(low, high)

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        return grad * inside, None, None, None


def gated_activation(g, u, activation="swiglu", swiglu_limit=None, mask_dtype=None):
    """act(g, u) of the contract: SwiGLU, SwiGLU with a limit, or the gpt-oss form.

    Args:
        g, u: gate and up projections, one shape, any floating dtype; the result has it too.
        activation: "swiglu" or "gpt_oss".
        swiglu_limit: L; None means no limit for "swiglu" and 7 for "gpt_oss".
        mask_dtype: the clamps let the gradient through where g and u rounded to this dtype lie
            within the limit; None takes g and u as they are. An FP64 reference of a BF16 layer
            wants `torch.bfloat16`: the layer only ever sees the rounded values, so at the edge the
            unrounded ones would give another derivative.

    Raises:
        ValueError: for an unknown activation or a limit that is not positive.
    """
    limit = activation_limit(activation, swiglu_limit)
    if limit is not None:
        g = _Clamp.apply(g, -float("inf"), limit, mask_dtype or g.dtype)
        u = _Clamp.apply(u, -limit, limit, mask_dtype or u.dtype)
    if activation == "gpt_oss":
        return g * torch.sigmoid(GPT_OSS_ALPHA * g) * (u + 1)
    return g * torch.sigmoid(g) * u


def _expert(x_NH, w_gate, w_up, w_down, b_gate, b_up, b_down, **activation):
    """One expert's MLP: products in x's dtype, the activation in FP32 or FP64, rounded once."""
    dtype = x_NH.dtype
    wide = torch.promote_types(dtype, torch.float32)

    def linear(rows, weight, bias):
        return torch.nn.functional.linear(
            rows, weight.to(dtype), None if bias is None else bias.to(dtype)
        )

    g_NI = linear(x_NH, w_gate, b_gate).to(wide)
    u_NI = linear(x_NH, w_up, b_up).to(wide)
    h_NI = gated_activation(g_NI, u_NI, **activation).to(dtype)
    return linear(h_NI, w_down, b_down)


class _AllToAll(torch.autograd.Function):
    """Uneven all-to-all of rows; the gradient travels the same way back."""

    @staticmethod
    def forward(ctx, rows, send_counts: Sequence[int], receive_counts: Sequence[int], group):
        ctx.splits = (receive_counts, send_counts, group)
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        dist.all_to_all_single(received, rows.contiguous(), receive_counts, send_counts, group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return _AllToAll.apply(grad, *ctx.splits), None, None, None


def _routed_rows(rows_NH, expert_N, experts):
    """y of each row: row i goes through experts[expert_N[i]], each expert's rows in order."""
    # Idle experts run on zero rows, so that their gradients are zeros and not None.
    index = [(expert_N == e).nonzero().squeeze(1) for e in range(len(experts))]
    y_NH = torch.cat([expert(rows_NH[rows]) for expert, rows in zip(experts, index, strict=True)])
    return y_NH[torch.argsort(torch.cat(index))]


def moe_reference(
    x_TH,
    topk_ids_TK,
    topk_weights_TK,
    w_gate,
    w_up,
    w_down,
    *,
    b_gate=None,
    b_up=None,
    b_down=None,
    shared=None,
    shared_weight_T=None,
    activation="swiglu",
    swiglu_limit=None,
    group=None,
    num_experts=None,
    mask_dtype=None,
):
    """out_t = w_s y_s + sum_k w_tk y_tk in plain PyTorch, with the arguments of `mok.moe`.

    Args:
        x_TH: tokens [T, H], FP64, FP32 or BF16. All products run in this dtype (weights are cast to
            it), the activation and the sum over k in FP32 (FP64 for FP64), each rounded once. T may
            differ between ranks, 0 included.
        topk_ids_TK: global expert ids [T, K], int32 or int64; -1 or any id >= E is no route. The
            same expert twice in one token is two routes.
        topk_weights_TK: [T, K], floating; the weight of a no-route is ignored (it may be NaN) and
            gets gradient 0.
        w_gate, w_up: this rank's experts [E/R, I, H]; rank r of the group owns experts r*E/R to
            (r+1)*E/R - 1.
        w_down: [E/R, H, I].
        b_gate, b_up, b_down: biases [E/R, I], [E/R, I], [E/R, H] or None.
        shared: (gate [J, H], up [J, H], down [H, J]) of an expert that every token passes, or None.
        shared_weight_T: its weight per token [T]; None means 1.
        activation, swiglu_limit, mask_dtype: as in `gated_activation`.
        group: a process group with an all-to-all; None is one rank. Every rank of it must call
            this, with equal settings and requires_grad flags, and run the backward.
        num_experts: E, if you want it checked against w_gate and the group.

    Returns:
        out [T, H] in x's dtype.

    Raises:
        ValueError: for an unknown activation, or a num_experts that is not w_gate's times the
            ranks.
    """
    num_ranks = 1 if group is None else dist.get_world_size(group)
    num_local_experts = w_gate.shape[0]
    if num_experts is not None and num_experts != num_local_experts * num_ranks:
        raise ValueError(
            f"num_experts is {num_experts}, but w_gate has {num_local_experts} experts on each of "
            f"{num_ranks} ranks: pass {num_local_experts * num_ranks} or leave it out"
        )
    num_experts = num_local_experts * num_ranks
    num_tokens, top_k = topk_ids_TK.shape
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    act = {"activation": activation, "swiglu_limit": swiglu_limit, "mask_dtype": mask_dtype}

    ids_S = topk_ids_TK.reshape(-1).long()
    is_route_S = (ids_S >= 0) & (ids_S < num_experts)
    slots = is_route_S.nonzero().squeeze(1)
    slots = slots[torch.argsort(ids_S[slots], stable=True)]
    rows_NH = x_TH[slots // top_k]
    send_RE = torch.bincount(ids_S[slots], minlength=num_experts).reshape(
        num_ranks, num_local_experts
    )

    local_expert_N = ids_S[slots]
    if num_ranks > 1:
        receive_RE = torch.empty_like(send_RE)
        dist.all_to_all_single(receive_RE, send_RE, group=group)
        splits = send_RE.sum(1).tolist(), receive_RE.sum(1).tolist()
        rows_NH = _AllToAll.apply(rows_NH, *splits, group)
        experts_RE = torch.arange(num_local_experts, device=ids_S.device).repeat(num_ranks)
        local_expert_N = experts_RE.repeat_interleave(receive_RE.reshape(-1))

    def expert(e):
        biases = (None if b is None else b[e] for b in (b_gate, b_up, b_down))
        weights = (w_gate[e], w_up[e], w_down[e], *biases)
        return lambda rows: _expert(rows, *weights, **act)

    y_NH = _routed_rows(rows_NH, local_expert_N, [expert(e) for e in range(num_local_experts)])
    if num_ranks > 1:
        y_NH = _AllToAll.apply(y_NH, splits[1], splits[0], group)

    y_SH = y_NH.new_zeros(num_tokens * top_k, x_TH.shape[1]).index_copy(0, slots, y_NH)
    weight_S = torch.where(is_route_S, topk_weights_TK.reshape(-1).to(wide), 0)
    weighted_SH = weight_S[:, None] * y_SH.to(wide)
    out_TH = weighted_SH.reshape(num_tokens, top_k, x_TH.shape[1]).sum(1)
    if shared is not None:
        y_shared_TH = _expert(x_TH, *shared, None, None, None, **act).to(wide)
        if shared_weight_T is not None:
            y_shared_TH = shared_weight_T.to(wide)[:, None] * y_shared_TH
        out_TH = y_shared_TH + out_TH
    return out_TH.to(x_TH.dtype)
