"""How long does a barrier between the GPUs of two ranks take?

    python benchmarks/barrier.py [--ranks R] [--out FOLDER] [--tiny]

One process a rank, a GPU each where there are enough. --tiny without a GPU times the barrier of the
CPU backend instead. "mok": kernels of a graph one after another,
each a barrier of its own; "mok in kernel": barriers inside one kernel, each with 8 bytes passed to
every rank before it. A store over NVLink and the look at it take about 2 us. First every barrier
is shown to order data.
"""

import argparse
import time
from pathlib import Path

import torch

from benchmarks._gpu_timing import slowest
from benchmarks._ranks import (
    Ranks,
    add_arguments,
    describe_ranks,
    run_on_ranks,
    settle,
)
from benchmarks._timing import RESULTS, statistics_ms, write_results
from tests._harness import close_pools
from tests.dist._heaps import open_heap, whole_call
from tests.gpu._peers import FIRST, Peers, stream

COPIES = 20  # barriers of one graph
REPLAYS = 200


def measure(ranks: Ranks, replays: int) -> dict[str, list[float]]:
    """Seconds per barrier of each replay on this rank."""
    if ranks.device == "cpu":
        return {"mok, CPU": measure_on_cpu(ranks, replays)}
    peers = Peers(ranks.rank, ranks.bootstrap)
    wrong, passed = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    pointers = (wrong.data_ptr(), passed.data_ptr())
    first = 1

    def rounds() -> None:
        nonlocal first
        peers.comm.rounds(COPIES // 2, peers.data, first, *pointers, False, stream())
        first += COPIES // 2

    for _ in range(20):
        rounds()
    torch.cuda.synchronize()
    peers.comm.check()
    assert (wrong.item(), passed.item()) == (0, COPIES // 2), "a barrier let stale data pass"

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COPIES):
            peers.barrier(FIRST)
    times = {
        "mok": _timed(peers, graph.replay, replays),
        "mok in kernel": _timed(peers, rounds, replays),
    }
    assert wrong.item() == 0, "a barrier let stale data pass"
    peers.close()
    return times


def measure_on_cpu(ranks: Ranks, replays: int) -> list[float]:
    heap, comm, _ = open_heap(ranks.rank, ranks.bootstrap)
    seconds = []
    for _ in range(replays):
        whole_call(comm)
        begin = time.perf_counter()
        for _ in range(COPIES // 2):
            whole_call(comm)
        seconds.append((time.perf_counter() - begin) / COPIES)
    ranks.align()
    heap.close()
    return seconds


def _timed(peers: Peers, launch, replays: int) -> list[float]:
    """A barrier before each start brings the ranks together, so that no sample holds their skew."""
    samples = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays + 10)
    ]
    for begin, end in samples:
        peers.barrier(FIRST)
        begin.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    peers.comm.check()
    return [begin.elapsed_time(end) * 1e-3 / COPIES for begin, end in samples[10:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    add_arguments(parser, ranks=2)
    arguments = parser.parse_args()
    if not settle(arguments, "barrier"):
        return
    gpus = torch.cuda.device_count()
    replays = 20 if arguments.tiny or gpus < arguments.ranks else REPLAYS
    from benchmarks.barrier import measure  # by the name under which the workers find it

    by_rank = run_on_ranks(arguments.ranks, measure, arguments.device, replays, timeout=90)
    close_pools()
    records = []
    print(describe_ranks(arguments.ranks, arguments.device) + ", microseconds a barrier")
    print(f"{'contestant':16} {'median':>9} {'p10':>9} {'p90':>9}")
    for contestant in by_rank[0]:
        samples = slowest([rank[contestant] for rank in by_rank])
        # A thousandfold: as it is, statistics_ms would round to tenths of a microsecond.
        micro = statistics_ms([seconds * 1e3 for seconds in samples])
        print(f"{contestant:16} " + " ".join(f"{micro[key]:9.2f}" for key in ("ms", "p10", "p90")))
        records.append(
            {
                "bench": "barrier",
                "contestant": contestant,
                "shape": None,
                **dict.fromkeys(("T", "H", "I", "E", "K", "dtype", "tflops"), None),
                "ranks": arguments.ranks,
                "pass": "forward",
                "regime": "burst",
                **{key: round(value * 1e-3, 6) for key, value in micro.items()},
                "rel_error": 0,
                "settings": {"gpus": min(gpus, arguments.ranks), "copies": COPIES},
            }
        )
    print(write_results(f"barrier-ep{arguments.ranks}", records, arguments.out))


if __name__ == "__main__":
    main()
