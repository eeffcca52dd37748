"""`mok.trace`: records what the megakernels of this process do, and shows it."""

import contextlib
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from mok import _kernels, _native
from mok._traced_call import ENTRY_BYTES, TracedCall, begin_of, read_call
from mok.timeline import TimelineEntry, draw_panels, write_chrome_trace

_C = _native.load()

MAX_PANELS = 8


class trace:  # noqa: N801  (used as a statement, like torch.no_grad)
    """Records what the megakernels do inside a `with` block, then writes and prints it.

        with mok.trace("traces/step") as trace:
            layer(x).backward(dout)

    writes `traces/step.json` (for chrome://tracing or ui.perfetto.dev: CTAs over time with their
    tiles, what they waited for and the rows they pulled, and the stages of each call) and
    `traces/step.png`, and prints for each call how long its stages took, the shares of the CTAs'
    time (GEMM, communication, waiting, tail), and the rates of the tiles by kind: TFLOP/s, the mean
    clock of the multiprocessors, and the share of the tensor cores' peak per clock. Where
    torch.distributed is initialized, each rank writes files of its own: `traces/step-rank3.json`.

    All megakernel calls of this process on the current device are recorded, forward and backward,
    on any stream, in any layer, compiled or not; their results keep their bits. Kernels that record
    take slightly longer. Outside of a block nothing is recorded, and the kernels are the same as in
    a process that never traces. A call that is captured into a CUDA graph is not recorded, because
    the graph may outlive the trace, and neither is the replay of a graph; the report says how many
    captured calls were left out. All ranks of a group may trace, or only some.

    Args:
        path: folder and name of the files, without an ending; folders are made. None: no files.
        max_spans: tasks and batches of pulled rows that the memory has room for, 64 bytes each. A
            call reserves room for the most it can have; the report says what was lost.
        report: whether to print.

    Attributes:
        calls: after the block, one `TracedCall` per call: `phases`, `shares`, `rates`, `timeline`.
        files: what was written.

    Raises:
        RuntimeError: on entry where this process has no megakernels (on the CPU: mok.simulate
            predicts a time line), or where a trace is on already; on leaving where no call was
            recorded.
        ValueError: for a max_spans that is not positive.
    """

    def __init__(
        self, path: str | os.PathLike | None, *, max_spans: int = 1 << 21, report: bool = True
    ):
        if max_spans < 1:
            raise ValueError(f"max_spans = {max_spans}: must be at least 1.")
        self.path = None if path is None else Path(path)
        self.max_spans = max_spans
        self.report = report
        self.calls: list[TracedCall] = []
        self.files: list[Path] = []
        self._memory: torch.Tensor | None = None

    def __enter__(self) -> "trace":
        reason = _kernels.why_not(None, needs_gradients=False)
        if reason is not None:
            raise RuntimeError(
                f"mok.trace records the megakernels of a GPU, and {reason}; "
                "mok.simulate(costs=...) predicts a time line without one."
            )
        memory = torch.full((self.max_spans, ENTRY_BYTES), 0xFF, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        _C.load_traced_kernels()  # onto the device that torch has made current
        _C.call_trace().begin(memory.data_ptr(), self.max_spans, memory.device.index)
        self._memory = memory
        return self

    def __exit__(self, kind, error, traceback) -> None:
        memory, self._memory = self._memory, None
        calls, left_out = _C.call_trace().end()
        if error is not None:
            # Kernels on any stream may still write to the memory; a lost context has none.
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(memory.device)
            return
        torch.cuda.synchronize(memory.device)
        used = sum(1 + call["num_tasks"] + call["num_pulls"] for call in calls)
        self._finish(calls, left_out, memory[:used].cpu().numpy())

    def _finish(self, calls: list[dict], left_out: dict[str, int], entries: np.ndarray) -> None:
        """From the memory's contents to files and report."""
        notes = describe_left_out(left_out)
        if not calls:
            raise RuntimeError(
                "mok.trace recorded no call: none in the block ran as a megakernel (mok.explain "
                "says which backend a call takes)" + "".join(f"; {note}" for note in notes) + "."
            )
        origin = None
        for call in calls:
            own = entries[call["first"] : call["first"] + 1 + call["num_tasks"] + call["num_pulls"]]
            origin = begin_of(own) if origin is None else origin
            self.calls.append(read_call(call, own, origin))
        if self.path is not None:
            self._write(self.path)
        if self.report:
            for index, call in enumerate(self.calls):
                print(f"mok.trace: rank {call.rank} of {call.num_ranks}, call {index}: {call}")
            for note in notes:
                print(f"mok.trace: {note}")
            if self.files:
                print("mok.trace: " + ", ".join(map(str, self.files)), flush=True)

    def _write(self, path: Path) -> None:
        rank = f"-rank{dist.get_rank()}" if dist.is_available() and dist.is_initialized() else ""
        name = path.with_name(path.name + rank)
        name.parent.mkdir(parents=True, exist_ok=True)
        json_file = name.with_name(name.name + ".json")
        write_chrome_trace(
            (shifted for call in self.calls for shifted in _shifted(call)),
            json_file,
            [event for index, call in enumerate(self.calls) for event in _stages(index, call)],
        )
        self.files.append(json_file)
        panels = [(f"{c.direction}, kernel {c.shares}", c.timeline) for c in self.calls if c.shares]
        picture = name.with_name(name.name + ".png")
        if not panels:
            return
        try:
            draw_panels(panels[:MAX_PANELS], picture)
        except ImportError:
            print("mok.trace: no picture without matplotlib: pip install matplotlib.")
            return
        self.files.append(picture)
        if len(panels) > MAX_PANELS:
            print(f"mok.trace: the picture has the first {MAX_PANELS} of {len(panels)} calls.")


def describe_left_out(left_out: dict[str, int]) -> list[str]:
    """Sentences on the calls that were not recorded."""
    reasons = {
        "captured": "captured into CUDA graphs, which are not recorded: trace outside of a graph",
        "no_room": "without any room left: trace fewer calls, or pass a larger max_spans",
        "elsewhere": "on another device than the one that was current when the trace began",
    }
    return [f"{left_out[key]} call(s) {text}" for key, text in reasons.items() if left_out[key]]


def _shifted(call: TracedCall) -> list[TimelineEntry]:
    """The kernel's time line in microseconds from the first call's start."""
    by = call.start + call.phases.get("preparation", 0.0)
    return [entry._replace(start=entry.start + by, end=entry.end + by) for entry in call.timeline]


def _stages(index: int, call: TracedCall) -> list[dict]:
    """The call's stages in a lane of their own, as trace events."""
    lane = 1_000_000  # behind the CTAs'
    common = {"pid": call.rank, "tid": lane}
    name = {"name": "thread_name", "args": {"name": "stream"}}
    events = [common | {"ph": "M"} | name] if index == 0 else []
    at = call.start
    for phase, duration in call.phases.items():
        event = {"ph": "X", "cat": "stage", "ts": at, "dur": duration}
        events.append(common | event | {"name": f"{call.direction} {index}: {phase}"})
        at += duration
    return events
