"""`mok.functional` over several ranks: the one-rank bits, and two micro-batches in flight."""

import pytest
import torch
import torch.distributed as dist

import mok
from mok import functional
from mok.functional import MoKConfig
from tests._harness import run_ranks
from tests._numerics import SHARED, WEIGHTS, assert_bitwise_equal, make_case, relative_error, run

K, E, H, I = 3, 12, 16, 24
BF16 = torch.bfloat16
ROUTED_NAMES = ("dw_gate", "dw_up", "dw_down")


def share_of(case, tokens_per_rank, rank):
    start = sum(tokens_per_rank[:rank])
    num_local = E // len(tokens_per_rank)
    part = case.tokens(start, start + tokens_per_rank[rank])
    return part.experts(rank * num_local, (rank + 1) * num_local)


def arguments(case):
    shared = [case.tensors[name].to(BF16) if SHARED[0] in case.tensors else None for name in SHARED]
    routed = [case.tensors[name].to(BF16) for name in WEIGHTS]
    return case.tensors["x_TH"].to(BF16), case.tensors["topk_weights_TK"], *shared, *routed


def make_workspace(create, group, max_tokens):
    return create(
        MoKConfig(), group, device="cpu", num_local_tokens=max_tokens, hidden_size=H, topk=K
    )


def step_job(rank, group, tokens_per_rank, macrobatch_size, shared):
    whole = make_case(sum(tokens_per_rank), K, E, H, I, shared=shared)
    expected = run(mok.moe, whole, BF16)
    case = share_of(whole, tokens_per_rank, rank)
    config = MoKConfig(macrobatch_size=macrobatch_size)
    workspace = make_workspace(functional.get_workspace, group, max(tokens_per_rank))
    num_local = E // len(tokens_per_rank)
    schedule = functional.build_schedule(
        workspace, config, case.topk_ids_TK, num_local_experts=num_local
    )
    args = arguments(case)
    out, context = functional.forward(config, workspace, schedule, *args)
    gradients = functional.backward(
        config, workspace, schedule, context, case.dout_TH.to(BF16), *args
    )
    d_x, d_weights, *d_routed, d_sgate, d_sup, d_sdown = gradients
    start = sum(tokens_per_rank[:rank])
    tokens = slice(start, start + tokens_per_rank[rank])
    experts = slice(rank * num_local, (rank + 1) * num_local)
    ours = {"out": out, "dx_TH": d_x, "dtopk_weights_TK": d_weights}
    theirs = {name: expected[name][tokens] for name in ours}
    ours |= dict(zip(ROUTED_NAMES, d_routed, strict=True))
    theirs |= {name: expected[name][experts] for name in ROUTED_NAMES}
    assert_bitwise_equal(ours, theirs)
    for name, value in zip(SHARED, (d_sgate, d_sup, d_sdown), strict=True):
        assert (value is None) == (shared is None)
        if value is not None:
            value = value.float()
            dist.all_reduce(value, group=group)
            assert relative_error(value, expected["d" + name].float()) < 4e-3
    # Each rank's load, and rows from every rank that has tokens for it.
    ids = whole.topk_ids_TK
    counts = [(ids == e).sum().item() for e in range(experts.start, experts.stop)]
    assert schedule.tokens_per_expert.tolist() == counts
    assert int((schedule.peer_rank >= 0).sum()) == sum(counts)
    functional.clear_workspace_cache()


@pytest.mark.parametrize("tokens_per_rank", [[40, 33], [128, 7], [0, 50], [9, 0, 300]])
@pytest.mark.parametrize("macrobatch_size", [131072, 128])
@pytest.mark.parametrize("shared", [None, 8])
def test_gives_the_one_rank_bits(tokens_per_rank, macrobatch_size, shared):
    run_ranks(len(tokens_per_rank), step_job, tokens_per_rank, macrobatch_size, shared)


