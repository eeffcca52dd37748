"""The symmetric heap and its barriers: what peers see, and what each does when another fails."""

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from mok import _C
from mok.errors import PeersNotLocalError, SymmetricHeapError
from tests._harness import Died, run_ranks, run_ranks_fresh
from tests.dist._heaps import abort, exchange, open_heap, outcome_of, pause, whole_call

# On a loaded machine of two cores a process may not run for a second or more.
SLACK = 4.0
AT_ONCE = 5.0


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


# Aborts


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


# Who may share


def altered(address, **fields):
    parts = dict(part.split("=", 1) for part in address.split(";"))
    return ";".join(f"{key}={value}" for key, value in (parts | fields).items())


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"host": "another"}, PeersNotLocalError, ["2 hosts", "another: rank 1", "collective"]),
        ({"network": "net:[1]"}, PeersNotLocalError, ["network namespaces", "container"]),
        ({"uid": "12345"}, SymmetricHeapError, ["rank 1 runs as user 12345", "same user"]),
        ({"arena_bytes": "8192"}, SymmetricHeapError, ["rank 1", "8192", "MOK_ARENA_BYTES"]),
        ({"rank": "0"}, SymmetricHeapError, ["addresses[1] is of rank 0"]),
        ({"heap": "9"}, SymmetricHeapError, ["rank 1", "same mok"]),
    ],
)
def test_ranks_that_cannot_share_are_told_why(fields, error, words):
    heaps = [_C.SymmHeap(rank, 2, 4096, 4096) for rank in range(2)]
    addresses = [heaps[0].address(), altered(heaps[1].address(), **fields)]
    with pytest.raises(error) as raised:
        heaps[0].connect(addresses, 5.0)
    assert type(raised.value) is error
    assert all(word in str(raised.value) for word in words), str(raised.value)


def connect_in_threads(heaps, timeout_s):
    addresses = [heap.address() for heap in heaps]
    outcomes = [None] * len(heaps)

    def connect(rank):
        outcomes[rank] = outcome_of(heaps[rank].connect, addresses, timeout_s)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(len(heaps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


SEND_HELLO = """
import os, socket, struct, sys
name, token, uid = sys.argv[1:]
os.setuid(int(uid))
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.settimeout(20)
s.connect("\\0" + name)
descriptors = []
try:
    s.send(b"mokheap1" + token.encode() + struct.pack("i", 1))
    _, descriptors, _, _ = socket.recv_fds(s, 1, 1)
except (BrokenPipeError, ConnectionResetError):
    pass
print(len(descriptors))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("uid", "token", "descriptors"), [(65534, None, 0), (0, "f" * 32, 0), (0, None, 1)]
)
def test_only_the_same_user_with_the_token_gets_the_window(uid, token, descriptors):
    heaps = [_C.SymmHeap(rank, 2, 4096, 0) for rank in range(2)]
    address = dict(part.split("=", 1) for part in heaps[0].address().split(";"))
    arguments = [address["socket"], token or address["token"], str(uid)]
    stranger = subprocess.Popen(
        [sys.executable, "-S", "-c", SEND_HELLO, *arguments], stdout=subprocess.PIPE, text=True
    )
    outcome = outcome_of(heaps[0].connect, [heap.address() for heap in heaps], 1.5)
    heaps[0].close()
    output, _ = stranger.communicate(timeout=30)
    assert output.strip() == str(descriptors)
    assert outcome.error == "SymmetricHeapError"  # rank 1 itself never came


def test_a_descriptor_that_a_peer_could_shrink_is_refused():
    heap = _C.SymmHeap(0, 2, 4096, 0)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0mok-test-" + os.urandom(8).hex())
    listener.listen(1)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 4096)

    def impersonate():
        name = "\0" + dict(p.split("=", 1) for p in heap.address().split(";"))["socket"]
        token = dict(p.split("=", 1) for p in heap.address().split(";"))["token"]
        client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        client.connect(name)
        client.send(b"mokheap1" + token.encode() + (1).to_bytes(4, "little"))
        server, _ = listener.accept()
        server.recv(64)
        socket.send_fds(server, [b"w"], [unsealed])
        client.recv(1)

    thread = threading.Thread(target=impersonate)
    thread.start()
    own = listener.getsockname().decode().removeprefix("\0")
    address = altered(heap.address(), rank="1", socket=own)
    outcome = outcome_of(heap.connect, [heap.address(), address], 10.0)
    thread.join()
    listener.close()
    os.close(unsealed)
    assert outcome.error == "SymmetricHeapError"
    assert "no sealed window" in outcome.text


def test_16_ranks_connect_at_once():
    heaps = [_C.SymmHeap(rank, 16, 4096, 0) for rank in range(16)]
    assert [o.error for o in connect_in_threads(heaps, 20.0)] == [""] * 16
    for rank, heap in enumerate(heaps):
        heap.write((rank + 1) % 16, 64, bytes([rank]))
    assert [heap.read(rank, 64, 1)[0] for rank, heap in enumerate(heaps)] == [15, *range(15)]
    for heap in heaps:
        heap.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_window_that_can_never_fit_is_refused_with_the_limits(num_ranks):
    with pytest.raises(SymmetricHeapError, match=r"wants \d+ bytes.*limit.*max_tokens"):
        _C.SymmHeap(0, num_ranks, 1 << 45, 0)


def fill_windows_beyond_dev_shm(rank, group):
    libc = ctypes.CDLL(None, use_errno=True)
    new_mount_namespace, private_recursive = 0x20000, 1 << 18 | 1 << 14
    failed = libc.unshare(new_mount_namespace) or libc.mount(
        None, b"/", None, ctypes.c_ulong(private_recursive), None
    )
    failed = failed or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64m")
    if any(exchange(group, failed)):
        return None
    heap, comm, data = open_heap(rank, group, data_bytes=96 << 20)
    comm.begin_call()
    heap.write(rank, data, bytes([rank + 1]) * (96 << 20))
    comm.barrier()
    last = [heap.read(r, data + (96 << 20) - 1, 1)[0] for r in range(group.size())]
    comm.barrier()
    return os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize >> 20, last


def test_a_small_dev_shm_does_not_matter():
    results = run_ranks_fresh(2, fill_windows_beyond_dev_shm)
    if results[0] is None:
        pytest.skip("this machine does not let a test mount its own /dev/shm")
    assert results == [(64, [1, 2])] * 2
