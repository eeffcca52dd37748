"""Losses and bias updates whose statistics are taken over the ranks of a group."""

import pytest
import torch
import torch.distributed as dist

from mok.router import (
    SigmoidTopKRouter,
    expert_counts,
    load_balancing_loss,
    sequence_load_balancing_loss,
    z_loss,
)
from tests._harness import run_ranks
from tests._numerics import relative_error

H, E, K, LENGTH = 16, 8, 2, 6


def all_losses(output, num_sequences, mask_T, group):
    return torch.stack(
        [
            load_balancing_loss(output, mask_T, group=group),
            sequence_load_balancing_loss(output, num_sequences, mask_T=mask_T, group=group),
            z_loss(output, mask_T, group=group),
        ]
    )


def group_job(rank, group, sequences_per_rank, masked, compiled):
    """The mean over ranks, of values and of gradients, is that of the whole batch on one rank."""
    torch.manual_seed(1)
    router = SigmoidTopKRouter(H, E, K)
    total = sum(sequences_per_rank)
    x_all = torch.randn(total * LENGTH, H)
    mask_all = torch.rand(total * LENGTH) < 0.6
    start = sum(sequences_per_rank[:rank]) * LENGTH
    stop = start + sequences_per_rank[rank] * LENGTH

    whole = all_losses(router(x_all), total, mask_all if masked else None, None)
    whole.sum().backward()
    expected = router.weight.grad.clone()
    router.weight.grad = None

    mask_T = mask_all[start:stop] if masked else None

    def share(x_TH):
        return all_losses(router(x_TH), sequences_per_rank[rank], mask_T, group)

    if compiled:
        share = torch.compile(share, fullgraph=True, backend="aot_eager")
    ours = share(x_all[start:stop])
    ours.sum().backward()
    values, grad = ours.detach(), router.weight.grad
    for tensor in (values, grad):
        dist.all_reduce(tensor, group=group)
        tensor /= group.size()
    assert relative_error(values, whole.detach()) < 1e-6
    assert relative_error(grad, expected) < 1e-5


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("sequences_per_rank", [[2, 2], [3, 1], [0, 4], [1, 0, 2]])
def test_shares_average_to_the_whole_batch(sequences_per_rank, masked):
    run_ranks(len(sequences_per_rank), group_job, sequences_per_rank, masked, False)


def test_shares_compile_without_breaks():
    run_ranks(2, group_job, [2, 3], True, True)


def bias_job(rank, group, tokens_per_rank):
    torch.manual_seed(1)
    router, one = SigmoidTopKRouter(H, E, K), SigmoidTopKRouter(H, E, K)
    one.load_state_dict(router.state_dict())
    x_all = torch.randn(sum(tokens_per_rank), H)
    start = sum(tokens_per_rank[:rank])
    counts_E = expert_counts(router(x_all[start : start + tokens_per_rank[rank]]).topk_ids_TK, E)
    before = counts_E.clone()
    router.update_expert_bias(counts_E, group=group)
    one.update_expert_bias(expert_counts(one(x_all).topk_ids_TK, E))
    assert torch.equal(counts_E, before)
    assert torch.equal(router.expert_bias, one.expert_bias)
    return router.expert_bias.abs().sum().item()


def test_bias_update_counts_all_ranks():
    assert min(run_ranks(3, bias_job, [5, 0, 20])) > 0