def interleaved_job(rank, group):
    """Forward A, forward B, backward A, backward B, each in a workspace of its own."""
    config = MoKConfig()
    cases = [make_case(20, K, E, H, I, seed=seed) for seed in range(2)]
    expected = [run(mok.moe, case, BF16) for case in cases]
    shares = [share_of(case, [10, 10], rank) for case in cases]
    spaces = [make_workspace(functional.create_workspace, group, 10) for _ in cases]
    assert spaces[0].name != spaces[1].name
    calls = []
    for case, workspace in zip(shares, spaces, strict=True):
        schedule = functional.build_schedule(
            workspace, config, case.topk_ids_TK, num_local_experts=E // 2
        )
        args = arguments(case)
        out, context = functional.forward(config, workspace, schedule, *args)
        calls.append((workspace, schedule, context, case.dout_TH.to(BF16), args, out))
    for call, results in zip(calls, expected, strict=True):
        workspace, schedule, context, dout, args, out = call
        gradients = functional.backward(config, workspace, schedule, context, dout, *args)
        ours = {"out": out, "dx_TH": gradients[0]}
        tokens = slice(10 * rank, 10 * rank + 10)
        assert_bitwise_equal(ours, {name: results[name][tokens] for name in ours})
    for workspace in spaces:
        workspace.close()


def test_two_micro_batches_in_two_workspaces():
    run_ranks(2, interleaved_job)


def different_job(rank, group):
    """Ranks that create their workspaces in different orders learn of it at once."""
    first = mok.workspace.declare(
        group, max_tokens=8, hidden_size=H, top_k=K, dtype=BF16, tag="a" if rank else "b"
    )
    try:
        mok.workspace.ensure(first)
    except Exception as error:
        return type(error).__name__, str(error)


def test_tags_are_compared():
    for name, text in run_ranks(2, different_job):
        assert name == "SymmetricHeapError"
        assert "tag is" in text


def refused_schedule_job(rank, group, what):
    """Rank 1 cannot build its schedule: rank 0 learns why, and the next calls work."""
    case = share_of(make_case(12, K, E, H, I), [6, 6], rank)
    config = MoKConfig()
    workspace = make_workspace(functional.create_workspace, group, 6)
    ids = case.topk_ids_TK
    wrong = {"tokens": ids.repeat(2, 1), "dtype": ids.float(), "list": ids.tolist()}

    def step(ids):
        schedule = functional.build_schedule(workspace, config, ids, num_local_experts=E // 2)
        return functional.forward(config, workspace, schedule, *arguments(case))[0]

    try:
        step(wrong[what] if rank == 1 else ids)
        error = None
    except Exception as raised:
        error = raised
    assert step(ids).isfinite().all()
    workspace.close()
    return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("tokens", "ValueError", "top_experts has T = 12 tokens"),
        ("dtype", "TypeError", "top_experts is torch.float32"),
        ("list", "TypeError", "top_experts is a list"),
    ],
)
def test_a_refused_schedule_reaches_the_peers(what, error, message):
    (peer, told), (culprit, said) = run_ranks(2, refused_schedule_job, what)
    assert culprit == error
    assert peer == "PeerAbortedError"
    assert message in said
    assert message in told


def refused_call_job(rank, group, what):
    """Rank 1 passes something wrong after the schedule: rank 0 learns why, the next calls work."""
    case = share_of(make_case(12, K, E, H, I), [6, 6], rank)
    config = MoKConfig()
    workspace = make_workspace(functional.create_workspace, group, 6)
    args = arguments(case)

    def step(weights, limit):
        schedule = functional.build_schedule(
            workspace, config, case.topk_ids_TK, num_local_experts=E // 2
        )
        out, context = functional.forward(config, workspace, schedule, *args[:-1], weights)
        return functional.backward(config, workspace, schedule, context, out, *args, limit)[0]

    is_wrong = rank == 1
    weights = None if is_wrong and what == "weights" else args[-1]
    limit = 7.0 if is_wrong and what == "context" else None
    try:
        step(weights, limit)
        error = None
    except Exception as raised:
        error = raised
    assert step(args[-1], None).isfinite().all()
    workspace.close()
    return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("weights", "TypeError", "w_routed_down is None: it must be a tensor"),
        (
            "context",
            "ValueError",
            "context was made with swiglu_limit = None, this backward has 7.0",
        ),
    ],
)
def test_a_refused_call_reaches_the_peers(what, error, message):
    (peer, told), (culprit, said) = run_ranks(2, refused_call_job, what)
    assert (culprit, peer) == (error, "PeerAbortedError")
    assert message in said
    assert message in told
