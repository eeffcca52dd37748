"""The clocks of GPU measurements, and how calls of several ranks are timed together.

burst      ten calls after a quarter of a second of idleness. Calls of ten milliseconds run into the
           card's power limit before the tenth, so for them it lies between the other two.
burst3     the first three calls after a quarter of a second of idleness, five such rounds: what a
           cool card does, whatever the length of a call.
sustained  calls after a quarter of a second of the same work: the card at its power limit.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Sequence

import torch


@dataclasses.dataclass(frozen=True)
class Clocks:
    """How long and how often."""

    idle: float = 0.25  # seconds
    busy: float = 0.25
    burst: int = 10
    first: int = 3
    rounds: int = 5
    sustained: int = 12


FULL = Clocks()
TINY = Clocks(idle=0.0, busy=0.0, burst=2, first=1, rounds=2, sustained=2)


def seconds_of_each(call: Callable[[], object], launches: int, device: str = "cuda") -> list[float]:
    """Time of each of `launches` calls queued back to back on the current stream; on the CPU, of
    calls one after another."""
    if device == "cpu":
        times = [time.perf_counter()]
        for _ in range(launches):
            call()
            times.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(times)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(launches + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events)]


def clocks_of(
    call: Callable[[], object],
    *,
    device: str = "cuda",
    clocks: Clocks = FULL,
    align: Callable[[], object] = lambda: None,
    agree: Callable[[float], float] = lambda seconds: seconds,
) -> dict[str, list[float]]:
    """Seconds per call by clock, after one warm-up.

    Args:
        align: brings the ranks together, called right before the first call that is timed.
        agree: gives all ranks the same number, from each rank's own: how many calls keep the card
            busy must be equal where a call is collective.
    """

    def timed(launches: int) -> list[float]:
        align()
        return seconds_of_each(call, launches, device)

    def idle() -> None:
        if device != "cpu":
            torch.cuda.synchronize()
        time.sleep(clocks.idle)

    call()
    first = []
    for _ in range(clocks.rounds):
        idle()
        first += timed(clocks.first)
    idle()
    burst = timed(clocks.burst)
    mean = agree(statistics.mean(burst))
    for _ in range(max(1, round(clocks.busy / (mean * clocks.sustained)))):
        seconds_of_each(call, clocks.sustained, device)
    # Not idle in between: no barrier of the hosts, which would cool the card.
    return {
        "burst": burst,
        "burst3": first,
        "sustained": seconds_of_each(call, clocks.sustained, device),
    }


def both_clocks(call: Callable[[], object]) -> dict[str, list[float]]:
    """burst and sustained of a short call on one GPU."""
    clocks = clocks_of(call, clocks=dataclasses.replace(FULL, rounds=0))
    return {regime: clocks[regime] for regime in ("burst", "sustained")}


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Of each call, the time of the rank that took longest."""
    return [max(seconds) for seconds in zip(*by_rank, strict=True)]


def in_a_graph(call: Callable[[], object], copies: int) -> Callable[[], object]:
    """A call that replays `copies` of the captured launches: divide its time by `copies`."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(copies):
            call()
    return graph.replay
