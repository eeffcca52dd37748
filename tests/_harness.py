"""Runs a function on several ranks, one process each, under a parent that cannot be made to hang.

    def job(rank, group, factor):          # a module-level function of a test module
        ...
        return tensor                      # anything that pickles

    results = run_ranks(2, job, 3.0)       # [rank 0's result, rank 1's]

`run_ranks` keeps one pool of workers per world size for the whole pytest run. A job that raises,
dies or runs out of time ends its pool: the peers may wait in half a collective. So a test that
expects an exception catches it in the job and returns it. `run_ranks_fresh` gives a test processes
of its own, to kill or to poison.

Workers are forked by multiprocessing's fork server, a process that has imported torch and done
nothing else: they are as clean as spawned ones and start in a tenth of the time.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests._worker import Raised, Returned, stacks_path, worker_main

START_TIMEOUT = 120.0
# How long the others may take to come back after one rank has raised or died.
GRACE = 3.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed"])


class RankError(AssertionError):
    """A rank raised or died; the message names it and has its traceback."""


class RankTimeoutError(AssertionError):
    """A rank gave no answer in time; the message names it and has its stack. It was killed."""


@dataclass(frozen=True)
class Died:
    """Stands for the result of a rank whose process ended: a signal number or an exit code."""

    rank: int
    signal: int | None
    exit_code: int | None


@dataclass(frozen=True)
class _Silent:
    """No answer within the time; `stack` is where the rank stood."""

    stack: str


def run_ranks(
    world_size: int, fn: Callable, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Calls `fn(rank, group, *args, **kwargs)` on every rank and returns the results by rank.

    `fn` is a module-level function; `group` is the gloo group of all ranks. Raises RankError when
    a rank raised or died, RankTimeoutError when one gave no answer within `timeout` seconds.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    try:
        outcomes = pool.run(fn, args, kwargs, timeout)
    except BaseException:
        _discard(world_size)
        raise
    if not all(isinstance(outcome, Returned) for outcome in outcomes):
        _discard(world_size)
        _raise_failure(fn, outcomes, timeout)
    return [outcome.value for outcome in outcomes]


def run_ranks_fresh(
    world_size: int, fn: Callable, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Like `run_ranks` in processes of its own; a rank whose process ended gives a `Died`.

    No rank's process ends before all have answered or died, so nobody sees a peer leave early.
    """
    pool = _Pool(world_size)
    try:
        outcomes = pool.run(fn, args, kwargs, timeout, deaths_are_results=True)
    finally:
        pool.kill()
    if any(isinstance(outcome, Raised | _Silent) for outcome in outcomes):
        _raise_failure(fn, outcomes, timeout)
    return [outcome.value if isinstance(outcome, Returned) else outcome for outcome in outcomes]


def close_pools() -> None:
    """Ends all workers in order; whoever does not leave is killed."""
    for world_size in list(_pools):
        _pools.pop(world_size).close()


class _Pool:
    """The processes of one world size and the pipes to them."""

    def __init__(self, world_size: int):
        self.folder = Path(tempfile.mkdtemp(prefix="mok-ranks-"))
        self.processes = []
        self.pipes = []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=worker_main,
                args=(rank, world_size, dict(os.environ), self.folder, theirs),
                name=f"mok-rank-{rank}",
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        started = self._collect(START_TIMEOUT)
        if not all(isinstance(outcome, Returned) for outcome in started):
            self.kill()
            _raise_failure(worker_main, started, START_TIMEOUT)

    def run(
        self,
        fn: Callable,
        args: tuple,
        kwargs: dict,
        timeout: float,
        deaths_are_results: bool = False,
    ) -> list[Any]:
        if "<" in fn.__qualname__ or "." in fn.__qualname__:
            raise TypeError(f"{fn.__qualname__} must be a module-level function to run on ranks")
        message = pickle.dumps((fn.__module__, fn.__qualname__, args, kwargs))
        self._send(message)
        return self._collect(timeout, deaths_are_results)

    def _send(self, message: bytes) -> None:
        for pipe in self.pipes:
            # A worker that has died since is found by _collect, which names it.
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(message)

    def _collect(self, timeout: float, deaths_are_results: bool = False) -> list[Any]:
        """One outcome per rank: Returned, Raised, Died or, after the time, _Silent."""
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < len(self.pipes):
            waiting = {pipe: r for r, pipe in enumerate(self.pipes) if r not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                outcome = outcomes[rank] = self._receive(rank)
                is_failure = isinstance(outcome, Raised) or (
                    isinstance(outcome, Died) and not deaths_are_results
                )
                if is_failure:
                    deadline = min(deadline, time.monotonic() + GRACE)
        silent = [rank for rank in range(len(self.pipes)) if rank not in outcomes]
        outcomes.update(zip(silent, self._stacks_of(silent), strict=True))
        return [outcomes[rank] for rank in range(len(self.pipes))]

    def _receive(self, rank: int) -> Any:
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self.processes[rank]
            process.join(GRACE)
            code = process.exitcode
            if code is not None and code < 0:
                return Died(rank, -code, None)
            return Died(rank, None, code)

    def _stacks_of(self, ranks: list[int]) -> list[_Silent]:
        """Asks workers that do not answer where they stand."""
        for rank in ranks:
            # The signal's handler exists once the worker has opened the file.
            if stacks_path(self.folder, rank).exists():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)
        paths = [stacks_path(self.folder, rank) for rank in ranks]
        return [_Silent(path.read_text() if path.exists() else "") for path in paths]

    def close(self) -> None:
        self._send(pickle.dumps(None))
        deadline = time.monotonic() + GRACE
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


_pools: dict[int, _Pool] = {}
atexit.register(close_pools)


def _discard(world_size: int) -> None:
    pool = _pools.pop(world_size, None)
    if pool is not None:
        pool.kill()


def _raise_failure(fn: Callable, outcomes: list[Any], timeout: float) -> None:
    """One error for all ranks: a line for each that failed, then what explains it best."""
    lines = []
    details = []
    for rank, outcome in enumerate(outcomes):
        name = f"rank {rank} of {len(outcomes)}"
        match outcome:
            case Raised(summary, text):
                lines.append(f"{name} raised {summary}")
                details.append(f"--- {name}:\n{text.rstrip()}")
            case Died(_, int(number), _):
                lines.append(f"{name} was killed by signal {signal.Signals(number).name}")
            case Died(_, None, code):
                lines.append(f"{name} ended with exit code {code}")
            case _Silent(stack):
                lines.append(f"{name} gave no answer")
                details.append(f"--- {name} stood at:\n{stack.rstrip()}")
    only_silent = all(isinstance(outcome, Returned | _Silent) for outcome in outcomes)
    where = f"{fn.__module__}.{fn.__qualname__}"
    head = f"{where} took more than {timeout:g} s" if only_silent else f"{where} failed"
    text = "\n".join([f"{head}: " + "; ".join(lines), *details])
    raise (RankTimeoutError if only_silent else RankError)(text)
