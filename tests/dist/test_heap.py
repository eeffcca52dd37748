"""The symmetric heap and its barriers: what peers see, and what each does when another fails."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from mok import _C
from tests._harness import Died, run_ranks, run_ranks_fresh
from tests.dist._heaps import exchange, open_heap, outcome_of, pause, whole_call

# On a loaded machine of two cores a process may not run for a second or more.
SLACK = 4.0


def write_and_read_everywhere(rank, group):
    heap, comm, data = open_heap(rank, group, data_bytes=8192, arena_bytes=65536)
    ranks = range(group.size())
    own = heap.window(rank)
    assert own % 4096 == 0
    for peer in ranks:
        assert heap.window(peer) == own + (peer - rank) * heap.stride
        assert heap.peer(own + data + 24, peer) == heap.window(peer) + data + 24
        assert heap.contains(heap.window(peer), 1) == (peer == rank)
    assert heap.contains(own + 1, heap.stride - 1)
    assert not heap.contains(own + 1, heap.stride)
    assert not heap.contains(own - 1, 1)
    # Ranks allocate differently; a tensor is known to its peers by its offset.
    padding = [heap.arena_allocate(256) for _ in range(rank)]
    block = heap.arena_allocate(1000)
    assert block.offset == heap.fixed_bytes + 256 * len(padding)
    memoryview(block)[:] = bytes([rank + 1]) * 1000
    heap.write(rank, data, f"window {rank:03}".encode())
    comm.begin_call()
    comm.set_header(f"offset={block.offset}")
    comm.barrier()
    for peer in ranks:
        assert heap.read(peer, data, 10) == f"window {peer:03}".encode()
        offset = int(comm.header(peer).removeprefix("offset="))
        assert heap.read(peer, offset, 1000) == bytes([peer + 1]) * 1000
        heap.write(peer, data + 64 * (1 + rank), f"{rank} to {peer}".ljust(10).encode())
    comm.barrier()
    for peer in ranks:
        assert heap.read(rank, data + 64 * (1 + peer), 10) == f"{peer} to {rank}".ljust(10).encode()
    comm.close(30)
    heap.close()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_every_rank_sees_every_window_at_its_own_offset(num_ranks):
    run_ranks(num_ranks, write_and_read_everywhere)


def count_in_step(rank, group, num_calls):
    heap, comm, data = open_heap(rank, group)
    generator = random.Random(rank)
    step = 0
    for _ in range(num_calls):
        comm.begin_call()
        for _ in range(2):
            step += 1
            pause(generator)
            heap.write(rank, data, step.to_bytes(8, "little"))
            comm.barrier()
            seen = [int.from_bytes(heap.read(r, data, 8), "little") for r in range(group.size())]
            # A peer may already be on its way to the next barrier, never beyond it.
            assert all(step <= s <= step + 1 for s in seen), (step, seen)
    comm.close(30)
    heap.close()


def test_2000_barriers_never_let_a_rank_run_ahead():
    run_ranks(4, count_in_step, 1000)


# A peer that dies, stops or never comes


def survive_a_kill(rank, group, where):
    _, comm, _ = open_heap(rank, group)
    comm.set_timeout(1.0)
    for _ in range(3):
        whole_call(comm)
    if rank == 2:
        if where == "before a barrier":
            os.kill(os.getpid(), signal.SIGKILL)
        killer = f"import os,time; time.sleep(0.3); os.kill({os.getpid()}, 9)"
        subprocess.Popen([sys.executable, "-S", "-c", killer])
    elif rank == 3 and where == "inside a barrier":
        time.sleep(0.8)  # the others wait for this one when rank 2 dies among them
    return outcome_of(whole_call, comm), outcome_of(comm.begin_call), outcome_of(comm.check)


@pytest.mark.parametrize("where", ["before a barrier", "inside a barrier"])
def test_every_survivor_names_the_killed_rank(where):
    results = run_ranks_fresh(4, survive_a_kill, where)
    assert results.pop(2) == Died(2, signal.SIGKILL, None)
    for first, second, check in results:
        assert first.error == "PeerTimeoutError"
        assert "for rank 2 (expected" in first.text or "that rank 2 did not" in first.text
        assert 0.2 < first.seconds < 1.0 + 1.0 + SLACK
        # The workspace is broken from then on: the same error, at once.
        assert second[:2] == check[:2] == first[:2]
        assert second.seconds < 0.5


def wait_for_a_rank_that_arrived_at_one_peer_only(rank, group):
    heap, comm, _ = open_heap(rank, group)
    whole_call(comm)
    exchange(group, None)
    if rank == 2:  # as if killed between two of its stores
        next_epoch = 2 * 1 + 1
        heap.write(0, comm.epoch_offset(2), next_epoch.to_bytes(8, "little"))
    elif rank == 0:
        comm.set_timeout(0.7)
    outcome = outcome_of(whole_call, comm) if rank != 2 else None
    exchange(group, None)
    return outcome


def test_a_rank_that_is_itself_held_up_is_not_blamed():
    # Rank 0 passes the first barrier and waits in the second, where rank 1 is missing as well.
    zero, one, _ = run_ranks(3, wait_for_a_rank_that_arrived_at_one_peer_only)
    assert zero.error == one.error == "PeerTimeoutError"
    assert "second barrier of call 1 for rank 2 (expected" in zero.text
    assert "that rank 2 did not arrive" in one.text
    assert one.seconds < 0.7 + SLACK


def wait_for_a_stopped_rank(rank, group):
    _, comm, _ = open_heap(rank, group)
    pids = exchange(group, os.getpid())
    comm.set_timeout(0.7)
    whole_call(comm)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    outcome = outcome_of(whole_call, comm)
    if rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    return outcome


def test_a_stopped_rank_is_named_and_learns_who_gave_up():
    results = run_ranks(3, wait_for_a_stopped_rank)
    for rank in (0, 2):
        assert results[rank].error == "PeerTimeoutError"
        assert "rank 1" in results[rank].text
        assert results[rank].seconds < 0.7 + SLACK
    assert results[1].error == "PeerAbortedError"
    assert "for this rank (1)" in results[1].text
    assert "gave up" in results[1].text


def be_stopped_while_waiting(rank, group):
    _, comm, _ = open_heap(rank, group)
    pids = exchange(group, os.getpid())
    comm.set_timeout(2.5)
    if rank == 1:
        time.sleep(0.2)
        os.kill(pids[0], signal.SIGSTOP)
        time.sleep(2.6)
        os.kill(pids[0], signal.SIGCONT)
        time.sleep(0.3)
    return outcome_of(whole_call, comm)


def test_time_stopped_is_not_time_waited():
    # A whole job that was suspended must not time out when it is continued.
    assert [o.error for o in run_ranks(2, be_stopped_while_waiting)] == ["", ""]


def connect_without_rank_2(rank, group):
    heap = _C.SymmHeap(rank, group.size(), 4096, 0)
    addresses = exchange(group, heap.address())
    outcome = outcome_of(heap.connect, addresses, 0.5) if rank != 2 else None
    exchange(group, None)
    if rank == 2:  # now nobody listens any more
        outcome = outcome_of(heap.connect, addresses, 0.5)
    heap.close()
    return outcome


def test_a_rank_that_never_connects_is_named():
    results = run_ranks(3, connect_without_rank_2)
    for rank in (0, 1):
        assert results[rank].error == "SymmetricHeapError"
        assert "for rank 2" in results[rank].text
        assert "MOK_TIMEOUT_S" in results[rank].text
        assert results[rank].seconds < 0.5 + SLACK
    assert results[2].error == "SymmetricHeapError"
    assert "cannot reach rank 0" in results[2].text
