"""One call of the megakernels, from what it left in a trace's memory."""

import functools
from dataclasses import dataclass, field

import numpy as np

from mok import _native
from mok.timeline import KindRate, TimelineEntry, TimelineShares, kind_rates, timeline_shares

_C = _native.load()

ENTRY_BYTES = 64
DIRECTIONS = {1: "forward", 2: "backward", 3: "recompute"}
PHASES = ("preparation", "kernel", "barrier", "sum")

# csrc/kernels/task_span.h
_SPAN = np.dtype(
    [
        (name, "<i4")
        for name in ("kind", "shared", "cta", "row_block", "column", "waited_for", "rows", "steps")
    ]
    + [(name, "<u8") for name in ("start", "end", "start_cycles", "end_cycles")]
)
_STAMPS = np.dtype(
    [("moments", "<u8", 5), ("num_tasks", "<i8"), ("num_pulls", "<i8"), ("_", "<i8")]
)
_UNSET = np.uint64(2**64 - 1)
_TILE_COLUMNS, _PART_ROWS, _STEP = 256, 64, 64
_PULL_SLOTS = 4


@dataclass(frozen=True)
class TracedCall:
    """One call of the megakernels on this rank."""

    direction: str
    """"forward", "backward" or "recompute" (of a context that was not saved)."""
    rank: int
    num_ranks: int
    sizes: dict[str, int]
    """"T", "H", "I", "J" (the shared expert's width), "E", "K"."""
    num_ctas: int
    start: float
    """Microseconds from the first traced call's start."""
    phases: dict[str, float]
    """Microseconds on the call's stream: "preparation" (ids, plan, staging of x, the barrier of the
    inputs), "kernel", "barrier" (of the outputs), "sum" (of a token's rows)."""
    lost_tasks: int
    lost_pulls: int
    """Tasks and batches of pulls that the trace's memory had no room for."""
    _call: dict = field(repr=False)
    _tasks: np.ndarray = field(repr=False)
    _pulls: np.ndarray = field(repr=False)
    _zero: int = field(repr=False)

    @functools.cached_property
    def timeline(self) -> list[TimelineEntry]:
        """Of the kernel, from the end of the preparation on: tiles, then batches of pulls."""
        starts = [int(each["start"].min()) for each in (self._tasks, self._pulls) if len(each)]
        tiles = _tiles(self._call, self._tasks, self._zero, min(starts, default=0))
        return tiles + _pulls(self._call, self._pulls, self._zero)

    @functools.cached_property
    def shares(self) -> TimelineShares | None:
        """Where the CTAs' time went; None where no task was recorded."""
        if len(self._tasks) == 0:
            return None
        return timeline_shares(self.timeline, self.num_ctas)

    @functools.cached_property
    def rates(self) -> list[KindRate]:
        """How fast the tiles were, by kind."""
        return kind_rates(self.timeline, self.num_ctas)

    @property
    def duration(self) -> float:
        """Microseconds from the call's first kernel to its last."""
        return sum(self.phases.values())

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={value}" for name, value in self.sizes.items() if value)
        parts = " + ".join(f"{name} {value:.1f}" for name, value in self.phases.items())
        lines = [f"{self.direction} {sizes}: {self.duration:.1f} us = {parts}"]
        if self.shares is None:
            return lines[0] + "; no task was recorded"
        lines.append(f"  kernel {self.shares}")
        lines.append(
            f"  {'kind':18} {'tiles':>6} {'median us':>9} {'time':>6} {'TFLOP/s':>8} "
            f"{'padding':>8} {'MHz':>6} {'of peak':>8}"
        )
        for rate in self.rates:
            lines.append(
                f"  {rate.kind:18} {rate.tiles:6} {rate.microseconds:9.2f} {rate.share:6.1%} "
                f"{_shown(rate.tflops, '.0f'):>8} {_shown(rate.padding, '.1%'):>8} "
                f"{_shown(rate.mhz, '.0f'):>6} {_shown(rate.of_peak, '.1%'):>8}"
            )
        if self.lost_tasks or self.lost_pulls:
            lines.append(
                f"  LOST: {self.lost_tasks} tasks and {self.lost_pulls} batches of pulls found no "
                "room: trace fewer calls, or pass a larger max_spans."
            )
        return "\n".join(lines)


def _shown(value: float, form: str) -> str:
    return f"{value:{form}}" if value else "-"


