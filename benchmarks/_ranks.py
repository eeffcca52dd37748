"""Ranks of benchmarks: processes on a GPU each, or on the CPU, and what brings them together.

results = run_on_ranks(2, job, "cuda", case)      # job(ranks: Ranks, case) on every rank
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests._harness import run_ranks
from tests._poison import poison_uninitialized_memory

_nccl_group: dist.ProcessGroup | None = None  # of this process


@dataclasses.dataclass
class Ranks:
    """One rank's view of all."""

    rank: int
    size: int
    device: str  # "cuda" or "cpu"
    bootstrap: dist.ProcessGroup  # gloo
    torch_group: dist.ProcessGroup | None
    """For torch's own collectives on tensors of `device`: NCCL on GPUs; None where ranks share one,
    which NCCL refuses, and on one rank."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """For mok, which needs it to start only."""
        return self.bootstrap if self.size > 1 else None

    @property
    def can_collect(self) -> bool:
        return self.size == 1 or self.torch_group is not None

    def align(self) -> None:
        """All ranks come here; on GPUs of their own, the streams too, to within microseconds."""
        if self.size == 1:
            return
        dist.barrier(self.bootstrap)
        if self.device == "cuda" and self.torch_group is not None:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self.torch_group)

    def agree(self, value: float) -> float:
        """Rank 0's."""
        values = [value]
        dist.broadcast_object_list(values, 0, self.bootstrap)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        values = [None] * self.size
        dist.all_gather_object(values, value, self.bootstrap)
        return values


def run_on_ranks(size: int, job: Callable, device: str, *arguments, timeout: float = 120) -> list:
    """`job(Ranks, *arguments)` on every rank; the results by rank. `job` is a module's function."""
    names = (job.__module__, job.__qualname__)
    return run_ranks(size, _on_rank, names, device, arguments, timeout=timeout)


def _on_rank(rank: int, group, names: tuple[str, str], device: str, arguments: tuple) -> Any:
    import importlib

    global _nccl_group
    # The test harness's NaN in fresh memory costs a fill of each output.
    poison_uninitialized_memory(False)
    os.environ.pop("MOK_POISON", None)
    size = group.size()
    torch_group = group if size > 1 else None
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch_group = None
        if size > 1 and torch.cuda.device_count() >= size:
            if _nccl_group is None:
                os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # as tools/gpu_check.sh
                _nccl_group = dist.new_group(backend="nccl")
            torch_group = _nccl_group
    module, name = names
    job = getattr(importlib.import_module(module), name)
    return job(Ranks(rank, size, device, group, torch_group), *arguments)


def add_arguments(parser, ranks: int) -> None:
    """--ranks, --device and --tiny, which `settle` completes."""
    parser.add_argument("--ranks", type=int, default=None, help=f"default: {ranks}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=None)
    parser.add_argument(
        "--tiny", action="store_true", help="sizes of a dry run; on the CPU without a GPU"
    )
    parser.set_defaults(default_ranks=ranks)


def settle(arguments, what: str) -> bool:
    """Chooses device and ranks. False, with a line on why, where there is nothing to measure on."""
    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
        if arguments.device == "cpu" and not arguments.tiny:
            print(f"{what}: no CUDA device, nothing was measured (--tiny tries it on the CPU)")
            return False
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"{what}: no CUDA device, nothing was measured")
        return False
    if arguments.ranks is None:
        arguments.ranks = arguments.default_ranks
    return True


def is_shared(size: int, device: str) -> bool:
    """Whether ranks take turns on a GPU."""
    return device == "cuda" and torch.cuda.device_count() < size


def describe_ranks(size: int, device: str) -> str:
    if device == "cpu":
        return f"{size} process(es) on the CPU"
    shared = ", SHARED: times mean little" if is_shared(size, device) else ""
    return f"{size} rank(s) on {min(size, torch.cuda.device_count())} GPU(s){shared}"
