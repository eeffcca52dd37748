"""Who may map whose window: hosts, users, sizes, strangers; and what memory it takes."""

import ctypes
import os
import socket
import subprocess
import sys
import threading

import pytest

from mok import _C
from mok.errors import PeersNotLocalError, SymmetricHeapError
from tests._harness import run_ranks_fresh
from tests.dist._heaps import exchange, open_heap, outcome_of


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
