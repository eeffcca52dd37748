"""The numerics contract written out: every formula and rounding point, forward and backward.

Plain PyTorch on the CPU, one expert after another, for any number of (virtual) ranks in one
process. The names follow docs/numerics.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

GPT_OSS_ALPHA = 1.702
GPT_OSS_LIMIT = 7.0
DW_BLOCK = 64  # columns of I in one partial sum of a routing weight's gradient
BIAS_BLOCK = 128  # rows of a segment in one partial sum of a bias gradient


@dataclass
class RankInputs:
    """What one rank passes: x, dout [T, H]; ids, weights [T, K]; shared weight [T] or None."""

    x_TH: torch.Tensor
    topk_ids_TK: torch.Tensor
    topk_weights_TK: torch.Tensor
    dout_TH: torch.Tensor
    shared_weight_T: torch.Tensor | None = None


@dataclass
class ExpertRows:
    """An expert's rows in the order (source rank, slot); p and a are never rounded.

    g, u, p, h, a, dg, du [N, I]; y, dx [N, H]; dw [N].
    """

    g: torch.Tensor
    u: torch.Tensor
    p: torch.Tensor
    h: torch.Tensor
    y: torch.Tensor
    a: torch.Tensor
    dw: torch.Tensor
    dg: torch.Tensor
    du: torch.Tensor
    dx: torch.Tensor


@dataclass
class WeightGradients:
    """What an FP32 parameter gets: unrounded sums. A BF16 parameter gets them rounded once."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    b_gate: torch.Tensor
    b_up: torch.Tensor
    b_down: torch.Tensor


@dataclass
class RankResults:
    """What one rank gets back; the shared expert's gradients cover its own rows only."""

    out_TH: torch.Tensor
    dx_TH: torch.Tensor
    dtopk_weights_TK: torch.Tensor
    shared_rows: ExpertRows | None
    dshared_weight_T: torch.Tensor | None
    dshared: WeightGradients | None


@dataclass
class ContractResults:
    """Per rank as the inputs, per expert its rows, and the weight gradients stacked over E."""

    ranks: list[RankResults]
    experts: list[ExpertRows]
    gradients: WeightGradients


def activation_limit(activation, swiglu_limit):
    """The limit L of the clamps or None; raises ValueError for an unknown form or a limit <= 0."""
    if activation not in ("swiglu", "gpt_oss"):
        raise ValueError(f'activation is {activation!r}: it must be "swiglu" or "gpt_oss"')
    if swiglu_limit is not None and not swiglu_limit > 0:
        raise ValueError(
            f"swiglu_limit is {swiglu_limit}: it must be positive, or None for the default"
        )
    if swiglu_limit is None and activation == "gpt_oss":
        return GPT_OSS_LIMIT
    return swiglu_limit


class Numerics:
    """Rounding on: FP32 with rn(.) to BF16. Rounding off: FP64 throughout."""

    def __init__(self, rounding, mask_dtype):
        self.rounding = rounding
        self.dtype = torch.float32 if rounding else torch.float64
        self.mask_dtype = mask_dtype or self.dtype

    def rn(self, value):
        return value.bfloat16().float() if self.rounding else value

    def fma(self, weight_N, rows_NH, acc_NH):
        """One rounding to FP32: the product of a BF16 and an FP32 number is exact in FP64."""
        product = weight_N.double()[:, None] * rows_NH.double()
        return (product + acc_NH.double()).to(self.dtype)

    def activation(self, g, u, activation, limit):
        """p, dp/dg and dp/du at the (rounded) g and u."""
        inside_g = inside_u = True
        if limit is not None:
            # Back in the wide dtype, because a BF16 tensor is compared with a rounded limit.
            inside_g = g.to(self.mask_dtype).to(self.dtype) <= limit
            inside_u = u.to(self.mask_dtype).to(self.dtype).abs() <= limit
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        alpha, offset = (GPT_OSS_ALPHA, 1.0) if activation == "gpt_oss" else (1.0, 0.0)
        s = torch.sigmoid(alpha * g)
        p = g * s * (u + offset)
        dp_dg = (u + offset) * s * (1 + alpha * g * (1 - s)) * inside_g
        return p, dp_dg, g * s * inside_u

    def blocked_sum(self, values, block):
        """Sum over the last dimension: partial sums of blocks counted from 0, added in order."""
        total = values.new_zeros(values.shape[:-1])
        for part in values.split(block, dim=-1):
            total = total + part.sum(-1)
        return total


def _expert_pass(num, x, dout, w, weights, biases, activation, limit):
    """Forward and backward of one expert over its rows: x, dout [N, H], w [N]."""
    w_gate, w_up, w_down = (num.rn(weight.to(num.dtype)) for weight in weights)
    b_gate, b_up, b_down = (0 if b is None else b.to(num.dtype) for b in biases)
    rn = num.rn

    g = rn(x @ w_gate.T + b_gate)
    u = rn(x @ w_up.T + b_up)
    p, dp_dg, dp_du = num.activation(g, u, activation, limit)
    h = rn(p)
    y = rn(h @ w_down.T + b_down)

    a = dout @ w_down
    dw = num.blocked_sum(p * a, DW_BLOCK)
    if biases[2] is not None:
        dw = dw + dout @ b_down
    q = w[:, None] * a
    dg, du = rn(q * dp_dg), rn(q * dp_du)
    dx = rn(torch.cat([dg, du], dim=1) @ torch.cat([w_gate, w_up]))
    scaled_h = rn(w[:, None] * p)
    gradients = WeightGradients(
        gate=dg.T @ x,
        up=du.T @ x,
        down=dout.T @ scaled_h,
        b_gate=num.blocked_sum(dg.T, BIAS_BLOCK),
        b_up=num.blocked_sum(du.T, BIAS_BLOCK),
        b_down=num.blocked_sum((w[:, None] * dout).T, BIAS_BLOCK),
    )
    return ExpertRows(g, u, p, h, y, a, dw, dg, du, dx), gradients


