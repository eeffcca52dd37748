"""Barriers between ranks on the device that end badly: who is named, what traps, what still works.

A rank whose own time is up loses its CUDA context: those cases run in processes of their own.
"""

import os
import signal
import time

import pytest
import torch

from mok import _C, workspace
from tests._harness import Died, run_ranks, run_ranks_fresh
from tests.dist._heaps import exchange, outcome_of
from tests.gpu._peers import FIRST, SECOND, SLACK, Peers, device_of, drain, stream

SHORT = 1.0  # seconds


def ends(peers) -> dict:
    """What a rank sees from now on: its kernels' end, and mok's calls after it."""
    drained = drain()
    return {
        "drained": drained,
        "check": outcome_of(peers.comm.check),
        "barrier": outcome_of(peers.barrier),
        "again": outcome_of(peers.comm.check),
        "usable": outcome_of(lambda: torch.ones(4, device="cuda").sum().item()).error == "",
    }


def assert_timed_out(end, missing: str) -> None:
    assert end["drained"].error, "the kernel was to trap"
    assert SHORT * 0.5 < end["drained"].seconds < SHORT + SLACK
    for call in ("check", "barrier", "again"):
        assert end[call].error == "PeerTimeoutError", end[call]
        assert end[call].text == end["check"].text
        assert end[call].seconds < 1.0
    assert f" for {missing} (expected epoch" in end["check"].text
    assert not end["usable"]


def lose_the_last_rank(rank, group, how):
    peers = Peers(rank, group)
    for _ in range(3):
        peers.barrier(FIRST)
        peers.barrier(SECOND)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        peers.barrier(FIRST)
        peers.barrier(SECOND)
    torch.cuda.synchronize()
    peers.comm.set_timeout(SHORT)  # after the capture
    peers.meet()
    is_lost = rank == peers.num_ranks - 1
    if is_lost and how == "killed in a barrier":
        # It waits for the others, who are late; then they wait for it.
        peers.barrier(FIRST)
        time.sleep(0.2)
    if is_lost and how != "never launches":
        os.kill(os.getpid(), signal.SIGKILL)
    if is_lost:
        return None
    if how == "killed in a barrier":
        time.sleep(0.6)
    graph.replay()
    return ends(peers)


@pytest.mark.parametrize(
    ("num_ranks", "how"), [(2, "killed"), (3, "killed in a barrier"), (2, "never launches")]
)
def test_the_missing_rank_is_named(num_ranks, how):
    *survivors, lost = run_ranks_fresh(num_ranks, lose_the_last_rank, how, timeout=40)
    lost_rank = num_ranks - 1
    if how == "never launches":
        assert lost is None
    else:
        assert lost == Died(lost_rank, signal.SIGKILL, None)
    # Whoever gives up first tells the others, who then need not trap.
    timed_out = [end for end in survivors if end["drained"].error]
    assert timed_out
    for end in survivors:
        if end not in timed_out:
            assert end["check"].error == "PeerTimeoutError"
            assert f"that rank {lost_rank} did not arrive in" in end["check"].text
    for end in timed_out:
        assert_timed_out(end, f"rank {lost_rank}")
        if how == "killed in a barrier":
            # Its stores stand: the first barrier passes, the second does not.
            assert "in the second barrier of a call for" in end["check"].text
            assert "(expected epoch 8, saw 7" in end["check"].text
        else:
            assert "(expected epoch 7, saw 6" in end["check"].text


def stall_rank_1(rank, group):
    peers = Peers(rank, group)
    peers.barrier(FIRST)
    torch.cuda.synchronize()
    peers.comm.set_timeout(SHORT)
    peers.meet()
    if rank == 1:
        time.sleep(SHORT + 1.5)
        # Rank 0 has arrived before it gave up: this one passes, the next does not wait.
        peers.barrier(SECOND)
        peers.comm.set_timeout(60.0)
        peers.barrier(FIRST)
    else:
        peers.barrier(SECOND)
    return ends(peers)


def test_a_stalled_rank_learns_who_gave_up_on_it():
    zero, one = run_ranks_fresh(2, stall_rank_1, timeout=40)
    assert_timed_out(zero, "rank 1")
    assert one["drained"].error == "", "nothing is to trap here"
    assert one["drained"].seconds < SLACK
    assert one["check"].error == one["barrier"].error == "PeerAbortedError"
    assert "rank 0 waited 1 s for this rank (1) in the second barrier" in one["check"].text
    assert one["usable"]


def wait_for_a_rank_that_another_names(rank, group):
    peers = Peers(rank, group)
    peers.barrier(FIRST)
    torch.cuda.synchronize()
    peers.comm.set_timeout(SHORT if rank == 0 else 300.0)
    peers.meet()
    if rank == 2:
        return None
    peers.barrier(SECOND)
    return ends(peers)


def test_a_rank_stops_waiting_for_one_that_another_has_named():
    zero, one, _ = run_ranks_fresh(3, wait_for_a_rank_that_another_names, timeout=40)
    assert_timed_out(zero, "rank 2")
    assert one["drained"].error == "", "nothing is to trap here"
    assert one["drained"].seconds < SHORT + SLACK
    assert one["check"].error == "PeerTimeoutError"
    assert "rank 1 was told by rank 0 that rank 2 did not arrive" in one["check"].text
    assert one["usable"]


# A rank that raises


