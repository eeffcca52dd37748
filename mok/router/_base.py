"""What all routers share: the FP32 logits and the checks.

Shapes: T tokens, K experts per token, E experts, H hidden.
"""

import contextlib
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mok.router._choice import top_k_lowest_first


class RouterOutput(NamedTuple):
    """What a router decides for T tokens; gradients flow through all but the ids.

    Attributes:
        topk_ids_TK: expert ids, int64 [T, K], the best first.
        topk_weights_TK: the weights of the sum over k, FP32 [T, K].
        probabilities_TE: what the losses average, FP32 [T, E], adding up to 1 over E: the softmax
            of the logits, or sigmoid scores divided by their sum.
        logits_TE: FP32 [T, E].
    """

    topk_ids_TK: Tensor
    topk_weights_TK: Tensor
    probabilities_TE: Tensor
    logits_TE: Tensor


def no_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """FP32 stays FP32 inside; the meta device has no autocast of its own to turn off."""
    device_type = "cpu" if x.is_meta else x.device.type
    if not torch.is_autocast_enabled(device_type):  # entering and leaving one takes 10 us
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)


class Router(nn.Module):
    """logits = x W^T + b in FP32, a choice of K experts, and their weights.

    Everything runs in FP32 (in FP64 for FP64 tokens), whatever the dtype of the tokens and of the
    parameters, and under autocast too: parameters follow `.to()` like any other and are upcast for
    the product. The same input gives the same bits, and equal scores go to the lowest expert id
    first. FP32 logits may change in their last bits with T.

    A router of your own is a subclass with `select` and `weigh`.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: K, at most E.
        bias: a learned bias [E] of the logits.
        score_before_experts: only False. Weights are applied to what an expert returns; models that
            scale an expert's input instead (Llama 4) compute something else and are refused.
        device, dtype: of the parameters `weight` [E, H] and `bias` [E].

    Raises:
        ValueError: for a top_k that is not within 1..num_experts, or score_before_experts.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        bias: bool = False,
        score_before_experts: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
            raise ValueError(
                f"top_k is {top_k!r}: it must be between 1 and num_experts ({num_experts})"
            )
        if score_before_experts:
            raise ValueError(
                "score_before_experts is True: mok applies routing weights to what experts return "
                "and never to their input, so use a router and a checkpoint with weights after the "
                "experts"
            )
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.weight = nn.Parameter(
            torch.empty(num_experts, hidden_size, device=device, dtype=dtype)
        )
        self.register_parameter(
            "bias",
            nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype)) if bias else None,
        )

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(H), as `nn.Linear`, from the default generator."""
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def scores(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """(scores [T, E] that `select` and `weigh` work on, probabilities [T, E] for losses)."""
        raise NotImplementedError

    def select(self, scores_TE: Tensor) -> Tensor:
        """The ids [T, K] of the chosen experts, int64; no gradient flows through it."""
        return top_k_lowest_first(scores_TE.float(), self.top_k)

    def weigh(self, scores_TK: Tensor, is_route_TK: Tensor | None) -> Tensor:
        """Weights [T, K] of the chosen scores; `is_route_TK` is False where a replayed id is none
        (its score means nothing, its weight is 0), and None where all are routes."""
        raise NotImplementedError

    def forward(self, x_TH: Tensor, topk_ids_TK: Tensor | None = None) -> RouterOutput:
        """Routes tokens [T, H]; with `topk_ids_TK` it replays a routing and recomputes the weights.

        Args:
            x_TH: tokens, any floating dtype.
            topk_ids_TK: expert ids [T, K] to use instead of the router's own choice, int32 or
                int64; ids outside 0..E-1 are no routes and get weight 0.

        Raises:
            ValueError, TypeError: for tokens or ids of another shape or dtype.
        """
        self._check(x_TH, topk_ids_TK)
        dtype = torch.promote_types(x_TH.dtype, torch.float32)
        with no_autocast(x_TH):
            bias = self.bias
            bias_E = None if bias is None else bias.to(dtype)
            logits_TE = nn.functional.linear(x_TH.to(dtype), self.weight.to(dtype), bias_E)
            scores_TE, probabilities_TE = self.scores(logits_TE)
            if topk_ids_TK is None:
                topk_ids_TK = self.select(scores_TE)
                weights_TK = self.weigh(scores_TE.gather(1, topk_ids_TK), None)
            else:
                is_route_TK = (topk_ids_TK >= 0) & (topk_ids_TK < self.num_experts)
                ids_TK = torch.where(is_route_TK, topk_ids_TK, 0).long()
                weights_TK = self.weigh(scores_TE.gather(1, ids_TK), is_route_TK)
        return RouterOutput(topk_ids_TK, weights_TK, probabilities_TE, logits_TE)

    def _check(self, x_TH, topk_ids_TK):
        if x_TH.dim() != 2 or x_TH.shape[1] != self.hidden_size:
            raise ValueError(
                f"x has shape {tuple(x_TH.shape)}: it must be [T, {self.hidden_size}], so flatten "
                "what is before its last dimension"
            )
        if topk_ids_TK is None:
            return
        if topk_ids_TK.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"topk_ids is {topk_ids_TK.dtype}: expert ids are torch.int32 or torch.int64"
            )
        # gather would take fewer ids than tokens, and weigh them by the first tokens' scores.
        if topk_ids_TK.shape != (x_TH.shape[0], self.top_k):
            raise ValueError(
                f"topk_ids has shape {tuple(topk_ids_TK.shape)}: a routing that is replayed for "
                f"these tokens must be ({x_TH.shape[0]}, {self.top_k})"
            )

    def extra_repr(self) -> str:
        text = f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}"
        return text if self.bias is None else f"{text}, bias=True"
