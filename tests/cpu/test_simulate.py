"""`mok.simulate`: the schedule holds under every adversary, and every planted bug is found."""

import time
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mok
from mok.simulation import ALL_GRADIENTS, ROUTINGS, routing_ids

POLICIES = (
    "random",
    "latest",
    "oldest",
    "burst",
    "starve_cta",
    "starve_role",
    "hold_stores",
    "mixed",
)

# Several chunks, segments of several row blocks, tokens with several rows in one chunk, few CTAs.
SKEWED = {
    "num_tokens": [300, 40],
    "num_experts": 8,
    "top_k": 4,
    "routing": "zipf",
    "ring_rows": 384,
    "hidden": 512,
    "intermediate": 256,
    "shared_intermediate": 128,
    "num_ctas": 3,
}
REPLAY = SKEWED | {"direction": "backward", "save": "none"}
SAVED = SKEWED | {"direction": "backward", "save": "gate_up", "gradients": list(ALL_GRADIENTS)}
# One segment longer than the ring: it is cut, and its accumulators are carried on.
CUT = {
    "num_tokens": [200, 200],
    "num_experts": 4,
    "top_k": 1,
    "routing": "one_expert",
    "ring_rows": 32,
    "hidden": 128,
    "intermediate": 128,
    "num_ctas": 4,
    "direction": "backward",
    "tuning": {"block_m": 32},
}
# Chunks of several short segments that share tokens.
SHORT_SEGMENTS = REPLAY | {
    "num_tokens": [100, 40],
    "num_experts": 32,
    "routing": "random",
    "ring_rows": 512,
    "num_ctas": 2,
}
IDLE = {"num_tokens": 40, "num_experts": 8, "routing": "one_expert", "direction": "backward"}


def check(**arguments):
    result = mok.simulate(**arguments)
    assert result.ok, "\n".join(error.message for error in result.errors)
    return result


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "case", [SKEWED, REPLAY, SAVED, CUT, SHORT_SEGMENTS], ids=lambda c: c.get("direction")
)
def test_holds_under_every_policy(case, policy):
    check(**case, policy=policy, seeds=60)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_holds_for_any_layer(data):
    num_ranks = data.draw(st.sampled_from([1, 2, 3, 5]), "ranks")
    top_k = data.draw(st.integers(1, 4), "top_k")
    num_experts = num_ranks * data.draw(st.sampled_from([1, 2, 6]), "local experts")
    tokens = [data.draw(st.integers(0, 150), "tokens") for _ in range(num_ranks)]
    ids = routing_ids(
        data.draw(st.sampled_from(ROUTINGS), "routing"),
        num_ranks=num_ranks,
        num_tokens=tokens,
        num_experts=max(num_experts, top_k),  # ids from E on are no routes
        top_k=top_k,
        seed=data.draw(st.integers(0, 99), "routing seed"),
    )
    block_m = data.draw(st.sampled_from([16, 64]), "block_m")
    num_ctas = data.draw(st.integers(1, 5), "ctas")
    check(
        ids=ids,
        num_experts=num_experts,
        hidden=data.draw(st.sampled_from([8, 384]), "hidden"),
        intermediate=data.draw(st.sampled_from([8, 384]), "intermediate"),
        shared_intermediate=data.draw(st.sampled_from([0, 200]), "shared"),
        ring_rows=block_m * data.draw(st.sampled_from([1, 2, 3, 7, 40]), "ring"),
        save=data.draw(st.sampled_from(["none", "gate_up", "all"]), "save"),
        direction=data.draw(st.sampled_from(["forward", "backward", "recompute"]), "direction"),
        gradients=[name for name in ALL_GRADIENTS if data.draw(st.booleans(), name)],
        accumulate=data.draw(st.booleans(), "accumulate"),
        num_ctas=num_ctas,
        resident_ctas=data.draw(st.integers(1, num_ctas), "resident"),
        late_after_exit=data.draw(st.booleans(), "late"),
        stalled_rank=data.draw(st.sampled_from([None, 0]), "stalled"),
        pull_batch=data.draw(st.sampled_from([1, 5]), "pull batch"),
        seeds=data.draw(st.lists(st.integers(0, 2**32), min_size=8, max_size=8), "seeds"),
        tuning={
            "block_m": block_m,
            "rows_per_store": block_m // 2,
            "lag_waves": data.draw(st.sampled_from([1, 2, 30]), "lag"),
            "group_m": data.draw(st.sampled_from([1, 2, 16]), "group_m"),
            "group_waves": data.draw(st.sampled_from([1, 4]), "group waves"),
            "window_blocks": data.draw(st.integers(1, 4), "window"),
            "pull_bytes": data.draw(st.sampled_from([256, 4096]), "pull bytes"),
        },
    )


