"""The MoE layer as one writes it in plain PyTorch: two all-to-alls and a loop over experts."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mok.router import SoftmaxTopKRouter
from torch import nn


def as_operand(x: torch.Tensor, emulate: bool) -> torch.Tensor:
    """Rounds x to BF16 and returns it as an operand of a matrix product, in BF16 or, to emulate,
    in FP32.

    An FP32 product of rounded operands, rounded at its end, rounds at the same points as a BF16
    one, forward and backward. It is several times faster on a CPU without BF16 instructions.
    """
    return x.bfloat16().float() if emulate else x.bfloat16()


def linear_bf16(x: torch.Tensor, weight: torch.Tensor, emulate: bool) -> torch.Tensor:
    """Returns x weight^T with BF16 operands, FP32 accumulation and a BF16 result."""
    return F.linear(as_operand(x, emulate), as_operand(weight, emulate)).bfloat16()


class Experts(nn.Module):
    """The SwiGLU experts that this rank owns."""

    def __init__(self, hidden: int, intermediate: int, experts: int, emulate_bf16: bool):
        super().__init__()
        self.emulate_bf16 = emulate_bf16
        self.w_gate = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.w_up = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.w_down = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Runs rows [sum(counts), H], sorted by local expert, counts[e] of them for expert e."""
        x = as_operand(rows, self.emulate_bf16)
        gate, up = (self._multiply(x, w, counts) for w in (self.w_gate, self.w_up))
        h = (F.silu(gate.float()) * up.float()).bfloat16()
        return self._multiply(as_operand(h, self.emulate_bf16), self.w_down, counts)

    def _multiply(self, x: torch.Tensor, w: torch.Tensor, counts: list[int]) -> torch.Tensor:
        products = zip(x.split(counts), as_operand(w, self.emulate_bf16), strict=True)
        return torch.cat([F.linear(x_e, w_e) for x_e, w_e in products]).bfloat16()


class Exchange(torch.autograd.Function):
    """Sends sent[r] rows to rank r and returns the received[r] rows of every rank r.

    The gradients of the rows travel back the way the rows came.
    """

    @staticmethod
    def forward(ctx, rows, sent: list[int], received: list[int], group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        output = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, ctx.received, ctx.sent, ctx.group), None, None, None


class PlainMoE(nn.Module):
    """Takes x [..., H] in BF16 and returns the same shape; parameter names equal mok.MoELayer's."""

    def __init__(self, hidden, intermediate, experts, top_k, *, group, emulate_bf16):
        super().__init__()
        self.group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.num_experts = experts
        self.router = SoftmaxTopKRouter(hidden, experts, top_k)  # the very one of mok.MoELayer
        self.experts = Experts(hidden, intermediate, experts // self.ranks, emulate_bf16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_TH = x.reshape(-1, x.shape[-1])
        ids_TK, weights_TK, *_ = self.router(x_TH)
        top_k = ids_TK.shape[1]

        # Sorting the routes by expert also sorts them by owner: rank r owns experts r E/R onwards.
        order = ids_TK.flatten().argsort(stable=True)
        sent_counts_RE = torch.bincount(ids_TK.flatten(), minlength=self.num_experts)
        received_counts_RE = torch.empty_like(sent_counts_RE)
        if self.ranks > 1:
            dist.all_to_all_single(received_counts_RE, sent_counts_RE, group=self.group)
        else:
            received_counts_RE.copy_(sent_counts_RE)
        sent_counts_RE = sent_counts_RE.view(self.ranks, -1)
        received_counts_RE = received_counts_RE.view(self.ranks, -1)
        sent, received = sent_counts_RE.sum(1).tolist(), received_counts_RE.sum(1).tolist()

        rows = self._exchange(x_TH[order // top_k], sent, received)
        # Rows arrive sorted by (source rank, expert); the experts want (expert, source rank).
        local_experts = torch.arange(received_counts_RE.shape[1], device=x.device)
        row_expert = local_experts.repeat(self.ranks).repeat_interleave(
            received_counts_RE.flatten()
        )
        by_expert = row_expert.argsort(stable=True)
        y = self.experts(rows[by_expert], received_counts_RE.sum(0).tolist())
        y = self._exchange(y[by_expert.argsort()], received, sent)

        y_TKH = y[order.argsort()].view(*ids_TK.shape, -1)
        out_TH = (weights_TK.unsqueeze(-1) * y_TKH.float()).sum(1).bfloat16()
        return out_TH.view(x.shape)

    def _exchange(self, rows, sent: list[int], received: list[int]) -> torch.Tensor:
        return rows if self.ranks == 1 else Exchange.apply(rows, sent, received, self.group)
