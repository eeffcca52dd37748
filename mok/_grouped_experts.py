"""Forward and backward of experts over rows with padding, in torch, for the collective backend.

The formulas and rounding points are those of docs/numerics.md. Rows are many and torch runs one
pass over memory per operation, so nothing is widened that the next operation widens by itself.

Shapes: N rows with padding, E experts, H hidden, I intermediate.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mok._contract import GPT_OSS_ALPHA, Numerics, activation_limit
from mok._grouped import Segments, products_for
from mok.shapes import LayerSettings

_numerics = Numerics(rounding=True, mask_dtype=None)
MATRICES = ("w_gate", "w_up", "w_down")
BIASES = ("b_gate", "b_up", "b_down")


class Experts:
    """`weights` are gate and up [E, I, H] and down [E, H, I], `biases` [E, I], [E, I], [E, H]."""

    def __init__(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        segments: Segments,
        settings: LayerSettings,
    ):
        self.w_gate, self.w_up, self.w_down = weights
        # FP32 parameters are cast like every FP32 parameter, biases among them.
        self.biases = [None if bias is None else bias.to(x.dtype).float() for bias in biases]
        self.segments = segments
        self.products = products_for(x)
        self.dtype = x.dtype
        self.activation = settings.activation
        self.limit = activation_limit(settings.activation, settings.swiglu_limit)

    def gate_up(self, x_NH: Tensor) -> tuple[Tensor, Tensor]:
        b_gate, b_up, _ = self.biases
        g = self._add_bias(self.products.transposed(x_NH, self.w_gate, self.segments), b_gate)
        u = self._add_bias(self.products.transposed(x_NH, self.w_up, self.segments), b_up)
        return g.to(self.dtype), u.to(self.dtype)

    def down(self, g: Tensor, u: Tensor) -> Tensor:
        h = self._activation(g, u).to(self.dtype)
        y = self.products.transposed(h, self.w_down, self.segments)
        return self._add_bias(y, self.biases[2]).to(self.dtype)

    def backward(
        self, x_NH: Tensor, dout_NH: Tensor, w_N: Tensor, g: Tensor, u: Tensor, wanted: set[str]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(dx [N, H], dw FP32 [N], {name: gradient}); `wanted` out of MATRICES and BIASES."""
        products, segments, rn = self.products, self.segments, lambda value: value.to(self.dtype)
        p, dp_dg, dp_du = _numerics.activation(g.float(), u.float(), self.activation, self.limit)
        a = products.plain(dout_NH, self.w_down, segments)
        dw_N = (p * a).sum(1)
        if self.biases[2] is not None:
            dw_N = dw_N + (dout_NH * segments.per_row(self.biases[2])).sum(1)
        q = w_N[:, None] * a
        dg, du = rn(dp_dg.mul_(q)), rn(dp_du.mul_(q))
        gradients = {}
        for name, left, right in (
            ("w_gate", dg, x_NH),
            ("w_up", du, x_NH),
            ("w_down", dout_NH, rn(p.mul_(w_N[:, None]))),
        ):
            if name in wanted:
                gradients[name] = products.outer(left, right, segments)
        for name, rows in (("b_gate", dg), ("b_up", du), ("b_down", dout_NH)):
            if name in wanted:
                rows = w_N[:, None] * rows if name == "b_down" else rows
                gradients[name] = segments.sums(rows)
        dx = products.plain(dg, self.w_gate, segments).float()
        return rn(dx.add_(products.plain(du, self.w_up, segments))), dw_N, gradients

    def _add_bias(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        return rows if bias is None else rows + self.segments.per_row(bias)

    def _activation(self, g: Tensor, u: Tensor) -> Tensor:
        """p alone, FP32: the first result of `Numerics.activation`, in fewer passes."""
        if self.limit is not None:
            g = g.float().clamp(max=self.limit)
            u = u.float().clamp(-self.limit, self.limit)
        if self.activation == "gpt_oss":
            p = torch.sigmoid_(GPT_OSS_ALPHA * g.float())
            return p.mul_(g).mul_(u + 1.0)
        return torch.sigmoid(g.float()).mul_(g).mul_(u)
