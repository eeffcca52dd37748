"""`mok.MoELayer` and the reference over several ranks: the same bits for every R, and every T."""

import copy

import pytest
import torch
import torch.distributed as dist

import mok
from mok.reference import moe_reference
from tests._harness import run_ranks
from tests._numerics import (
    assert_bitwise_equal,
    assert_close,
    make_case,
    relative_error,
    run,
    run_exact,
    run_plain,
    three_way,
)

H, I, E, K = 32, 48, 24, 3
PER_TOKEN = ("out", "dx_TH", "dtopk_weights_TK", "dshared_weight_T")
SHARED = ("dshared_gate", "dshared_up", "dshared_down")


def bounds_of(tokens_per_rank, rank):
    start = sum(tokens_per_rank[:rank])
    return start, start + tokens_per_rank[rank]


def run_share(function, case, tokens_per_rank, rank, group, dtype, **options):
    """This rank's tokens and experts of a global case; shared gradients summed over the ranks."""
    num_local = case.tensors["w_gate"].shape[0] // len(tokens_per_rank)
    share = case.tokens(*bounds_of(tokens_per_rank, rank))
    share = share.experts(rank * num_local, (rank + 1) * num_local)
    results = run(function, share, dtype, group=group, **options)
    for name in SHARED:
        if name in results:
            results[name] = results[name].to(torch.promote_types(dtype, torch.float32))
            dist.all_reduce(results[name], group=group)
    return results


def share_of(results, tokens_per_rank, rank):
    """The part of a one-rank result that belongs to this rank."""
    start, stop = bounds_of(tokens_per_rank, rank)
    parts = {}
    for name, value in results.items():
        if name in PER_TOKEN:
            value = value[start:stop]
        elif name not in SHARED:
            num_local = value.shape[0] // len(tokens_per_rank)
            value = value[rank * num_local : (rank + 1) * num_local]
        parts[name] = value
    return parts


RAGGED = [[5, 7], [0, 12], [9, 0, 4], [1, 0, 0, 6]]
FULL = {"bias": True, "shared": 16, "shared_gate": True}


def reference_job(rank, group, tokens_per_rank, routing):
    case = make_case(sum(tokens_per_rank), 3, 12, 16, 24, routing=routing, **FULL)
    results = run_share(moe_reference, case, tokens_per_rank, rank, group, torch.float64)
    whole = share_of(run(moe_reference, case, torch.float64), tokens_per_rank, rank)
    assert_close(results, whole, 1e-12)


@pytest.mark.parametrize("tokens_per_rank", RAGGED)
@pytest.mark.parametrize("routing", ["mixed", "one"])
def test_reference_of_a_group_equals_one_rank(tokens_per_rank, routing):
    run_ranks(len(tokens_per_rank), reference_job, tokens_per_rank, routing)


def bitwise_job(rank, group, tokens_per_rank, routing, dtype, options):
    case = make_case(sum(tokens_per_rank), K, E, H, I, routing=routing, seed=1, **FULL)
    options = {"max_tokens": max(tokens_per_rank)} | options
    results = run_share(mok.moe, case, tokens_per_rank, rank, group, dtype, **options)
    whole = share_of(run(mok.moe, case, dtype), tokens_per_rank, rank)
    shared = {name: results.pop(name) for name in SHARED}
    for name, value in shared.items():
        assert relative_error(value, whole.pop(name)) < (1e-5 if dtype == torch.float32 else 4e-3)
    assert_bitwise_equal(results, whole)


SPLITS = [[19, 18], [37, 0], [13, 12, 12], [0, 30, 7], [10, 9, 9, 9], [1, 0, 35, 1]]


@pytest.mark.parametrize("tokens_per_rank", SPLITS)
@pytest.mark.parametrize("routing", ["uniform", "mixed", "one"])
def test_one_rank_and_several_give_the_same_bits(tokens_per_rank, routing):
    num_ranks = len(tokens_per_rank)
    run_ranks(num_ranks, bitwise_job, tokens_per_rank, routing, torch.bfloat16, {})