def abort_on_the_last_rank(rank, group, delay):
    peers = Peers(rank, group)
    last = peers.num_ranks - 1
    seen = torch.zeros(3, dtype=torch.int64, device="cuda")
    numbers = torch.arange(1, 4, device="cuda")
    peers.meet()
    if rank == last:
        # The reason is behind the calls in stream order, however late those run.
        torch.cuda._sleep(delay)
    for step in range(3):
        peers.push(numbers[step : step + 1], 0, rank)
        peers.barrier(FIRST)
        peers.pull(seen[step : step + 1], 0, last)
        peers.barrier(SECOND)
    if rank == last:
        peers.comm.abort("max_tokens is 8, but 9 tokens came; ä", stream())
    else:
        peers.barrier(FIRST)
        peers.barrier(SECOND)  # of a call that is over: returns at once
    end = ends(peers)
    return end, seen.tolist()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_peers_of_a_rank_that_raises_hear_the_reason(num_ranks):
    results = run_ranks(num_ranks, abort_on_the_last_rank, 200_000_000)
    for rank, (end, seen) in enumerate(results):
        assert seen == [1, 2, 3]
        assert end["drained"].error == "", "nothing is to trap"
        assert end["drained"].seconds < SLACK
        for call in ("check", "barrier", "again"):
            assert end[call].error == "PeerAbortedError"
            assert "max_tokens is 8, but 9 tokens came; ä" in end[call].text
        assert end["usable"]
        if rank < num_ranks - 1:
            expected = f"rank {rank} was in the first barrier of a call (epoch 7) when rank "
            assert f"{expected}{num_ranks - 1} ended its calls" in end["check"].text
        else:
            assert f"rank {rank} itself ended its calls" in end["check"].text


def abort_a_workspace(rank, group, while_capturing):
    torch.cuda.set_device(device_of(rank))
    settings = {"max_tokens": 16, "hidden_size": 64, "top_k": 2, "dtype": torch.bfloat16}
    name = workspace.declare(group, **settings, device="cuda")
    opened = workspace.ensure(name)
    opened._core.barrier(FIRST, stream())
    if rank == 1 and while_capturing:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(1, device="cuda")
            workspace.abort(name, "a bad dtype")
    elif rank == 1:
        workspace.abort(name, "a bad dtype")
    else:
        opened._core.barrier(SECOND, stream())
    drained = drain()
    outcome = outcome_of(opened.check)
    workspace.abort(name, "too late")  # says nothing
    opened.close()
    return drained, outcome


@pytest.mark.parametrize("while_capturing", [False, True])
def test_an_abort_by_name_reaches_the_peers(while_capturing):
    for drained, outcome in run_ranks(2, abort_a_workspace, while_capturing):
        assert drained.error == ""
        assert outcome.error == "PeerAbortedError"
        assert "a bad dtype" in outcome.text


def open_workspace(rank, group):
    torch.cuda.set_device(device_of(rank))
    settings = {"max_tokens": 16, "hidden_size": 64, "top_k": 2, "dtype": torch.bfloat16}
    opened = workspace.ensure(workspace.declare(group, **settings, device="cuda"))
    opened._core.barrier(FIRST, stream())
    torch.cuda.synchronize()
    return opened


def close_early(rank, group):
    opened = open_workspace(rank, group)
    if rank == 1:
        opened.close()
        return None
    opened._core.barrier(SECOND, stream())
    drained = drain()
    outcome = outcome_of(opened.check)
    opened.close()
    return drained, outcome


def test_a_barrier_does_not_wait_for_a_rank_that_has_closed():
    (drained, outcome), _ = run_ranks(2, close_early)
    assert drained.error == ""
    assert outcome.error == "PeerAbortedError"
    assert "rank 1 ended its calls: closed the workspace" in outcome.text


def close_without_waiting(rank, group):
    opened = open_workspace(rank, group)
    took = None
    if rank == 0:
        opened._core.barrier(SECOND, stream())
        time.sleep(0.2)
        assert not torch.cuda.current_stream().query(), "the barrier was to wait"
        begin = time.monotonic()
        opened.close(0)
        took = time.monotonic() - begin
    exchange(group, None)
    if rank == 1:
        opened._core.barrier(SECOND, stream())  # rank 0 had arrived
        opened._core.barrier(FIRST, stream())
        drained = drain()
        assert drained.error == ""
        took = outcome_of(opened.check)
        opened.close()
    return took


def test_closing_without_waiting_ends_what_still_waits():
    took, outcome = run_ranks(2, close_without_waiting)
    assert took < SLACK
    assert outcome.error == "PeerAbortedError"
    assert "rank 0 ended its calls: closed the workspace" in outcome.text


def test_an_abort_among_virtual_ranks():
    heaps = _C.virtual_heaps(3, _C.PeerComm.control_bytes(3), 0, 0)
    comms = [_C.DeviceComm(heap) for heap in heaps]
    streams = [torch.cuda.Stream() for _ in comms]
    for comm, on in zip(comms, streams, strict=True):
        comm.set_timeout(10.0)
        comm.barrier(FIRST, on.cuda_stream)
    for rank in (0, 1):
        comms[rank].barrier(SECOND, streams[rank].cuda_stream)
    comms[2].abort("tired", streams[2].cuda_stream)
    torch.cuda.synchronize()
    for rank, comm in enumerate(comms):
        outcome = outcome_of(comm.check)
        assert outcome.error == "PeerAbortedError"
        assert "tired" in outcome.text
        heaps[rank].close()
    assert torch.ones(2, device="cuda").sum().item() == 2


def give_up_alone(rank, group):
    """`end_waits`: what close(0) does to a barrier that still waits."""
    peers = Peers(rank, group)
    if rank == 0:
        peers.barrier(FIRST)
        time.sleep(0.2)
        assert not torch.cuda.current_stream().query()
        peers.comm.end_waits()
        drained = drain()
        peers.meet()
        return drained
    peers.meet()
    return None


def test_a_wait_can_be_ended_by_its_own_host():
    drained, _ = run_ranks(2, give_up_alone)
    assert drained.error == ""
    assert drained.seconds < SLACK
