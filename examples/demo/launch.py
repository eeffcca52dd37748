"""Starts one process per rank, and ends all of them with a clear message when one fails."""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=120)
GRACE_SECONDS = 2.0


class RankFailedError(RuntimeError):
    """A rank raised, exited or was killed; the message names it and shows its error."""


def run_ranks(function: Callable, world: int, device_type: str, *args) -> None:
    """Runs `function(rank, world, *args)` in `world` new processes that form a process group.

    `function` must be importable from its module. Raises RankFailedError when a rank fails.
    """
    # Ranks are processes that share the cores. With more than one thread each, or with OpenMP
    # threads that spin while they wait, they take the cores from one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # gloo otherwise looks up the host's name, which fails on machines that have no entry for it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="mok-demo-") as folder:
        processes = [
            context.Process(
                target=_rank_main,
                args=(function, rank, world, device_type, folder, args),
                name=f"rank {rank}",
            )
            for rank in range(world)
        ]
        try:
            for process in processes:
                process.start()
            _wait_for_all(processes, Path(folder))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process in processes:
                if process.pid is not None:
                    process.join()


def _wait_for_all(processes, folder: Path) -> None:
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                # Its peers notice the loss a moment later and fail too: give them the time to, so
                # that the report can tell the cause from what followed.
                wait(list(running), GRACE_SECONDS)
                time.sleep(0.1)
                raise RankFailedError(_report(processes, folder))


def _report(processes, folder: Path) -> str:
    """Names the failed ranks, the likely cause first: a killed rank, else the first to raise."""
    failures = []
    for rank, process in enumerate(processes):
        error = folder / f"error-{rank}"
        if process.exitcode is None or process.exitcode == 0:
            continue
        if process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            failures.append((0.0, f"rank {rank} (pid {process.pid}) was killed by {name}", ""))
        elif error.exists():
            what = f"rank {rank} (pid {process.pid}) raised an error"
            failures.append((error.stat().st_mtime, what, error.read_text().rstrip()))
        else:
            what = f"rank {rank} (pid {process.pid}) exited with code {process.exitcode}"
            failures.append((0.0, what, ""))
    failures.sort()
    _, what, trace = failures[0]
    lines = [f"{what}; the other ranks were stopped."]
    lines += [trace] if trace else []
    for _, what, trace in failures[1:]:
        lines.append(f"afterwards {what}: {trace.splitlines()[-1] if trace else 'no message'}")
    return "\n".join(lines)


def _rank_main(function, rank, world, device_type, folder, args) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        if device_type == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=COLLECTIVE_TIMEOUT,
        )
        function(rank, world, *args)
        dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        (Path(folder) / f"error-{rank}").write_text(traceback.format_exc())
    # gloo's threads sometimes abort an ordinary interpreter exit; everything is done by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
