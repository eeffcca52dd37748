"""What the host says of barriers on a GPU that ended, from the record that their kernels leave."""

import ctypes

import pytest

from mok import _C
from mok.errors import PeerAbortedError, PeerTimeoutError
from tests.dist._device_heaps import build_fake_driver, fake_driver

MAX_RANKS = 128
FATAL_TIMEOUT, FATAL_ABORT = 1, 2


class Wait(ctypes.Structure):
    """csrc/ptx/wait_record.h"""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("complete", "place")),
        *((name, ctypes.c_int32) for name in ("rank", "peer")),
        *((name, ctypes.c_uint32) for name in ("block", "thread")),
        *((name, ctypes.c_uint64) for name in ("expected", "seen", "waited_ns")),
    ]


class Fatal(ctypes.Structure):
    """csrc/layout/control_block.h"""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("kind", "call", "barrier")),
        ("blamed", ctypes.c_uint64 * (MAX_RANKS // 64)),
        ("milliseconds", ctypes.c_uint64),
        ("reason_bytes", ctypes.c_uint64),
        ("reason", ctypes.c_char * 416),
    ]


class Record(ctypes.Structure):
    """csrc/layout/peer_record.h"""

    _fields_ = [
        ("wait", Wait),
        ("complete", ctypes.c_uint32),
        ("by", ctypes.c_int32),
        ("phase", ctypes.c_uint32),
        ("epoch", ctypes.c_uint64),
        ("seen", ctypes.c_uint64 * MAX_RANKS),
        ("told", Fatal),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    return build_fake_driver(tmp_path_factory.mktemp("fake-cuda"))


@pytest.fixture
def comm(library):
    """Rank 1 of 4, and its record."""
    with fake_driver(library):
        heaps = _C.virtual_heaps(4, _C.PeerComm.control_bytes(4), 0, 0)
        comm = _C.DeviceComm(heaps[1])
        yield comm, Record.from_address(comm.record)
        for heap in heaps:
            heap.close()


def raises_the_same_twice(comm, error_class) -> str:
    texts = []
    for _ in range(2):
        with pytest.raises(error_class) as caught:
            comm.check()
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    return texts[0]


def test_nothing_is_said_while_nothing_is_wrong(comm):
    comm, record = comm
    assert bytes(record) == bytes(ctypes.sizeof(Record))
    comm.check()


def test_own_time_was_up(comm):
    comm, record = comm
    record.by, record.phase, record.epoch = 1, 2, 8
    record.seen[:4] = [7, 0, 8, 6]
    record.wait.waited_ns = 2_500_000_000
    record.complete = 1
    text = raises_the_same_twice(comm, PeerTimeoutError)
    assert "rank 1 waited 2.5 s in the second barrier of a call for ranks 0 and 3" in text
    assert "(expected epoch 8, saw 7 from rank 0, 6 from rank 3)" in text
    assert "MOK_TIMEOUT_S" in text
    assert "restart" in text


def test_a_peer_aborted(comm):
    comm, record = comm
    record.by, record.phase, record.epoch = 2, 1, 5
    record.told.kind = FATAL_ABORT
    record.told.reason = b"max_tokens is 8, but 9 came"
    record.told.reason_bytes = len(record.told.reason)
    record.complete = 1
    text = raises_the_same_twice(comm, PeerAbortedError)
    assert "rank 1 was in the first barrier of a call (epoch 5) when rank 2 ended its calls" in text
    assert "max_tokens is 8, but 9 came" in text


@pytest.mark.parametrize(
    ("blamed", "error_class", "expected"),
    [
        (
            [3],
            PeerTimeoutError,
            "rank 1 was told by rank 2 that rank 3 did not arrive in the first",
        ),
        (
            [0, 1],
            PeerAbortedError,
            "rank 2 waited 1.5 s for this rank (1) in the first barrier of a",
        ),
    ],
)
def test_a_peer_gave_up(comm, blamed, error_class, expected):
    comm, record = comm
    record.by, record.phase, record.epoch = 2, 2, 6
    record.told.kind, record.told.call, record.told.barrier = FATAL_TIMEOUT, 5, 1
    record.told.milliseconds = 1500
    for rank in blamed:
        record.told.blamed[0] |= 1 << rank
    record.complete = 1
    assert expected in raises_the_same_twice(comm, error_class)


def test_another_wait_expired(comm):
    comm, record = comm
    record.wait.place, record.wait.peer, record.wait.block = 3, -1, 17
    record.wait.expected, record.wait.seen = 132, 131
    record.wait.waited_ns = 12_000_000_000
    record.wait.complete = 1
    text = raises_the_same_twice(comm, PeerTimeoutError)
    assert "rank 1 waited 12 s for other blocks of its own GPU" in text
    assert "wait 3 of block 17, expected 132, saw 131" in text


def test_the_first_end_is_the_one_that_is_told(comm):
    comm, record = comm
    record.wait.peer, record.wait.complete = 2, 1
    first = raises_the_same_twice(comm, PeerTimeoutError)
    record.by, record.told.kind, record.complete = 3, FATAL_ABORT, 1
    assert raises_the_same_twice(comm, PeerTimeoutError) == first


def test_the_time_limit_is_checked_and_lies_in_the_window(comm):
    comm, _ = comm
    comm.set_timeout(3.0)
    for wrong in (0.0, -1.0, 1e10):
        with pytest.raises(ValueError, match="timeout is "):
            comm.set_timeout(wrong)