UNWRITTEN = "read before written"
OVERWRITE = "overwritten before last reader"

# Case, bug, type of the first error.
PLANTED = [
    (SKEWED, "drop_wait:x", UNWRITTEN),
    (SKEWED, "drop_wait:gate_up", UNWRITTEN),
    (SKEWED, "drop_wait:hidden_read", OVERWRITE),
    (REPLAY, "drop_wait:dout", UNWRITTEN),
    (REPLAY, "drop_wait:dhidden", UNWRITTEN),
    (REPLAY, "drop_wait:dx_read", OVERWRITE),
    (REPLAY, "drop_wait:span_read", OVERWRITE),
    (CUT, "drop_wait:accumulator", "accumulator out of order"),
    (SKEWED, "shift_wait:x", UNWRITTEN),
    (SKEWED, "shift_wait:gate_up", UNWRITTEN),
    (SKEWED, "shift_wait:hidden_read", OVERWRITE),
    (REPLAY, "shift_wait:dout", UNWRITTEN),
    (REPLAY, "shift_wait:dhidden", UNWRITTEN),
    (REPLAY, "shift_wait:dx_read", OVERWRITE),
    (REPLAY, "shift_wait:span_read", OVERWRITE),
    (CUT, "shift_wait:accumulator", "accumulator out of order"),
    (SKEWED, "early_signal:x", UNWRITTEN),
    (SKEWED, "early_signal:gate_up", UNWRITTEN),
    (SKEWED, "early_signal:hidden_read", OVERWRITE),
    (REPLAY, "early_signal:dout", UNWRITTEN),
    (REPLAY, "early_signal:dhidden", UNWRITTEN),
    (REPLAY, "early_signal:dx_read", OVERWRITE),
    (REPLAY, "early_signal:span_read", OVERWRITE),
    (CUT, "early_signal:accumulator", "accumulator out of order"),
    (SKEWED, "never_signal:x", "deadlock"),
    (SKEWED, "never_signal:gate_up", "deadlock"),
    (SKEWED, "never_signal:hidden_read", "deadlock"),
    (REPLAY, "never_signal:dout", "deadlock"),
    (REPLAY, "never_signal:dhidden", "deadlock"),
    (REPLAY, "never_signal:dx_read", "deadlock"),
    (REPLAY, "never_signal:span_read", "deadlock"),
    (CUT, "never_signal:accumulator", "deadlock"),
    (SKEWED, "signal_once_per_tile", "deadlock"),
    (REPLAY, "first_block_only", UNWRITTEN),
    (SKEWED, "swap_order", "deadlock"),
    (REPLAY, "swap_order", "deadlock"),
    (SKEWED, "ignore_reuse", "deadlock"),
    (REPLAY, "ignore_reuse", "deadlock"),
    (SHORT_SEGMENTS, "reuse_by_piece", "deadlock"),
    (SKEWED, "ring_short", "overwritten before written"),
    (REPLAY, "ring_short", "overwritten before written"),
    (CUT | {"ring_rows": 64}, "ring_short", OVERWRITE),
    (SKEWED, "dedup_across_chunks", "deadlock"),
    (SHORT_SEGMENTS, "dedup_across_chunks", "deadlock"),
    (SKEWED, "reverse_pulls", "deadlock"),
    (REPLAY, "reverse_pulls", "deadlock"),
    (REPLAY, "hold_signals", "deadlock"),
    (REPLAY | {"resident_ctas": 1, "late_after_exit": True}, "static_pulls", "deadlock"),
    (SKEWED, "claim_twice", "tile twice"),
    (SKEWED, "lose_task", "deadlock"),
    (IDLE, "lose_task", "tile missing"),
    (IDLE, "skip_zero", "idle gradient not zeroed"),
    (SKEWED, "skip_start_barrier", UNWRITTEN),
    (SKEWED, "skip_end_barrier", UNWRITTEN),
]


