"""Runs one test kernel of csrc/ptx and fails where one of its waits expired."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

RECORD_AT = 64  # bytes into the limits tensor


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


def read_record(limits: torch.Tensor) -> WaitRecord:
    raw = limits.cpu().numpy().tobytes()
    head = np.frombuffer(raw, np.int32, 6, RECORD_AT).tolist()
    tail = np.frombuffer(raw, np.uint64, 3, RECORD_AT + 24).tolist()
    return WaitRecord(int(np.frombuffer(raw, np.int32, 1)[0]), *head, *tail)


def run_unchecked(
    name: str,
    inputs: Sequence[torch.Tensor] = (),
    numbers: Sequence[int] = (),
    outputs: Sequence[torch.Tensor] = (),
    op: str = "_ptx_test",
) -> WaitRecord:
    """Returns what the waits of the kernel left behind."""
    limits = torch.zeros(64, dtype=torch.int32, device="cuda")
    getattr(torch.ops.mok, op)(name, list(inputs), list(numbers), [*outputs, limits])
    torch.cuda.synchronize()
    return read_record(limits)


def run(name: str, *args, **options) -> None:
    record = run_unchecked(name, *args, **options)
    assert record.expired == 0, f"a wait of {name} expired: {record}"


def filled(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """CUDA memory whose old contents no test expects."""
    value = -7777777 if dtype == torch.int32 else float("nan")
    return torch.full(shape, value, dtype=dtype, device="cuda")


def to_gpu(array: np.ndarray) -> torch.Tensor:
    """uint32 goes as int32, uint16 as bfloat16's bits."""
    array = np.ascontiguousarray(array)
    if array.dtype == np.uint32:
        return torch.from_numpy(array.view(np.int32)).cuda()
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array).cuda()


def words(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's 32-bit words."""
    return tensor.contiguous().view(torch.int32).cpu().numpy().view(np.uint32)
