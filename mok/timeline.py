"""Time lines of megakernels: which CTA did what, when, and what it waited for.

A time line is a list of `TimelineEntry`: `mok.simulate(costs=...)` predicts one, `mok.trace`
records those of a process's calls. Both are shown the same way: shares of the time of all CTAs,
rates by kind of task, a Chrome / Perfetto trace, a picture.
"""

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

COMMUNICATION_COUNTERS = ("x", "dout")
"""Counters that only rows from the ranks' windows advance."""

COMMUNICATION_KINDS = ("pull", "publish", "barrier")
"""Kinds that move data between ranks beside the tiles, on warps of their own."""

_COLORS = {
    "gate_up": "#3b6fb6",
    "down": "#58a868",
    "dhidden": "#b64a3b",
    "dx": "#c98a2b",
    "router_grad": "#8c6d9c",
    "wgrad_gate": "#7a4fa3",
    "wgrad_up": "#9a6fc3",
    "wgrad_down": "#5a3f93",
    "zero_grad": "#999999",
    "pull": "#1fa3a3",
}
_OTHER_COLOR = "#777777"

PEAK_FLOPS_PER_CYCLE = 4096
"""Dense BF16 products and sums of a Hopper multiprocessor's tensor cores in a cycle."""


class TimelineEntry(NamedTuple):
    """One task on one CTA. Times in microseconds from the start of the call's kernel."""

    rank: int
    cta: int
    kind: str
    """"gate_up", "down", ..., with "shared_" in front for the shared expert; "pull"."""
    row_block: int
    column: int
    start: float
    end: float
    wait: float
    """How long the CTA had no tile to work on before `start`."""
    waited_for: str | None
    """The counter that the task's operands were waited for last."""
    flops: float = 0.0
    """Products and sums of the task's valid rows and columns; 0: none, or not known."""
    issued_flops: float = 0.0
    """Those that the tensor cores made, padding included."""
    cycles: int = 0
    """Of the multiprocessor's clock from start to end; 0: not recorded."""

    @property
    def is_communication(self) -> bool:
        return self.kind in COMMUNICATION_KINDS


@dataclass(frozen=True)
class TimelineShares:
    """Where the time of all CTAs goes: fractions of ranks x CTAs x duration that add up to 1."""

    gemm: float
    """Tiles: main loops and epilogues."""
    communication: float
    """No tile to work on: rows from other ranks had not arrived."""
    waiting: float
    """No tile to work on: operands that this rank makes were not ready."""
    tail: float
    """After a CTA's last tile."""
    other: float
    """Between tiles without a recorded wait: claiming, and the start of the kernel."""
    duration: float
    """Microseconds from the first to the last moment of the slowest rank."""

    def __str__(self) -> str:
        parts = (
            f"{name} {100 * getattr(self, name):.1f} %"
            for name in ("gemm", "communication", "waiting", "tail", "other")
        )
        return f"{self.duration:.1f} us: " + ", ".join(parts)


def timeline_shares(
    timeline: Sequence[TimelineEntry], num_ctas: int | None = None
) -> TimelineShares:
    """Shares of the CTAs' time.

    Args:
        num_ctas: CTAs of a rank; None: the largest index in the time line plus 1.

    Raises ValueError when the time line has no tile.
    """
    tiles = [entry for entry in timeline if not entry.is_communication]
    if not tiles:
        raise ValueError("timeline has no task: record or simulate a call with at least one route.")
    ctas = num_ctas or max(entry.cta for entry in tiles) + 1
    ranks = sorted({entry.rank for entry in timeline})
    duration = max(entry.end for entry in timeline)
    total = duration * ctas * len(ranks)
    busy = sum(entry.end - entry.start for entry in tiles)
    waits = {True: 0.0, False: 0.0}
    last_end = {(rank, cta): 0.0 for rank in ranks for cta in range(ctas)}
    for entry in tiles:
        if entry.waited_for is not None:
            waits[entry.waited_for in COMMUNICATION_COUNTERS] += entry.wait
        place = (entry.rank, entry.cta)
        last_end[place] = max(last_end[place], entry.end)
    tail = sum(duration - end for end in last_end.values())
    other = total - busy - waits[True] - waits[False] - tail
    return TimelineShares(
        busy / total,
        waits[True] / total,
        waits[False] / total,
        tail / total,
        other / total,
        duration,
    )


@dataclass(frozen=True)
class KindRate:
    """How fast the tiles of one kind are, from the time that CTAs spent in them."""

    kind: str
    tiles: int
    microseconds: float
    """Of the median tile."""
    share: float
    """Of the time of all CTAs."""
    tflops: float
    """All CTAs together, if they did nothing else; 0 where no products are known."""
    padding: float
    """Products that the tensor cores made for nothing, per useful one."""
    mhz: float
    """Mean clock of the multiprocessors in these tiles; 0: not recorded."""
    of_peak: float
    """Useful products per cycle over what the tensor cores can do: the card's clock has no part in
    it. 0: not recorded."""