@pytest.mark.parametrize("save", ["all", "none"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_same_bits_with_a_small_ring_and_every_saving_policy(save, dtype):
    options = {"save": save, "ring_rows": 256}
    run_ranks(2, bitwise_job, [250, 230], "uniform", dtype, options)


def test_eight_ranks_give_the_same_bits():
    run_ranks(8, bitwise_job, [3, 0, 9, 1, 4, 8, 2, 10], "uniform", torch.bfloat16, {}, timeout=120)


def three_way_job(rank, group, tokens_per_rank):
    case = make_case(sum(tokens_per_rank), K, E, H, I, seed=2, **FULL)
    limit = {"max_tokens": max(tokens_per_rank)}
    ours = run_share(mok.moe, case, tokens_per_rank, rank, group, torch.bfloat16, **limit)
    plain = run_share(moe_reference, case, tokens_per_rank, rank, group, torch.bfloat16)
    three_way(ours, plain, share_of(run_exact(case), tokens_per_rank, rank))
    whole = share_of(run_plain(case), tokens_per_rank, rank)
    assert_close({"out": plain["out"]}, {"out": whole["out"]}, 1e-2)


@pytest.mark.parametrize("tokens_per_rank", [[60, 41], [33, 0, 70]])
def test_within_twice_the_plain_error(tokens_per_rank):
    run_ranks(len(tokens_per_rank), three_way_job, tokens_per_rank)


def idle_job(rank, group):
    """All routes to expert 0: the other experts' gradients are zeros, on every rank."""
    layer = make_layer(group, router=None, bias=True)
    num_tokens = 5 * rank
    x = torch.randn(num_tokens, H).bfloat16().requires_grad_()
    ids_TK = torch.zeros(num_tokens, K, dtype=torch.int64)
    weights_TK = torch.rand(num_tokens, K, requires_grad=True)
    optimizer = torch.optim.AdamW(layer.parameters())
    out = layer(x, topk_ids=ids_TK, topk_weights=weights_TK)
    out.sum().backward()
    first_owned = 0 if rank == 0 else None
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        for e in range(grad.shape[0]):
            assert bool((grad[e] != 0).any()) == (e == first_owned), (name, e)
    assert x.grad.shape == x.shape
    assert weights_TK.grad.shape == (num_tokens, K)
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_idle_ranks_get_zeros(num_ranks):
    run_ranks(num_ranks, idle_job)


def make_layer(group, seed=5, **settings):
    torch.manual_seed(seed)
    return mok.MoELayer(H, I, E, K, group=group, **settings)


def init_job(rank, group):
    settings = {"shared_intermediate_size": 16, "shared_gate": True, "bias": True}
    ours, one = make_layer(group, **settings), make_layer(None, **settings)
    num_local = E // group.size()
    for name, value in ours.state_dict().items():
        expected = one.state_dict()[name]
        if name.startswith("experts."):
            expected = expected[rank * num_local : (rank + 1) * num_local]
        assert torch.equal(value, expected), name
    return ours.experts.extra_repr(), repr(ours)


def test_every_number_of_ranks_starts_from_the_same_experts():
    results = run_ranks(3, init_job)
    assert [text for text, _ in results] == [
        f"experts {8 * r}..{8 * r + 7}, bias=True" for r in range(3)
    ]
    assert all("ranks=3" in text for _, text in results)


def router_job(rank, group, tokens_per_rank):
    """Router and shared gradients hold this rank's tokens: their sum is the one-rank gradient."""
    settings = {"shared_intermediate_size": 16, "shared_gate": True}
    torch.manual_seed(11)
    x_all = torch.randn(sum(tokens_per_rank), H)
    start, stop = bounds_of(tokens_per_rank, rank)

    def loss(layer, x):
        out, routing = layer(x, return_router_output=True)
        # Sums over tokens and no means, so that ranks add up.
        return out.square().sum() + routing.probabilities_TE.square().sum()

    one, ours = make_layer(None, **settings), make_layer(group, **settings)
    loss(one, x_all).backward()
    loss(ours, x_all[start:stop]).backward()
    for name, parameter in ours.named_parameters():
        grad, expected = parameter.grad, one.get_parameter(name).grad
        if name.startswith("experts."):
            num_local = E // group.size()
            expected = expected[rank * num_local : (rank + 1) * num_local]
        else:
            dist.all_reduce(grad, group=group)
        assert relative_error(grad, expected) < 1e-5, name


@pytest.mark.parametrize("tokens_per_rank", [[20, 13], [0, 9, 11]])
def test_router_gradients_add_up_over_ranks(tokens_per_rank):
    run_ranks(len(tokens_per_rank), router_job, tokens_per_rank)


def raised(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def tokens(count):
    return torch.randn(count, H).bfloat16()


def max_tokens_job(rank, group):
    """The first call agrees on the largest T; later a larger one raises everywhere."""
    layer = make_layer(group)
    assert layer(tokens(4 + 3 * rank)).shape == (4 + 3 * rank, H)
    fits = layer(tokens(7)).shape[0]
    outcome = raised(layer, tokens(8 if rank == 1 else 2))
    twin = copy.deepcopy(layer)
    again = [layer(tokens(7)).shape[0], twin(tokens(3)).shape[0]]
    return fits, outcome, again


def test_first_call_sets_max_tokens():
    results = run_ranks(2, max_tokens_job)
    assert [fits for fits, _, _ in results] == [7, 7]
    assert [again for _, _, again in results] == [[7, 3], [7, 3]]
    (peer, peer_text), (culprit, text) = results[0][1], results[1][1]
    assert culprit == "ValueError"
    assert "max_tokens" in text
    assert "8" in text
    assert peer == "PeerAbortedError"
    assert "max_tokens" in peer_text
    assert "rank 1" in peer_text


def no_tokens_job(rank, group):
    layer = make_layer(group)
    outcome = raised(layer, tokens(0))
    limited = make_layer(group, max_tokens=5)
    return outcome, limited(tokens(0)).shape[0], limited(tokens(5 * rank)).shape[0]


def test_no_tokens_anywhere():
    for rank, (outcome, none, some) in enumerate(run_ranks(2, no_tokens_job)):
        assert outcome[0] == "ValueError"
        assert "pass max_tokens" in outcome[1]
        assert (none, some) == (0, 5 * rank)


def bad_input_job(rank, group, settings, when, kind):
    """One rank passes what the layer refuses; then all make a good call."""
    layer = make_layer(group, **settings)
    if when == "later":
        layer(tokens(6))
    bad = {
        "shape": (torch.zeros(3, 8).bfloat16(), {}),
        "dtype": (torch.zeros(3, H).double(), {}),
        "ids": (tokens(3), {"topk_ids": torch.zeros(3, K)}),
    }[kind]
    x, call = bad if rank == 1 else (tokens(3), {})
    outcome = raised(layer, x, **call)
    return outcome, layer(tokens(6)).shape[0]


@pytest.mark.parametrize("settings", [{}, {"max_tokens": 6}])
@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("kind", ["shape", "dtype", "ids"])
def test_a_refused_input_reaches_the_peers(settings, when, kind):
    results = run_ranks(3, bad_input_job, settings, when, kind)
    culprit, text = results[1][0]
    assert culprit in ("ValueError", "TypeError")
    for rank in (0, 2):
        peer, peer_text = results[rank][0]
        assert (peer, text in peer_text) == ("PeerAbortedError", True), peer_text
    assert [after for _, after in results] == [6, 6, 6]


def construction_job(rank, group):
    wrong = raised(mok.MoELayer, H, I, 6, 2, group=group)
    alone = dist.new_group([rank], use_local_synchronization=True)
    single = make_layer(alone)
    return wrong, single.num_ranks, single(tokens(4)).shape[0], single(tokens(9)).shape[0]


def test_experts_that_do_not_divide_and_groups_of_one():
    for wrong, num_ranks, *shapes in run_ranks(4, construction_job):
        assert wrong[0] == "ValueError"
        assert "num_experts is 6: it must be a multiple of the group's 4 ranks" in wrong[1]
        assert (num_ranks, shapes) == (1, [4, 9])
