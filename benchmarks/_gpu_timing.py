"""The two clocks of GPU measurements: burst (a cool, idle card), sustained (at its power limit)."""

import itertools
import time
from collections.abc import Callable

import torch

IDLE_SECONDS = 0.25
BUSY_SECONDS = 0.25
BURST_LAUNCHES = 10
SUSTAINED_LAUNCHES = 12


def seconds_of_each(call: Callable[[], object], launches: int) -> list[float]:
    """Time of each of `launches` calls queued back to back on the current stream."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(launches + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events)]


def burst_seconds(call: Callable[[], object]) -> list[float]:
    """Calls after a quarter of a second in which the card did nothing."""
    torch.cuda.synchronize()
    time.sleep(IDLE_SECONDS)
    return seconds_of_each(call, BURST_LAUNCHES)


def sustained_seconds(call: Callable[[], object]) -> list[float]:
    """Calls after a quarter of a second of the same work."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < BUSY_SECONDS:
        seconds_of_each(call, SUSTAINED_LAUNCHES)
    return seconds_of_each(call, SUSTAINED_LAUNCHES)


def both_clocks(call: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds per call by regime, after one warm-up."""
    call()
    return {"burst": burst_seconds(call), "sustained": sustained_seconds(call)}


def in_a_graph(call: Callable[[], object], copies: int) -> Callable[[], object]:
    """A call that replays `copies` of the captured launches: divide its time by `copies`."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            call()
    return graph.replay
