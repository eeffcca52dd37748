"""How long does a barrier between the GPUs of two ranks take?

    python benchmarks/barrier.py [--ranks R] [--out FOLDER]

One process a rank, a GPU each where there are enough. "mok": kernels of a graph one after another,
each a barrier of its own; "mok in kernel": barriers inside one kernel, each with 8 bytes passed to
every rank before it. A store over NVLink and the look at it take about 2 us. First every barrier
is shown to order data.
"""

import argparse
from pathlib import Path

import torch

from benchmarks._timing import RESULTS, statistics_ms, write_results
from tests._harness import close_pools, run_ranks
from tests.gpu._peers import FIRST, Peers, stream

COPIES = 20  # barriers of one graph
REPLAYS = 200


def measure(rank: int, group, replays: int) -> dict[str, list[float]]:
    """Seconds per barrier of each replay on this rank."""
    peers = Peers(rank, group)
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
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("barrier: no CUDA device, nothing was measured")
        return
    gpus = torch.cuda.device_count()
    shared = gpus < arguments.ranks
    replays = 20 if shared else REPLAYS
    from benchmarks.barrier import measure  # by the name under which the workers find it

    by_rank = run_ranks(arguments.ranks, measure, replays, timeout=90)
    close_pools()
    records = []
    print(f"{arguments.ranks} ranks on {min(gpus, arguments.ranks)} GPU(s), microseconds a barrier")
    print(f"{'contestant':16} {'median':>9} {'p10':>9} {'p90':>9}")
    for contestant in by_rank[0]:
        slowest = [max(sample) for sample in zip(*(t[contestant] for t in by_rank), strict=True)]
        # A thousandfold: as it is, statistics_ms would round to tenths of a microsecond.
        micro = statistics_ms([seconds * 1e3 for seconds in slowest])
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
    print(write_results("barrier", records, arguments.out))


if __name__ == "__main__":
    main()
