"""Cases that users of such systems report, on several ranks; docs/user-reports.md lists them.

The ids are those of the list.
"""

import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import mok
from tests._harness import run_ranks, run_ranks_fresh
from tests._numerics import assert_bitwise_equal, make_case, run
from tests.dist.test_layer_ep import run_share, share_of

H, I, E, K = 32, 48, 12, 6
BACKENDS = ("cpu", "collective")


def empty_rank_job(rank, group, counts, backend, wrap):
    """Rank 0 has no token and serves the others'; then all run the same all-reduce."""
    torch.manual_seed(3)
    layer = mok.MoELayer(
        *(H, I, E, K), group=group, router=None, bias=True, max_tokens=8, backend=backend
    )
    num_tokens = counts[rank]
    x = torch.randn(num_tokens, H).requires_grad_()
    weights_TK = torch.rand(num_tokens, K, requires_grad=True)
    ids_TK = torch.randint(E // group.size(), (num_tokens, K))  # all on rank 0

    def call(x):
        return layer(x, topk_ids=ids_TK, topk_weights=weights_TK)

    out = checkpoint(call, x, use_reentrant=False) if wrap else call(x)
    out.sum().backward()
    rows = torch.tensor(num_tokens * K)
    dist.all_reduce(rows, group=group)
    torch.optim.AdamW(layer.parameters()).step()
    # An expert's bias gets the sum of its weights: all rows of all ranks have arrived at rank 0.
    weights = weights_TK.detach().sum()
    dist.all_reduce(weights, group=group)
    total = layer.experts.b_down.grad.sum() / H
    expected = weights if rank == 0 else torch.zeros(())
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
    assert out.shape == x.grad.shape == (num_tokens, H)
    return int(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("counts", [[0, 4, 4, 4], [1, 0, 0, 0], [0, 5]])
def test_a1_a3_a4_a5_a10_a_rank_without_tokens_serves_the_others(counts, backend, wrap):
    results = run_ranks(len(counts), empty_rank_job, counts, backend, wrap)
    assert results == [sum(counts) * K] * len(counts)


def strided_groups_job(rank, group, backend):
    """Expert groups {0, 2} and {1, 3}, and then one over all four, on the same ranks."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    mine, place = groups[rank % 2], rank // 2
    case = make_case(20, 3, E, H, I, seed=rank % 2)
    whole = run(mok.moe, case, torch.bfloat16)
    options = {"max_tokens": 10, "backend": backend}
    ours = run_share(mok.moe, case, [10, 10], place, mine, torch.bfloat16, **options)
    everyone = make_case(20, 3, E, H, I, seed=5)
    of_all = run_share(mok.moe, everyone, [5] * 4, rank, group, torch.bfloat16, **options)
    again = run_share(mok.moe, case, [10, 10], place, mine, torch.bfloat16, **options)
    assert_bitwise_equal(ours, again)
    if backend == "cpu":
        assert_bitwise_equal(ours, share_of(whole, [10, 10], place))
        expected = share_of(run(mok.moe, everyone, torch.bfloat16), [5] * 4, rank)
        assert_bitwise_equal(of_all, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_e3_groups_of_any_ranks_that_overlap(backend):
    run_ranks(4, strided_groups_job, backend)


def late_job(rank, group):
    layer = mok.MoELayer(H, I, E, 3, group=group, max_tokens=8)
    if rank == 1:
        time.sleep(6)
    begin = time.monotonic()
    layer(torch.randn(4, H)).sum().backward()
    return time.monotonic() - begin


def test_e4_e5_a_rank_that_starts_late_is_waited_for():
    early, _ = run_ranks_fresh(2, late_job)
    assert early > 4


def six_ranks_job(rank, group):
    case = make_case(24, 3, E, H, I, seed=1)
    ours = run_share(mok.moe, case, [4] * 6, rank, group, torch.bfloat16, max_tokens=4)
    assert_bitwise_equal(ours, share_of(run(mok.moe, case, torch.bfloat16), [4] * 6, rank))


def test_d6_six_ranks():
    run_ranks(6, six_ranks_job)


def alone_job(rank, group):
    """R = 1, with and without a process group: no collective, so that only rank 0 may call it."""
    if rank:
        return None
    alone = dist.new_group([0], use_local_synchronization=True)
    torch.manual_seed(0)
    first = mok.MoELayer(H, I, E, 3, group=alone)
    torch.manual_seed(0)
    second = mok.MoELayer(H, I, E, 3)
    x = torch.randn(7, H)
    assert torch.equal(first(x), second(x))


def test_h8_one_rank_pays_for_no_collectives():
    run_ranks(2, alone_job)
