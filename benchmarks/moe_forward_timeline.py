"""Where does the forward kernel's time go?

    python benchmarks/moe_forward_timeline.py [--out FOLDER] [--shapes A,B] [--tune lag_waves=3 ...]

One rank that holds all experts, shapes of benchmarks/moe_forward.py. Writes a picture and a
Perfetto trace of one call in a warm card's steady state, and prints shares of the CTAs' time,
durations by kind of task, and waits by what was waited for. Each --tune (names of
csrc/schedule/config.h) is measured beside the default: preparation and kernel, burst and sustained.
"""

import argparse
import functools
import statistics
from pathlib import Path

import numpy as np
import torch

from benchmarks._gpu_timing import both_clocks
from benchmarks._timing import RESULTS
from benchmarks.moe_forward import SHAPES
from mok.timeline import TimelineEntry, draw_timeline, timeline_shares, write_chrome_trace
from tests.gpu._forward import KERNEL, PREPARE, Layer, Weights, make_batch, ranks_of

KINDS = {0: "gate_up", 1: "down"}
COUNTERS = {0: "x", 2: "gate_up", 3: "hidden_read"}  # csrc/schedule/counters.h
START = 100.0  # microseconds that count as the start


def read_spans(spans: torch.Tensor) -> np.ndarray:
    """csrc/kernels/task_span.h as records; entries that no task wrote are left out."""
    words = np.ascontiguousarray(spans.cpu().numpy())
    fields = ("kind", "shared", "cta", "row_block", "column", "waited_for")
    dtype = np.dtype([(name, "<i4") for name in fields] + [("start", "<u8"), ("end", "<u8")])
    records = words.reshape(-1).view(dtype)
    return records[records["kind"] >= 0]


def entries(rank) -> list[TimelineEntry]:
    """Tiles and batches of pulls of the rank's last call, from the first recorded moment on."""
    tasks, pulls = read_spans(rank.task_spans), read_spans(rank.pull_spans)
    zero = min(records["start"].min() for records in (tasks, pulls) if len(records))
    last_end: dict[int, float] = {}
    result = []
    for record in np.sort(tasks, order="start"):
        start, end = (int(record[name] - zero) / 1000 for name in ("start", "end"))
        cta = int(record["cta"])
        kind = ("shared_" if record["shared"] else "") + KINDS[int(record["kind"])]
        place = (int(record["row_block"]), int(record["column"]))
        wait = max(0.0, start - last_end.get(cta, 0.0))
        waited_for = COUNTERS.get(int(record["waited_for"]))
        result.append(TimelineEntry(0, cta, kind, *place, start, end, wait, waited_for))
        last_end[cta] = end
    for record in pulls:
        start, end = (int(record[name] - zero) / 1000 for name in ("start", "end"))
        place = (int(record["row_block"]), int(record["column"]))
        result.append(TimelineEntry(0, int(record["cta"]), "pull", *place, start, end, 0.0, None))
    return result


def describe(timeline: list[TimelineEntry], num_ctas: int) -> None:
    print(f"  {timeline_shares(timeline, num_ctas)}")
    tiles = [entry for entry in timeline if not entry.is_communication]
    pulls = [entry for entry in timeline if entry.is_communication]
    total = num_ctas * max(entry.end for entry in tiles)
    print(f"  first tile {min(e.start for e in tiles):.1f} us, last pull ", end="")
    print(f"{max((e.end for e in pulls), default=0):.1f} us, a batch of pulls ", end="")
    print(f"{statistics.median([e.end - e.start for e in pulls] or [0]):.2f} us")
    for kind in sorted({entry.kind for entry in tiles}):
        spans = sorted(entry.end - entry.start for entry in tiles if entry.kind == kind)
        line = ", ".join(f"p{p} {spans[(len(spans) - 1) * p // 100]:.2f}" for p in (5, 50, 95))
        print(f"  {kind:15} {len(spans):6} tiles, us: {line}")
    for counter in (None, *COUNTERS.values()):
        for name, chosen in (
            (f"in the first {START:.0f} us", [e for e in tiles if e.start <= START]),
            ("later", [e for e in tiles if e.start > START]),
        ):
            waits = [e.wait for e in chosen if e.waited_for == counter]
            if waits:
                share = sum(waits) / total
                print(f"  waits for {counter}, {name}: {len(waits)}, {share:.2%} of all time")


def parse_tuning(text: str) -> tuple[tuple[str, int], ...]:
    pairs = (pair.split("=") for pair in text.split(","))
    return tuple((name, int(value)) for name, value in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of pictures and traces")
    parser.add_argument("--shapes", default="A,B,C,D,A T=1024")
    parser.add_argument("--tune", nargs="*", default=[], type=parse_tuning)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    num_ctas = torch.cuda.get_device_properties(0).multi_processor_count
    for name in arguments.shapes.split(","):
        tokens, hidden, intermediate, experts, top_k = SHAPES[name]
        plain = Layer(experts, top_k, hidden, intermediate)
        weights = Weights(plain)
        batch = make_batch(plain, tokens, none_share=0.0)
        for tuning in ((), *arguments.tune):
            layer = Layer(experts, top_k, hidden, intermediate, tuning=tuning)
            with ranks_of(layer, weights, (tokens,), *batch) as ranks:
                call = functools.partial(ranks.ranks[0].launch, PREPARE | KERNEL)
                times = {
                    regime: statistics.median(seconds) * 1e3
                    for regime, seconds in both_clocks(call).items()
                }
            shown = ", ".join(f"{regime} {ms:.4f} ms" for regime, ms in times.items())
            print(f"{name} {dict(tuning) or 'default'}: {shown}", flush=True)
        with ranks_of(plain, weights, (tokens,), *batch, spans=1 << 18) as ranks:
            for _ in range(5):
                ranks.out()
            timeline = entries(ranks.ranks[0])
        describe(timeline, num_ctas)
        file = arguments.out / f"forward-timeline-{name.replace(' ', '-').replace('=', '')}"
        draw_timeline(timeline, f"{file}.png")
        write_chrome_trace(timeline, f"{file}.json")
        print(f"  {file}.png", flush=True)


if __name__ == "__main__":
    main()
