"""Calls that a rank leaves by an exception: who learns of it, and what works afterwards."""

import os
import random
import signal
import threading
import time

import pytest

from tests._harness import run_ranks
from tests.dist._heaps import AT_ONCE, abort, exchange, open_heap, outcome_of, pause, whole_call


def leave_one_call(rank, group, reason):
    _, comm, _ = open_heap(rank, group)
    whole_call(comm)
    if rank == 0:
        time.sleep(0.2)  # the others already wait
        outcome = outcome_of(abort, comm, reason)
    else:
        outcome = outcome_of(whole_call, comm)
    after = [outcome_of(whole_call, comm).error for _ in range(3)]
    return outcome, after


def test_an_abort_ends_the_call_at_once_and_the_next_ones_work():
    results = run_ranks(4, leave_one_call, "x has 9 tokens, max_tokens is 8")
    assert results[0] == (results[0][0], ["", "", ""])
    for outcome, after in results[1:]:
        assert outcome.error == "PeerAbortedError"
        assert "aborted by rank 0: x has 9 tokens, max_tokens is 8" in outcome.text
        assert outcome.seconds < AT_ONCE
        assert after == ["", "", ""]


@pytest.mark.parametrize("padding", range(4))
def test_a_long_reason_is_cut_between_characters(padding):
    reason = "x" * padding + "\N{GRINNING FACE}" * 500
    outcome, _ = run_ranks(2, leave_one_call, reason)[1]
    text = outcome.text.split("rank 0: ")[1]
    assert reason.startswith(text)
    assert 400 < len(text.encode()) <= 416


def abort_six_calls_before_anyone_looks(rank, group):
    _, comm, _ = open_heap(rank, group)
    whole_call(comm)
    if rank == 0:
        for call in range(6):
            abort(comm, f"reason {call}")
    exchange(group, None)
    outcomes = []
    if rank == 1:
        outcomes = [outcome_of(abort, comm, "mine") for _ in range(6)]
    if rank == 2:
        outcomes = [outcome_of(whole_call, comm) for _ in range(6)]
    return outcomes, outcome_of(whole_call, comm)


def test_a_slow_rank_fails_exactly_the_aborted_calls():
    results = run_ranks(3, abort_six_calls_before_anyone_looks)
    assert [last.error for _, last in results] == ["", "", ""]
    # Whoever aborts a call raises its own error, not the other's.
    assert [o.error for o in results[1][0]] == [""] * 6
    outcomes = results[2][0]
    assert [o.error for o in outcomes] == ["PeerAbortedError"] * 6
    for call, outcome in enumerate(outcomes):
        # The last four texts are kept per peer; rank 1 has aborted by now or not.
        known = f"rank 0: reason {call}" in outcome.text or "rank 1: mine" in outcome.text
        assert known or (call < 2 and "overwritten" in outcome.text)


def abort_at_random(rank, group, seed, num_calls):
    _, comm, _ = open_heap(rank, group)
    common = random.Random(seed)
    own = random.Random(seed * 100 + rank)
    for call in range(num_calls):
        aborters = [r for r in range(group.size()) if common.random() < 0.15]
        pause(own, share=0.1)
        if rank in aborters:
            abort(comm, f"{rank} left {call}, " + "and why " * own.randrange(40))
            continue
        outcome = outcome_of(whole_call, comm)
        assert outcome.error == ("PeerAbortedError" if aborters else ""), (call, outcome)
        if aborters and "overwritten" not in outcome.text:
            known = [f"call {call} was aborted by rank {r}: {r} left {call}, " for r in aborters]
            assert any(outcome.text.startswith(k) for k in known), (call, aborters, outcome.text)
            assert outcome.text.split(", ", 1)[1].replace("and why ", "").strip("and why") == ""
    comm.close(30)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_ranks_agree_on_which_calls_were_aborted(num_ranks):
    run_ranks(num_ranks, abort_at_random, 7, 600)


def fail_in_mid_call(rank, group):
    _, comm, _ = open_heap(rank, group)
    whole_call(comm)
    comm.begin_call()
    if rank == 1:
        comm.barrier()
        comm.abort_fatal("out of memory")
        return outcome_of(comm.begin_call), outcome_of(comm.begin_call)
    # Told so in the second barrier, or in the first if this rank is late.
    first = outcome_of(lambda: (comm.barrier(), comm.barrier()))
    return first, outcome_of(comm.begin_call)


def test_a_fatal_abort_breaks_the_workspace_for_all():
    for rank, (first, second) in enumerate(run_ranks(3, fail_in_mid_call)):
        assert first.error == second.error == "PeerAbortedError"
        assert "out of memory" in first.text
        assert "rank 1" in first.text
        assert first.seconds < AT_ONCE
        assert second.text == first.text, rank


def use_barriers_wrongly(rank, group):
    _, comm, _ = open_heap(rank, group)
    outside = outcome_of(comm.barrier)
    whole_call(comm)
    third = outcome_of(comm.barrier)
    # A call that is begun and left without a word is aborted by the next one.
    if rank == 0:
        comm.begin_call()
    left = None if rank == 0 else outcome_of(whole_call, comm)
    works = outcome_of(whole_call, comm)
    # Left between the barriers it cannot be mended.
    comm.begin_call()
    if rank == 0:
        comm.barrier()
        between = outcome_of(comm.begin_call)
    else:  # told so in the first barrier or in the second
        between = outcome_of(lambda: (comm.barrier(), comm.barrier()))
    return outside, third, left, works, between


def test_wrong_orders_of_calls_are_errors():
    for rank, results in enumerate(run_ranks(2, use_barriers_wrongly)):
        outside, third, left, works, between = results
        assert "outside a call" in outside.text
        assert "outside a call" in third.text
        assert works.error == ""
        assert between.error == "PeerAbortedError"
        assert "between its barriers" in between.text
        if rank == 1:
            assert left.error == "PeerAbortedError"
            assert "before its first barrier" in left.text


def interrupt_a_wait(rank, group):
    _, comm, _ = open_heap(rank, group)
    comm.begin_call()
    if rank == 1:
        exchange(group, None)
        return outcome_of(comm.barrier)
    signal.signal(signal.SIGUSR2, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    start = time.monotonic()
    interrupted = False
    try:
        outcome_of(comm.barrier)
        time.sleep(10)
    except KeyboardInterrupt:  # the interpreter raises it as soon as it runs again
        interrupted = True
    seconds = time.monotonic() - start
    exchange(group, None)
    return interrupted, seconds


def test_ctrl_c_ends_a_wait_and_the_peers_learn_of_it():
    (interrupted, seconds), peer = run_ranks(2, interrupt_a_wait)
    assert interrupted
    assert seconds < AT_ONCE
    assert peer.error == "PeerAbortedError"
    assert "interrupted" in peer.text