def kind_rates(
    timeline: Sequence[TimelineEntry],
    num_ctas: int | None = None,
    flops_per_cycle: int = PEAK_FLOPS_PER_CYCLE,
) -> list[KindRate]:
    """Rates by kind of tile, the kind that takes most of the time first.

    A card at its power limit lowers its clock while a kernel runs, so that a rate per time says
    little about the code; `of_peak` is per cycle.

    Args:
        num_ctas: CTAs of a rank; None: the largest index in the time line plus 1.
        flops_per_cycle: what the tensor cores of one multiprocessor can do.
    """
    tiles: dict[str, list[TimelineEntry]] = {}
    for entry in timeline:
        if not entry.is_communication:
            tiles.setdefault(entry.kind, []).append(entry)
    if not tiles:
        return []
    ctas = num_ctas or max(entry.cta for entry in timeline) + 1
    total = max(entry.end for entry in timeline) * ctas * len({entry.rank for entry in timeline})
    rates = []
    for kind, chosen in tiles.items():
        spans = [entry.end - entry.start for entry in chosen]
        busy = sum(spans)
        flops = sum(entry.flops for entry in chosen)
        issued = sum(entry.issued_flops for entry in chosen)
        cycles = sum(entry.cycles for entry in chosen)
        rates.append(
            KindRate(
                kind,
                len(chosen),
                statistics.median(spans),
                busy / total if total else 0.0,
                flops / busy * ctas * 1e-6 if busy else 0.0,
                issued / flops - 1 if flops else 0.0,
                cycles / busy if busy else 0.0,
                flops / (cycles * flops_per_cycle) if cycles else 0.0,
            )
        )
    return sorted(rates, key=lambda rate: -rate.share)


def write_chrome_trace(
    timeline: Iterable[TimelineEntry], path: str | os.PathLike, more_events: Iterable[dict] = ()
) -> None:
    """Writes the time line as JSON for chrome://tracing or Perfetto.

    A rank is a process; a CTA is a thread with its tiles, and a second one with what it moves.

    Args:
        more_events: of the trace event format, as they are to stand in the file.
    """
    events: list[dict] = list(more_events)
    lanes: set[tuple[int, int]] = set()
    for entry in timeline:
        lane = 2 * entry.cta + entry.is_communication
        lanes.add((entry.rank, lane))
        common = {"pid": entry.rank, "tid": lane, "ph": "X"}
        if entry.wait > 0 and entry.waited_for is not None:
            events.append(
                common
                | {
                    "name": f"wait for {entry.waited_for}",
                    "cat": "wait",
                    "ts": entry.start - entry.wait,
                    "dur": entry.wait,
                }
            )
        events.append(
            common
            | {
                "name": entry.kind,
                "cat": "communication" if entry.is_communication else "gemm",
                "ts": entry.start,
                "dur": entry.end - entry.start,
                "args": {"row_block": entry.row_block, "column": entry.column},
            }
        )
    for rank in sorted({rank for rank, _ in lanes}):
        events.append(
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        )
    for rank, lane in sorted(lanes):
        name = f"CTA {lane // 2}" + (" communication" if lane % 2 else "")
        events.append(
            {"ph": "M", "pid": rank, "tid": lane, "name": "thread_name", "args": {"name": name}}
        )
    with open(path, "w", encoding="utf-8") as file:
        # Encoded at once: json.dump to a file encodes in Python, several times slower.
        file.write(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def draw_timeline(timeline: Sequence[TimelineEntry], path: str | os.PathLike) -> None:
    """Draws CTAs over time, coloured by kind, one panel per rank, communication below the tiles.

    The file's ending chooses the format (".png", ".svg", ...). Needs matplotlib, and raises
    ImportError without it; ValueError when there is nothing to draw.
    """
    if not timeline:
        raise ValueError("timeline is empty: record or simulate a call with at least one route.")
    ranks = sorted({entry.rank for entry in timeline})
    panels = [[entry for entry in timeline if entry.rank == rank] for rank in ranks]
    titles = [""] * len(ranks)
    rows = max(entry.cta for entry in timeline) + 1
    if any(not entry.is_communication for entry in timeline):
        titles[0] = str(timeline_shares(timeline, rows))
    draw_panels(list(zip(titles, panels, strict=True)), path)


def draw_panels(
    panels: Sequence[tuple[str, Sequence[TimelineEntry]]], path: str | os.PathLike
) -> None:
    """Draws several time lines below each other, each with its title and the same time axis.

    Needs matplotlib, and raises ImportError without it.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = max((entry.cta for _, timeline in panels for entry in timeline), default=0) + 1
    figure = Figure(figsize=(14, 1 + 3.5 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    colors: dict[str, str] = {}
    for (title, timeline), panel in zip(panels, axes, strict=True):
        boxes, faces = [], []
        for entry in timeline:
            base = entry.kind.removeprefix("shared_")
            colors[base] = _COLORS.get(base, _OTHER_COLOR)
            y = entry.cta + (1.15 * rows if entry.is_communication else 0)
            boxes.append(
                [
                    (entry.start, y),
                    (entry.end, y),
                    (entry.end, y + 0.9),
                    (entry.start, y + 0.9),
                ]
            )
            faces.append(colors[base])
        panel.add_collection(PolyCollection(boxes, facecolors=faces, linewidths=0))
        panel.autoscale_view()
        panel.invert_yaxis()
        panel.set_ylabel(f"rank {timeline[0].rank}: CTA" if timeline else "CTA")
        panel.set_title(title, fontsize=10)
    axes[-1].set_xlabel("microseconds")
    figure.legend(
        handles=[Patch(color=color, label=kind) for kind, color in sorted(colors.items())],
        loc="outside lower center",
        ncols=max(len(colors), 1),
    )
    figure.savefig(path, dpi=130)
