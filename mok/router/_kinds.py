"""The three routers.

Shapes: T tokens, K experts per token, E experts, H hidden, G groups of experts.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from mok.router._base import Router
from mok.router._choice import top_k_lowest_first

# What DeepSeek-V3's code adds to a sum of sigmoids before it divides by it.
SIGMOID_SUM_EPSILON = 1e-20


class SoftmaxTopKRouter(Router):
    """Softmax over all experts, then the K most probable ones with their probabilities.

    The routing of Mixtral and Qwen3-MoE (normalize=True), of Qwen2-MoE (False), and of DeepSeek-V2
    (False, with a scaling factor). See `Router` for numerics and the other arguments.

    Args:
        normalize: divide the K weights by their sum; False leaves probabilities.
        scaling_factor: multiplies the weights at the end (`routed_scaling_factor`).
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool = True,
        scaling_factor: float = 1.0,
        bias: bool = False,
        score_before_experts: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            hidden_size,
            num_experts,
            top_k,
            bias=bias,
            score_before_experts=score_before_experts,
            device=device,
            dtype=dtype,
        )
        self.normalize = normalize
        self.scaling_factor = scaling_factor
        self.reset_parameters()

    def scores(self, logits_TE):
        probabilities_TE = torch.softmax(logits_TE, dim=1)
        return probabilities_TE, probabilities_TE

    def weigh(self, scores_TK, is_route_TK):
        weights_TK = scores_TK if is_route_TK is None else torch.where(is_route_TK, scores_TK, 0)
        if self.normalize:
            total_T1 = weights_TK.sum(dim=1, keepdim=True)
            if is_route_TK is not None:
                # Only a replayed token can have no weight at all; then 0 / 1 is 0, and not NaN.
                total_T1 = torch.where(total_T1 == 0, 1, total_T1)
            weights_TK = weights_TK / total_T1
        return weights_TK if self.scaling_factor == 1 else weights_TK * self.scaling_factor

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, normalize={self.normalize}, "
            f"scaling_factor={self.scaling_factor}"
        )


