"""Heaps, barriers and workspaces for the jobs of test_heap*.py and test_workspace*.py."""

import random
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from mok import _C, workspace

AT_ONCE = 5.0  # on a loaded machine of two cores a process may not run for seconds
CALL_TIMEOUT = 30.0  # never reached by a test that passes, unless it sets its own

SETTINGS = {"max_tokens": 32, "hidden_size": 64, "top_k": 2, "dtype": torch.float32}


class Outcome(NamedTuple):
    """What a call came to on one rank: "" or the exception's class, its text, the seconds."""

    error: str
    text: str
    seconds: float


def outcome_of(function, *args, **kwargs) -> Outcome:
    start = time.monotonic()
    try:
        function(*args, **kwargs)
        error, text = "", ""
    except Exception as raised:
        error, text = type(raised).__name__, str(raised)
    return Outcome(error, text, time.monotonic() - start)


def exchange(group, value):
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def open_heap(rank, group, data_bytes=4096, arena_bytes=0):
    """A connected heap and its barriers; `data_bytes` behind the control block are the test's."""
    num_ranks = group.size()
    control_bytes = _C.PeerComm.control_bytes(num_ranks)
    heap = _C.SymmHeap(rank, num_ranks, control_bytes + data_bytes, arena_bytes)
    heap.connect(exchange(group, heap.address()), CALL_TIMEOUT)
    comm = _C.PeerComm(heap)
    comm.set_timeout(CALL_TIMEOUT)
    return heap, comm, control_bytes


def whole_call(comm) -> None:
    comm.begin_call()
    comm.barrier()
    comm.barrier()


def abort(comm, reason: str) -> None:
    comm.begin_call()
    comm.abort_call(reason)


def pause(generator: random.Random, share: float = 0.05, seconds: float = 3e-4) -> None:
    """Sleeps now and then, so that the ranks meet in many orders."""
    if generator.random() < share:
        time.sleep(generator.random() * seconds)


def declare(group, **changes):
    return workspace.declare(group, **(SETTINGS | changes))


def new_group(group):
    """The same ranks again: no workspace of another test is in the way."""
    return dist.new_group(list(range(group.size())))
