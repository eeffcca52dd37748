"""The process side of tests/_harness.py: one rank, jobs over a pipe, an end that cannot hang."""

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1

# What every test process runs under, the parent included: tests/conftest.py sets it before torch
# is imported, and the workers inherit it.
TEST_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "MOK_POISON": "1",
}


@dataclass
class Returned:
    """A rank's job came back with a value."""

    value: Any


@dataclass
class Raised:
    """A rank's job raised: the exception in one line and its traceback as text."""

    summary: str
    traceback: str


def stacks_path(folder: Path, rank: int) -> Path:
    """Where a worker writes its threads' stacks on SIGUSR1."""
    return folder / f"stacks-{rank}"


def worker_main(
    rank: int, world_size: int, environment: dict[str, str], folder: Path, pipe: Connection
) -> None:
    """Serves jobs until the parent says stop (None) or is gone. Never returns."""
    # A parent that is killed takes its workers with it, also one that waits in a collective.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent asks a worker that does not answer where it stands.
    stacks = open(stacks_path(folder, rank), "w")  # noqa: SIM115 (lives as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)

    # The fork server has the environment of the day it was started.
    os.environ.clear()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **environment})
    import torch
    import torch.distributed as dist

    from tests._poison import poison_uninitialized_memory

    torch.set_num_threads(1)
    poison_uninitialized_memory()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    _send(pipe, Returned(None))

    orderly = False
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            break
        job = pickle.loads(message)
        if job is None:
            orderly = True
            break
        _send(pipe, _run(job, rank, dist.group.WORLD))

    if orderly:
        dist.barrier()
        dist.destroy_process_group()
    # Interpreter shutdown would run gloo's destructors, which abort about one exit in ten.
    os._exit(0)


def _run(job, rank: int, group) -> Returned | Raised:
    module_name, function_name, args, kwargs = job
    try:
        import torch

        torch.manual_seed(0)
        _close_workspaces()
        function = getattr(importlib.import_module(module_name), function_name)
        value = function(rank, group, *args, **kwargs)
        return Returned(value)
    except BaseException as error:
        return Raised(_summary(error), traceback.format_exc())


def _close_workspaces() -> None:
    """Frees what earlier jobs left open. No rank is in a call: all have answered before."""
    workspace = sys.modules.get("mok.workspace")
    if workspace is not None:
        workspace._close_all()


def _summary(error: BaseException) -> str:
    lines = traceback.format_exception_only(error)
    return lines[-1].strip()


def _send(pipe: Connection, outcome: Returned | Raised) -> None:
    # Plain pickle: multiprocessing's own would send tensors as shared file descriptors, which die
    # with this process.
    try:
        message = pickle.dumps(outcome)
    except Exception as error:
        outcome = Raised(f"the job's result cannot be pickled: {_summary(error)}", "")
        message = pickle.dumps(outcome)
    pipe.send_bytes(message)