class SigmoidTopKRouter(Router):
    """DeepSeek-V3: s = sigmoid(logits); the K largest s + expert_bias; weights from s alone.

    With groups the E experts are G equal runs of ids. A group's score is the sum of its two largest
    s + expert_bias; the best `topk_groups` groups stay, the experts of the others are left out.
    Weights are s, normalised or not, times `scaling_factor`. See `Router` for the rest.

    `expert_bias` [E] is an FP32 buffer (it stays FP32 under `.to(torch.bfloat16)`) without
    gradient: `update_expert_bias` moves it after each step, which balances the load without a loss
    (Wang et al. 2024, arXiv:2408.15664).

    Args:
        num_groups: G, a divisor of E with at least two experts in a group; 1 is no groups.
        topk_groups: groups a token may use; they must hold at least K experts.
        normalize: divide the K weights by their sum.
        scaling_factor: multiplies the weights at the end (`routed_scaling_factor`).

    Raises:
        ValueError: for groups that cannot work, and as `Router`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        num_groups: int = 1,
        topk_groups: int = 1,
        normalize: bool = True,
        scaling_factor: float = 1.0,
        bias: bool = False,
        score_before_experts: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            hidden_size,
            num_experts,
            top_k,
            bias=bias,
            score_before_experts=score_before_experts,
            device=device,
            dtype=dtype,
        )
        if num_groups < 1 or num_experts % num_groups:
            raise ValueError(
                f"num_groups is {num_groups}: it must divide num_experts ({num_experts})"
            )
        if num_groups > 1 and num_experts < 2 * num_groups:
            raise ValueError(
                f"num_groups is {num_groups}: a group's score adds its two best experts, so that "
                f"num_experts ({num_experts}) must be at least {2 * num_groups}"
            )
        if not 1 <= topk_groups <= num_groups:
            raise ValueError(
                f"topk_groups is {topk_groups}: it must be between 1 and num_groups ({num_groups})"
            )
        if topk_groups * (num_experts // num_groups) < top_k:
            raise ValueError(
                f"top_k is {top_k}: {topk_groups} groups of {num_experts // num_groups} experts "
                "have fewer, so raise topk_groups"
            )
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.normalize = normalize
        self.scaling_factor = scaling_factor
        self.register_buffer(
            "expert_bias", torch.zeros(num_experts, device=device, dtype=torch.float32)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `Router`; expert_bias becomes 0."""
        super().reset_parameters()
        torch.nn.init.zeros_(self.expert_bias)

    def _apply(self, fn, recurse=True):
        # `.to(torch.bfloat16)` would make a bias that swallows the small steps of its update.
        bias_E = self.expert_bias
        super()._apply(fn, recurse)
        if self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias_E.to(self.expert_bias.device)
        return self

    def scores(self, logits_TE):
        scores_TE = torch.sigmoid(logits_TE)
        return scores_TE, scores_TE / (scores_TE.sum(dim=1, keepdim=True) + SIGMOID_SUM_EPSILON)

    def select(self, scores_TE):
        scores_TE = scores_TE.detach().float()
        if self.num_groups == 1:
            return top_k_lowest_first(scores_TE, self.top_k, self.expert_bias)
        biased_TGN = (scores_TE + self.expert_bias).unflatten(1, (self.num_groups, -1))
        group_scores_TG = torch.topk(biased_TGN, 2, dim=2).values.sum(dim=2)
        groups_TN = top_k_lowest_first(group_scores_TG, self.topk_groups)
        is_kept_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool)
        is_kept_TG = is_kept_TG.scatter(1, groups_TN, True)
        biased_TE = torch.where(is_kept_TG[:, :, None], biased_TGN, -torch.inf).flatten(1)
        return top_k_lowest_first(biased_TE, self.top_k)

    def weigh(self, scores_TK, is_route_TK):
        weights_TK = scores_TK if is_route_TK is None else torch.where(is_route_TK, scores_TK, 0)
        if self.normalize:
            weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + SIGMOID_SUM_EPSILON)
        return weights_TK if self.scaling_factor == 1 else weights_TK * self.scaling_factor

    @torch.no_grad()
    def update_expert_bias(
        self, counts_E: Tensor, *, rate: float = 1e-3, group: dist.ProcessGroup | None = None
    ) -> None:
        """expert_bias += rate * sign(mean load - load): an overloaded expert loses, others gain.

        Args:
            counts_E: how many routes each expert got in this step, int64 [E]: the sum of
                `mok.router.expert_counts` over micro-batches. Integers: the signs are exact.
            rate: the step (gamma of DeepSeek-V3).
            group: sum the counts over these ranks first; all that have this router's parameters, so
                that their biases stay equal.

        Raises:
            ValueError, TypeError: for counts of another shape, or that are no integers.
        """
        if counts_E.shape != (self.num_experts,):
            raise ValueError(
                f"counts has shape {tuple(counts_E.shape)}: it must be ({self.num_experts},), one "
                "count per expert"
            )
        if counts_E.is_floating_point():
            raise TypeError(
                f"counts is {counts_E.dtype}: pass numbers of routes as integers, not fractions"
            )
        counts_E = counts_E.to(device=self.expert_bias.device, dtype=torch.int64)
        if group is not None:
            counts_E = counts_E.clone()
            dist.all_reduce(counts_E, group=group)
        self.expert_bias += rate * torch.sign(counts_E.sum() - self.num_experts * counts_E)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.num_groups > 1:
            text += f", num_groups={self.num_groups}, topk_groups={self.topk_groups}"
        return f"{text}, normalize={self.normalize}, scaling_factor={self.scaling_factor}"


class TopKSoftmaxRouter(Router):
    """The K largest logits, then a softmax over these K: gpt-oss (with bias=True).

    In exact arithmetic this equals `SoftmaxTopKRouter(normalize=True)`, Mixtral's way. See `Router`
    for numerics and arguments.
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
        super().__init__(
            hidden_size,
            num_experts,
            top_k,
            bias=bias,
            score_before_experts=score_before_experts,
            device=device,
            dtype=dtype,
        )
        self.reset_parameters()

    def scores(self, logits_TE):
        return logits_TE, torch.softmax(logits_TE, dim=1)

    def weigh(self, scores_TK, is_route_TK):
        if is_route_TK is None:
            return torch.softmax(scores_TK, dim=1)
        # A token without any route would be a softmax over nothing: NaN, also in its gradient.
        is_none_T1 = ~is_route_TK.any(dim=1, keepdim=True)
        scores_TK = torch.where(is_route_TK | is_none_T1, scores_TK, -torch.inf)
        return torch.where(is_route_TK, torch.softmax(scores_TK, dim=1), 0)
