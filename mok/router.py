"""Token-choice routing: the softmax top-k router and its load-balancing loss.

Shapes: T tokens, K experts per token, E experts, H hidden.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


class RouterOutput(NamedTuple):
    """What a router decides for T tokens; gradients flow through the weights and probabilities.

    Attributes:
        topk_ids_TK: expert ids, int64 [T, K], the most probable expert first.
        topk_weights_TK: the weights of the sum over k, FP32 [T, K].
        probabilities_TE: softmax over all experts, FP32 [T, E].
    """

    topk_ids_TK: Tensor
    topk_weights_TK: Tensor
    probabilities_TE: Tensor


def top_k_lowest_first(values_TE: Tensor, top_k: int) -> Tensor:
    """Ids [T, K] of the K largest non-negative FP32 values, of equal ones the lowest id first.

    `torch.topk` leaves the order of ties open (and it differs between devices). Non-negative floats
    are ordered like their bits, so value and id together make a key without ties. A NaN (and
    whatever its sign is) still gives K different valid ids.
    """
    num_experts = values_TE.shape[1]
    bits_TE = values_TE.detach().contiguous().view(torch.int32).to(torch.int64)
    order_E = torch.arange(num_experts - 1, -1, -1, device=values_TE.device)
    return torch.topk((bits_TE << 32) + order_E, top_k, dim=1).indices


def no_autocast(x: Tensor) -> torch.autocast:
    """FP32 stays FP32 inside; the meta device has no autocast of its own to turn off."""
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)


class SoftmaxTopKRouter(nn.Module):
    """logits = x W^T, softmax over all experts, the K most probable ones with their probabilities.

    Everything runs in FP32 (in FP64 for FP64 tokens), whatever the dtype of the tokens and of the
    parameter, and under autocast too: the parameter follows `.to()` like any other and is upcast
    for the product. The same input gives the same bits, and equal probabilities go to the lowest
    expert id first. FP32 logits may change in their last bits with T.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: K, at most E.
        normalize: divide the K weights by their sum (Mixtral, Qwen3); False leaves probabilities.
        device, dtype: of the parameter `weight` [E, H].

    Raises:
        ValueError: if top_k is not within 1..num_experts.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool = True,
        device=None,
        dtype=None,
    ):
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(
                f"top_k is {top_k}: it must be between 1 and num_experts ({num_experts})"
            )
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalize = normalize
        self.weight = nn.Parameter(
            torch.empty(num_experts, hidden_size, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(H), as `nn.Linear`, from the default generator."""
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_TH: Tensor, topk_ids_TK: Tensor | None = None) -> RouterOutput:
        """Routes tokens [T, H]; with `topk_ids_TK` it replays a routing and recomputes the weights.

        Args:
            x_TH: tokens, any floating dtype.
            topk_ids_TK: expert ids [T, K] to use instead of the K most probable ones, int32 or
                int64; ids outside 0..E-1 are no routes and get weight 0.
        """
        dtype = torch.promote_types(x_TH.dtype, torch.float32)
        with no_autocast(x_TH):
            logits_TE = nn.functional.linear(x_TH.to(dtype), self.weight.to(dtype))
            probabilities_TE = torch.softmax(logits_TE, dim=1)
            if topk_ids_TK is None:
                topk_ids_TK = top_k_lowest_first(probabilities_TE.float(), self.top_k)
                weights_TK = probabilities_TE.gather(1, topk_ids_TK)
            else:
                is_route_TK = (topk_ids_TK >= 0) & (topk_ids_TK < self.num_experts)
                ids_TK = torch.where(is_route_TK, topk_ids_TK, 0).long()
                weights_TK = torch.where(is_route_TK, probabilities_TE.gather(1, ids_TK), 0)
            if self.normalize:
                # Only a replayed token can have no weight at all; then 0 / 1 is 0, and not NaN.
                total_T1 = weights_TK.sum(dim=1, keepdim=True)
                weights_TK = weights_TK / torch.where(total_T1 == 0, 1, total_T1)
        return RouterOutput(topk_ids_TK, weights_TK, probabilities_TE)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"normalize={self.normalize}"
        )


def load_balancing_loss(router_output: RouterOutput, mask_T: Tensor | None = None) -> Tensor:
    """E * sum_e f_e P_e over this rank's tokens: small when the experts are used evenly.

    f_e is the fraction of tokens that chose expert e (no gradient; the f_e add up to K), P_e the
    mean probability of e. An even routing gives K, all tokens on the same K experts up to E. This
    is the loss of Mixtral in Hugging Face transformers (`load_balancing_loss_func`) for one layer,
    and with K = 1 equations 4 to 6 of the Switch Transformer (Fedus et al. 2021,
    arXiv:2101.03961), without the coefficient. Divide by K for the form in which an even routing
    always gives 1. Counts are integers and sums have a fixed order: same input, same bits.

    Args:
        router_output: of one layer; ids outside 0..E-1 are not counted.
        mask_T: bool [T], False for tokens that shall not count (padding).

    Returns:
        An FP32 scalar, 0 without tokens. Ranks average it as they average their main loss.
    """
    ids_TK, _, probabilities_TE = router_output
    num_tokens, num_experts = probabilities_TE.shape
    is_route_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    if mask_T is None:
        tokens = max(num_tokens, 1)
        probability_E = probabilities_TE.sum(dim=0)
    else:
        is_route_TK = is_route_TK & mask_T[:, None]
        tokens = mask_T.sum().clamp(min=1)
        probability_E = torch.where(mask_T[:, None], probabilities_TE, 0).sum(dim=0)
    # One bin more than there are experts takes what does not count.
    bins = torch.where(is_route_TK, ids_TK, num_experts).reshape(-1).long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=bins.device)
    counts = counts.scatter_add(0, bins, torch.ones_like(bins))[:num_experts]
    return num_experts * torch.sum((counts / tokens) * (probability_E / tokens))
