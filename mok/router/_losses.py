"""Losses on a router's decisions, and what they count.

With a process group a loss is taken over the tokens of all its ranks: counts and numbers of tokens
are added up, probabilities are not. What a rank gets is its share, such that the *mean over the
ranks* of the values is the loss of the whole batch, and the mean of the ranks' gradients its
gradient: add it to the rank's main loss and average gradients as always (DDP, FSDP). The shares of
single ranks mean nothing by themselves.

Counts are integers and sums have a fixed order: same input, same bits, without atomics.

Shapes: T tokens of this rank, K experts per token, E experts.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from mok.router._base import RouterOutput, no_autocast


def expert_counts(topk_ids_TK: Tensor, num_experts: int, mask_T: Tensor | None = None) -> Tensor:
    """How many routes each expert gets, int64 [E]; ids outside 0..E-1 and masked tokens do not
    count. For `SigmoidTopKRouter.update_expert_bias` and for looking at the load."""
    _check_tokens("mask", mask_T, topk_ids_TK.shape[0], (torch.bool,))
    is_counted_TK = (topk_ids_TK >= 0) & (topk_ids_TK < num_experts)
    if mask_T is not None:
        is_counted_TK = is_counted_TK & mask_T[:, None]
    # One bin more than there are experts takes what does not count.
    bins = torch.where(is_counted_TK, topk_ids_TK, num_experts).reshape(-1).long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=bins.device)
    return counts.scatter_add(0, bins, torch.ones_like(bins))[:num_experts]


def load_balancing_loss(
    router_output: RouterOutput,
    mask_T: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """E * sum_e f_e P_e: small when the experts are used evenly.

    f_e is the fraction of tokens that chose expert e (no gradient; the f_e add up to K), P_e the
    mean probability of e. An even routing gives K, all tokens on the same K experts up to E. This
    is the loss of Mixtral in Hugging Face transformers (`load_balancing_loss_func`) for one layer,
    and with K = 1 equations 4 to 6 of the Switch Transformer (Fedus et al. 2021,
    arXiv:2101.03961), without the coefficient. Divide by K for the form in which an even routing
    always gives 1.

    Args:
        router_output: of one layer; ids outside 0..E-1 are not counted.
        mask_T: bool [T], False for tokens that shall not count (padding).
        group: take f and P over the tokens of these ranks (the head of this file says what a rank
            then gets); None is this rank's tokens.

    Returns:
        An FP32 scalar, 0 without tokens. Ranks average it as they average their main loss.
    """
    ids_TK, _, probabilities_TE, _ = router_output
    num_tokens, num_experts = probabilities_TE.shape
    counts_E = expert_counts(ids_TK, num_experts, mask_T)
    if mask_T is None:
        tokens = torch.full_like(counts_E[:1], num_tokens)
        probability_E = probabilities_TE.sum(dim=0)
    else:
        tokens = mask_T.sum().reshape(1)
        probability_E = torch.where(mask_T[:, None], probabilities_TE, 0).sum(dim=0)
    counts_E, tokens, num_ranks = _sum_over_ranks(counts_E, tokens, group)
    tokens = tokens.clamp(min=1)
    return (num_ranks * num_experts) * torch.sum((counts_E / tokens) * (probability_E / tokens))


def sequence_load_balancing_loss(
    router_output: RouterOutput,
    num_sequences: int,
    *,
    sequence_ids_T: Tensor | None = None,
    mask_T: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """DeepSeek-V3's complementary loss: the balance within each sequence, averaged over them.

    For a sequence of N tokens f_e = E / (K N) * (times e was chosen), P_e the mean of
    `probabilities_TE`, and its loss is sum_e f_e P_e (equations 17 to 20, arXiv:2412.19437),
    without the coefficient. An even routing gives 1.

    Args:
        router_output: of one layer; ids outside 0..E-1 are not counted.
        num_sequences: on this rank. T is cut into as many equal runs of tokens, unless ids are
            given.
        sequence_ids_T: int64 [T], the sequence of each token in 0..num_sequences-1, for sequences
            of different lengths.
        mask_T: bool [T], False for tokens that shall not count (padding).
        group: average over the sequences of all these ranks (the head of this file says what a rank
            then gets). A sequence lies on one rank.

    Returns:
        An FP32 scalar, 0 without sequences. Sequences without tokens count as 0.

    Raises:
        ValueError: if num_sequences is negative, if T is no multiple of it and sequence_ids_T is
            None, and for another number of sequence ids or mask elements than tokens.
    """
    ids_TK, _, probabilities_TE, _ = router_output
    (num_tokens, num_experts), top_k = probabilities_TE.shape, ids_TK.shape[1]
    device = probabilities_TE.device
    _check_tokens("mask", mask_T, num_tokens, (torch.bool,))
    _check_tokens("sequence_ids", sequence_ids_T, num_tokens, (torch.int32, torch.int64))
    if num_sequences < 0:
        raise ValueError(f"num_sequences is {num_sequences}: it must not be negative")
    if sequence_ids_T is None:
        if num_tokens % max(num_sequences, 1) or (num_tokens and not num_sequences):
            raise ValueError(
                f"num_sequences is {num_sequences}: it must divide the {num_tokens} tokens; for "
                "sequences of different lengths pass sequence_ids_T"
            )
        length = num_tokens // max(num_sequences, 1)
        sequence_ids_T = torch.arange(num_sequences, device=device).repeat_interleave(length)
    # Sums over a sequence are products with its row of ones and zeros: no scattered additions.
    is_in_ST = torch.arange(num_sequences, device=device)[:, None] == sequence_ids_T
    if mask_T is not None:
        is_in_ST = is_in_ST & mask_T
        probabilities_TE = torch.where(mask_T[:, None], probabilities_TE, 0)
    is_counted_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    # In FP64, which no setting replaces by TF32.
    chosen_TE = torch.zeros(num_tokens, num_experts + 1, device=device, dtype=torch.float64)
    bins_TK = torch.where(is_counted_TK, ids_TK, num_experts).long()
    chosen_TE = chosen_TE.scatter_add(1, bins_TK, torch.ones_like(bins_TK, dtype=torch.float64))
    with no_autocast(probabilities_TE):
        is_in_ST = is_in_ST.double()
        lengths_S1 = is_in_ST.sum(dim=1, keepdim=True).clamp(min=1)
        fraction_SE = (is_in_ST @ chosen_TE[:, :num_experts]) * (num_experts / top_k) / lengths_S1
        probability_SE = (is_in_ST @ probabilities_TE.double()) / lengths_S1
        loss = torch.sum(fraction_SE * probability_SE).to(probabilities_TE.dtype)
    count = torch.full((1,), num_sequences, dtype=torch.int64, device=device)
    _, count, num_ranks = _sum_over_ranks(count, count, group)
    return loss * num_ranks / count.clamp(min=1).squeeze(0)


def z_loss(
    router_output: RouterOutput,
    mask_T: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The mean over tokens of logsumexp(logits)^2, which keeps logits small (ST-MoE, Zoph et al.
    2022, arXiv:2202.08906), without the coefficient.

    Args:
        router_output: of one layer.
        mask_T: bool [T], False for tokens that shall not count (padding).
        group: the mean over the tokens of all these ranks (the head of this file says what a rank
            then gets); None is this rank's tokens.

    Returns:
        An FP32 scalar, 0 without tokens.
    """
    logits_TE = router_output.logits_TE
    _check_tokens("mask", mask_T, logits_TE.shape[0], (torch.bool,))
    count = torch.full((1,), logits_TE.shape[0], dtype=torch.int64, device=logits_TE.device)
    if mask_T is not None:
        count = mask_T.sum().reshape(1)
        logits_TE = torch.where(mask_T[:, None], logits_TE, 0)
    squares_T = torch.logsumexp(logits_TE, dim=1).square()
    if mask_T is not None:
        squares_T = torch.where(mask_T, squares_T, 0)
    _, count, num_ranks = _sum_over_ranks(count, count, group)
    return squares_T.sum() * num_ranks / count.clamp(min=1).squeeze(0)


def _check_tokens(
    name: str, values_T: Tensor | None, num_tokens: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Raises ValueError or TypeError: a single element would be broadcast to all tokens."""
    if values_T is None:
        return
    if values_T.shape != (num_tokens,):
        raise ValueError(
            f"{name} has shape {tuple(values_T.shape)}: it must have one element for each of the "
            f"router's {num_tokens} tokens, so flatten it"
        )
    if values_T.dtype not in dtypes:
        raise TypeError(
            f"{name} is {values_T.dtype}: it must be {' or '.join(map(str, dtypes))}, so cast it"
        )


def _sum_over_ranks(counts: Tensor, total: Tensor, group) -> tuple[Tensor, Tensor, int]:
    """Both summed over the ranks by one collective of integers, and the number of ranks."""
    if group is None:
        return counts, total, 1
    both = torch.cat([counts, total])
    dist.all_reduce(both, group=group)
    return both[: len(counts)], both[len(counts) :], dist.get_world_size(group)