def _stack(gradients: list[WeightGradients]):
    names = WeightGradients.__dataclass_fields__
    return WeightGradients(
        **{name: torch.stack([getattr(g, name) for g in gradients]) for name in names}
    )


def contract_reference(
    ranks: Sequence[RankInputs],
    w_gate_EIH,
    w_up_EIH,
    w_down_EHI,
    *,
    b_gate=None,
    b_up=None,
    b_down=None,
    shared=None,
    activation="swiglu",
    swiglu_limit=None,
    rounding=True,
    mask_dtype=None,
):
    """One forward and backward pass by the contract's formulas, without autograd.

    Args:
        ranks: the inputs of R ranks. With rounding, x and dout are taken as BF16 values (rounded if
            they are not).
        w_gate_EIH, w_up_EIH, w_down_EHI: the weights of *all* experts.
        b_gate, b_up, b_down: [E, I], [E, I], [E, H] or None, as the call uses them: FP32
            biases of a BF16 call were cast by the caller.
        shared: (gate [J, H], up [J, H], down [H, J]) or None.
        activation, swiglu_limit: "swiglu" or "gpt_oss", and L.
        rounding: True computes in FP32 with the BF16 rounding points; False in FP64 without any.
        mask_dtype: without rounding, take the masks of the clamps from g and u rounded to this
            dtype.

    Returns:
        ContractResults. Accumulation order inside a matrix product is PyTorch's: compare by
        tolerance.

    Raises:
        ValueError: for an unknown activation or a limit that is not positive.
    """
    num = Numerics(rounding, mask_dtype)
    limit = activation_limit(activation, swiglu_limit)
    xs = [num.rn(rank.x_TH.to(num.dtype)) for rank in ranks]
    douts = [num.rn(rank.dout_TH.to(num.dtype)) for rank in ranks]
    weights = [rank.topk_weights_TK.reshape(-1).to(num.dtype) for rank in ranks]
    top_k = ranks[0].topk_ids_TK.shape[1]
    hidden_size = w_gate_EIH.shape[2]

    experts, gradients = [], []
    y_slots = [num_rows.new_zeros(num_rows.shape[0] * top_k, hidden_size) for num_rows in xs]
    dx_slots = [torch.zeros_like(y) for y in y_slots]
    dw_slots = [torch.zeros_like(w) for w in weights]
    for e in range(w_gate_EIH.shape[0]):
        slots = [(rank.topk_ids_TK.reshape(-1) == e).nonzero().squeeze(1) for rank in ranks]
        rows, gradient = _expert_pass(
            num,
            torch.cat([x[s // top_k] for x, s in zip(xs, slots, strict=True)]),
            torch.cat([dout[s // top_k] for dout, s in zip(douts, slots, strict=True)]),
            torch.cat([w[s] for w, s in zip(weights, slots, strict=True)]),
            (w_gate_EIH[e], w_up_EIH[e], w_down_EHI[e]),
            [None if b is None else b[e] for b in (b_gate, b_up, b_down)],
            activation,
            limit,
        )
        experts.append(rows)
        gradients.append(gradient)
        counts = [len(s) for s in slots]
        for target, source in ((y_slots, rows.y), (dx_slots, rows.dx), (dw_slots, rows.dw)):
            for values, s, part in zip(target, slots, source.split(counts), strict=True):
                values[s] = part

    results = []
    for r, rank in enumerate(ranks):
        num_tokens = xs[r].shape[0]
        out, dx = torch.zeros_like(xs[r]), torch.zeros_like(xs[r])
        shared_rows = dshared = dshared_weight = None
        if shared is not None:
            w_s = rank.shared_weight_T
            w_s = xs[r].new_ones(num_tokens) if w_s is None else w_s.to(num.dtype)
            shared_rows, dshared = _expert_pass(
                num, xs[r], douts[r], w_s, shared, (None, None, None), activation, limit
            )
            out = num.fma(w_s, shared_rows.y, out)
            dx = dx + shared_rows.dx
            dshared_weight = None if rank.shared_weight_T is None else shared_rows.dw
        ids_TK = rank.topk_ids_TK
        is_route_TK = (ids_TK >= 0) & (ids_TK < w_gate_EIH.shape[0])
        y_TKH, dx_TKH = (v[r].reshape(num_tokens, top_k, hidden_size) for v in (y_slots, dx_slots))
        w_TK = weights[r].reshape(num_tokens, top_k)
        for k in range(top_k):  # a no-route is skipped, not multiplied by 0: its weight may be NaN
            t = is_route_TK[:, k]
            out[t] = num.fma(w_TK[t, k], y_TKH[t, k], out[t])
            dx[t] = dx[t] + dx_TKH[t, k]
        dweights = dw_slots[r].reshape(num_tokens, top_k)
        results.append(
            RankResults(num.rn(out), num.rn(dx), dweights, shared_rows, dshared_weight, dshared)
        )
    return ContractResults(results, experts, _stack(gradients))