@pytest.mark.parametrize(
    ("case", "bug", "error"), PLANTED, ids=[f"{bug}-{c.get('direction')}" for c, bug, _ in PLANTED]
)
def test_a_planted_bug_is_found(case, bug, error):
    result = mok.simulate(**case, bug=bug, seeds=4000)
    assert not result.ok, f"{bug} passed {result.statistics['interleavings']} interleavings"
    found = result.errors[0]
    assert found.type == error, found.message
    assert found.message
    kind, _, counter = bug.partition(":")
    if kind == "never_signal":
        assert counter in {e.counter for e in result.errors}
    if error == "deadlock":
        assert found.seen < found.expected
    # The same seed alone finds it again, and without the bug finds nothing.
    again = mok.simulate(**case, bug=bug, seeds=[found.seed], ids=_ids_of(case))
    assert [e.message for e in again.errors] == [e.message for e in result.errors]
    check(**case, seeds=[found.seed], ids=_ids_of(case))


def _ids_of(case):
    return routing_ids(
        case["routing"],
        num_ranks=2,
        num_tokens=case["num_tokens"],
        num_experts=case["num_experts"],
        top_k=case.get("top_k", 2),
        seed=0,
    )


def test_every_bug_is_planted_somewhere():
    assert {bug for _, bug, _ in PLANTED} == set(mok._C.simulator_bugs())


def test_a_deadlock_names_rank_agent_task_counter_and_values():
    result = mok.simulate(**SKEWED, bug="never_signal:hidden_read", policy="oldest")
    error = result.errors[0]
    assert error.type == "deadlock"
    assert (error.rank, error.agent, error.counter) == (0, "producer", "hidden_read")
    assert (error.expected, error.seen) == (2, 0)
    assert error.task.startswith("gate_up row block 3")
    assert error.message == (
        f"deadlock: rank 0 CTA {error.cta} producer, {error.task}, waits for hidden_read of row "
        "block 0: expected 2, seen 0."
    )


def test_one_cta_can_do_everything():
    """CTAs that never become resident until another exits hold nothing back."""
    for case in (SKEWED, REPLAY, CUT):
        check(**case | {"num_ctas": 6}, resident_ctas=1, late_after_exit=True, seeds=50)


def test_a_stalled_rank_holds_no_kernel_of_another_rank():
    check(**REPLAY, stalled_rank=1, seeds=100)
    check(**SKEWED, stalled_rank=0, seeds=100)


def test_all_routes_to_one_rank_of_72():
    result = check(
        routing="one_rank",
        num_ranks=72,
        num_tokens=32,
        num_experts=144,
        top_k=2,
        ring_rows=512,
        direction="backward",
        save="none",
        seeds=3,
    )
    # Rank 0's two experts have 2304 rows each: four full rings and a rest.
    assert result.statistics["chunks"] == 2 * 5


def test_ten_thousand_interleavings_within_a_minute():
    start = time.process_time()
    result = check(**SKEWED, seeds=10_000)
    assert result.statistics["interleavings"] == 10_000
    assert time.process_time() - start < 60


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_72_ranks_at_8192_tokens_within_a_minute(direction):
    start = time.process_time()
    result = check(
        num_ranks=72,
        num_experts=144,
        num_tokens=8192,
        top_k=8,
        hidden=2048,
        intermediate=768,
        num_ctas=132,
        pull_batch=16,
        direction=direction,
    )
    assert result.statistics["units"] > 72 * 8192 * 7
    assert time.process_time() - start < 60


