"""Heaps and barriers of ranks that are processes, on as many GPUs as there are.

With one GPU the ranks share it: their kernels take turns of some milliseconds, so that a barrier
takes as long, and none is starved for ever.
"""

import torch

from mok import _C
from tests.dist._heaps import Outcome, exchange, outcome_of

FIRST, SECOND = 1, 2  # phases of csrc/layout/peer_record.h
LIMIT = 20.0  # seconds of one barrier; never reached by a test that passes unless it sets its own
SLACK = 8.0  # a machine under load, and turns on a shared GPU


def device_of(rank: int) -> int:
    return rank % torch.cuda.device_count()


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


class Peers:
    """One rank's heap with `words` int64 of the test's own behind the control block."""

    def __init__(self, rank: int, group, words: int = 4096, arena_bytes: int = 1 << 20):
        torch.cuda.set_device(device_of(rank))
        self.rank, self.group, self.num_ranks = rank, group, group.size()
        self.data = _C.PeerComm.control_bytes(self.num_ranks)
        self.heap = _C.SymmHeap(
            rank, self.num_ranks, self.data + 8 * words, arena_bytes, device=device_of(rank)
        )
        self.heap.connect(exchange(group, self.heap.address()), LIMIT)
        self.fresh = self.heap.read(rank, 0, self.data)  # before the barriers set their limit there
        self.comm = _C.DeviceComm(self.heap)
        self.comm.set_timeout(LIMIT)

    def barrier(self, phase: int = FIRST) -> None:
        self.comm.barrier(phase, stream())

    def push(self, source: torch.Tensor, peer: int, word: int) -> None:
        """Writes an int64 tensor to the peer's words, in stream order."""
        to = self.heap.window(peer) + self.data + 8 * word
        self.comm.copy(to, source.data_ptr(), 8 * source.numel(), stream())

    def pull(self, target: torch.Tensor, peer: int, word: int) -> None:
        source = self.heap.window(peer) + self.data + 8 * word
        self.comm.copy(target.data_ptr(), source, 8 * target.numel(), stream())

    def meet(self) -> None:
        """All processes, on the CPU."""
        exchange(self.group, None)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.meet()
        self.heap.close()


def drain() -> Outcome:
    """Waits for this rank's kernels: a trap comes out here."""
    return outcome_of(torch.cuda.synchronize)
