"""Who runs a test kernel of csrc/ptx, and what a case is.

Arrays are NumPy: uint32 and float32 as they are, BF16 as uint16 bit patterns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

RECORD_AT = 64  # bytes into the limits array
LIMITS_WORDS = 64


@dataclass
class WaitRecord:
    """csrc/ptx/wait_record.h"""

    expired: int
    complete: int
    place: int
    rank: int
    peer: int
    block: int
    thread: int
    expected: int
    seen: int
    waited_ns: int

    @classmethod
    def read(cls, limits: np.ndarray) -> "WaitRecord":
        raw = limits.tobytes()
        head = np.frombuffer(raw, np.int32, 6, RECORD_AT).tolist()
        tail = np.frombuffer(raw, np.uint64, 3, RECORD_AT + 24).tolist()
        return cls(int(np.frombuffer(raw, np.int32, 1)[0]), *head, *tail)


class Runner(ABC):
    """The device or the emulator."""

    is_device: bool
    multiprocessors: int

    @abstractmethod
    def launch(
        self,
        name: str,
        inputs: list[np.ndarray],
        numbers: list[int],
        outputs: list[np.ndarray],
        sm90: bool,
        time_outs: bool,
    ) -> None:
        """Runs the kernel over copies of the arrays and copies `outputs` back.

        `time_outs`: a wait of this kernel is to expire.
        """

    def run_unchecked(
        self,
        name: str,
        inputs: Sequence[np.ndarray] = (),
        numbers: Sequence[int] = (),
        outputs: Sequence[np.ndarray] = (),
        sm90: bool = False,
        time_outs: bool = True,
    ) -> WaitRecord:
        """Returns what the waits of the kernel left behind."""
        limits = np.zeros(LIMITS_WORDS, np.uint32)
        inputs = [np.ascontiguousarray(each) for each in inputs]
        self.launch(name, inputs, list(numbers), [*outputs, limits], sm90, time_outs)
        return WaitRecord.read(limits)

    def run(self, name: str, *arguments, sm90: bool = False) -> None:
        record = self.run_unchecked(name, *arguments, sm90=sm90, time_outs=False)
        assert record.expired == 0, f"a wait of {name} expired: {record}"


@dataclass(frozen=True)
class Case:
    """`check(runner, *arguments)` runs a kernel and asserts what it must give."""

    name: str
    check: Callable
    arguments: tuple = ()
    needs_sm90: bool = False
    may_trap: bool = False  # a wrong wrapper could end the process's CUDA context


def filled(*shape: int, dtype: type = np.uint32) -> np.ndarray:
    """Memory whose old contents no test expects."""
    return np.full(
        shape, np.nan if dtype == np.float32 else 0x89898989 & np.iinfo(dtype).max, dtype
    )


def bf16_bits(values) -> np.ndarray:
    """Rounded to BF16, as bits."""
    tensor = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
    return tensor.view(torch.int16).numpy().view(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """BF16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