COSTS = {
    "gate_up": 20.0,
    "down": 10.0,
    "dhidden": 20.0,
    "dx": 30.0,
    "wgrad_gate": 2.0,
    "wgrad_up": 2.0,
    "wgrad_down": 2.0,
    "claim": 0.5,
    "store": 1.0,
    "pull": 0.9,
    "link": 0.01,
}
TIMED = {"num_tokens": 2000, "num_experts": 16, "top_k": 4, "hidden": 1024, "num_ctas": 16}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_time_line_is_a_schedule_of_all_tasks(direction):
    result = check(**TIMED, direction=direction, costs=COSTS)
    again = check(**TIMED, direction=direction, costs=COSTS)
    assert result.timeline == again.timeline
    assert len(result.timeline) == result.statistics["tasks"]
    by_cta = defaultdict(list)
    for entry in result.timeline:
        by_cta[entry.rank, entry.cta].append(entry)
    assert len(by_cta) == 2 * 16
    busy = 0.0
    for entries in by_cta.values():
        entries.sort(key=lambda entry: entry.start)
        last_end = 0.0
        for entry in entries:
            assert entry.start >= last_end
            assert entry.wait == pytest.approx(entry.start - last_end, abs=1e-6)
            last_end = entry.end
            busy += entry.end - entry.start
    assert result.statistics["busy"] == pytest.approx(busy)
    longest = max(entry.end for entry in result.timeline)
    assert longest <= result.statistics["duration"] <= longest + 20
    # No machine is faster than its work.
    assert result.statistics["duration"] >= busy / len(by_cta)
    tiles = [e for e in result.timeline if e.kind in ("gate_up", "down", "dhidden", "dx")]
    assert all(e.end - e.start == pytest.approx(COSTS[e.kind]) for e in tiles)


def test_slower_links_and_late_ranks_take_longer():
    def duration(**changed):
        return check(**TIMED, costs=COSTS | changed).statistics["duration"]

    assert duration(pull=0, link=0) <= duration() < duration(link=0.5) < duration(link=5)
    assert duration(launch=300) >= duration() + 290


def test_without_communication_two_ranks_take_as_long_as_their_tiles():
    """64 equal row blocks of 14 tiles on 32 CTAs: 28 tiles each, nothing to wait for."""
    ids = [torch.arange(4096)[:, None] % 16] * 2
    costs = {"gate_up": 10.0, "down": 10.0, "claim": 0, "store": 0, "pull": 0}
    result = check(ids=ids, num_experts=16, hidden=2048, intermediate=768, num_ctas=32, costs=costs)
    busy = result.statistics["busy"] / 64
    assert busy == pytest.approx(32 * 14 * 10 / 32)
    assert result.statistics["duration"] <= busy + 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"routing": "even"}, "routing = 'even'"),
        ({"num_tokens": [1, 2, 3]}, "num_tokens has 3 entries"),
        ({"policy": "nice"}, "policy = 'nice'"),
        ({"bug": "gremlin"}, "bug = 'gremlin'"),
        ({"bug": "drop_wait"}, "needs a counter"),
        ({"bug": "drop_wait:y"}, "counter = 'y'"),
        ({"bug": "ring_short:x"}, "takes no counter"),
        ({"seeds": 0}, "seeds is empty"),
        ({"num_ctas": 0}, "num_sms = 0"),
        ({"resident_ctas": 9}, "resident_ctas = 9"),
        ({"pull_batch": 0}, "pull_batch = 0"),
        ({"costs": {"tea": 1.0}}, "'tea'"),
        ({"costs": {"pull": -1.0}}, "pull"),
        ({"ids": [np.zeros((2, 1)), np.zeros((2, 2))]}, "K must be equal"),
        ({"ids": [np.zeros(3)]}, "ids must be"),
        ({"ids": []}, "ids is empty"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        mok.simulate(**arguments)