def read_call(call: dict, entries: np.ndarray, origin: int | None = None) -> TracedCall:
    """What a call left in its memory.

    Args:
        call: `_C.CallTrace.end` describes it.
        entries: uint8 [1 + tasks + pulls, 64] with 0xff where nothing was recorded: CallStamps,
            then TaskSpans.
        origin: the moment, in nanoseconds, that `TracedCall.start` counts from; None: its own.
    """
    stamps = np.ascontiguousarray(entries[0]).view(_STAMPS)[0]
    spans = np.ascontiguousarray(entries[1:]).view(_SPAN)[:, 0]
    tasks, pulls = spans[: call["num_tasks"]], spans[call["num_tasks"] :]
    # A task that began and did not end belongs to a kernel that was stopped.
    tasks = tasks[(tasks["kind"] >= 0) & (tasks["end"] != _UNSET)]
    pulls = pulls[pulls["kind"] >= 0]
    moments = stamps["moments"]
    phases = {
        name: (int(moments[i + 1]) - int(moments[i])) / 1000
        for i, name in enumerate(PHASES)
        if moments[i] != _UNSET and moments[i + 1] != _UNSET
    }
    known = [int(moment) for moment in moments if moment != _UNSET]
    first = min((int(each["start"].min()) for each in (tasks, pulls) if len(each)), default=0)
    zero = int(moments[1]) if moments[1] != _UNSET else first
    begin = min([*known, zero])
    lost_tasks = lost_pulls = 0
    if stamps["num_tasks"] >= 0:
        lost_tasks = max(0, int(stamps["num_tasks"]) - call["num_tasks"])
        batches = num_batches(int(stamps["num_pulls"]), call["num_ctas"])
        lost_pulls = max(0, batches - (len(spans) - call["num_tasks"]))
    names = ("num_tokens", "hidden", "intermediate", "shared_intermediate", "num_experts", "top_k")
    return TracedCall(
        DIRECTIONS[call["kind"]],
        call["rank"],
        call["num_ranks"],
        dict(zip("THIJEK", (call[name] for name in names), strict=True)),
        call["num_ctas"],
        (begin - (begin if origin is None else origin)) / 1000,
        phases,
        lost_tasks,
        lost_pulls,
        call,
        tasks.copy(),
        pulls.copy(),
        zero,
    )


def begin_of(entries: np.ndarray) -> int:
    """The first moment of the call whose memory begins with `entries`, in nanoseconds; 0: none."""
    moments = np.ascontiguousarray(entries[0]).view(_STAMPS)[0]["moments"]
    known = moments[moments != _UNSET]
    return int(known.min()) if len(known) else 0


def num_batches(num_pulls: int, num_ctas: int) -> int:
    """Claims of a pull list: of four elements, of a short list of fewer."""
    grain = min(max(-(-num_pulls // num_ctas), 1), _PULL_SLOTS)
    return -(-num_pulls // grain)


def _tiles(call: dict, tasks: np.ndarray, zero: int, first: int) -> list[TimelineEntry]:
    last_end: dict[int, int] = {}
    result = []
    for record in np.sort(tasks, order="start"):
        start, end, cta = int(record["start"]), int(record["end"]), int(record["cta"])
        name = _C.TASK_KINDS[int(record["kind"])]
        waited_for = int(record["waited_for"])
        flops, issued = _flops(call, name, record)
        result.append(
            TimelineEntry(
                call["rank"],
                cta,
                ("shared_" if record["shared"] else "") + name,
                int(record["row_block"]),
                int(record["column"]),
                (start - zero) / 1000,
                (end - zero) / 1000,
                max(0, start - last_end.get(cta, first)) / 1000,
                None if waited_for < 0 else _C.COUNTERS[waited_for],
                flops,
                issued,
                int(record["end_cycles"]) - int(record["start_cycles"]),
            )
        )
        last_end[cta] = end
    return result


def _pulls(call: dict, pulls: np.ndarray, zero: int) -> list[TimelineEntry]:
    return [
        TimelineEntry(
            call["rank"],
            int(record["cta"]),
            "pull",
            int(record["row_block"]),
            int(record["column"]),
            (int(record["start"]) - zero) / 1000,
            (int(record["end"]) - zero) / 1000,
            0.0,
            None,
        )
        for record in pulls
    ]


def _flops(call: dict, kind: str, record: np.void) -> tuple[float, float]:
    """Products and sums of a tile: of what counts, and as issued."""
    steps, rows, column = int(record["steps"]), int(record["rows"]), int(record["column"])
    inner = call["shared_intermediate" if record["shared"] else "intermediate"]
    hidden = call["hidden"]
    # Columns that there are from the tile's first on, and the depth of the sums.
    columns, depth = {
        "gate_up": (2 * min(inner - column, _TILE_COLUMNS // 2), hidden),
        "down": (hidden - column, inner),
        "dhidden": (inner - column, hidden),
        "dx": (hidden - column, 2 * inner),
        "wgrad_gate": (hidden - column, steps * _STEP),
        "wgrad_up": (hidden - column, steps * _STEP),
        "wgrad_down": (inner - column, steps * _STEP),
    }.get(kind, (0, 0))
    if columns <= 0 or steps == 0:
        return 0.0, 0.0
    issued_rows = -(-rows // _PART_ROWS) * _PART_ROWS
    issued = 2.0 * issued_rows * _TILE_COLUMNS * steps * _STEP
    return 2.0 * rows * min(columns, _TILE_COLUMNS) * depth, issued
