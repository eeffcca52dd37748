"""Where does the forward kernel's time go?

    python benchmarks/moe_forward_timeline.py [--out FOLDER] [--shapes A,B] [--tune lag_waves=3 ...]

One rank that holds all experts, shapes of benchmarks/moe_forward.py. Writes a picture and a
Perfetto trace of one call in a warm card's steady state, and prints shares of the CTAs' time,
durations and rates by kind of task, and waits by what was waited for. Each --tune (names of
csrc/schedule/config.h) is measured beside the default: preparation and kernel, burst and sustained.
mok.trace shows whole calls, of layers and of several ranks; this one can change the schedule.
"""

import argparse
import functools
import statistics
from pathlib import Path

from benchmarks._gpu_timing import both_clocks
from benchmarks._spans import traced_call
from benchmarks._timing import RESULTS
from benchmarks.moe_forward import SHAPES
from mok._traced_call import TracedCall
from mok.timeline import draw_timeline, write_chrome_trace
from tests.gpu._forward import KERNEL, PREPARE, Layer, Weights, make_batch, ranks_of

START = 100.0  # microseconds that count as the start


def describe(call: TracedCall) -> None:
    print(f"  {call}")
    timeline, num_ctas = call.timeline, call.num_ctas
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
    for counter in (None, "x", "gate_up", "hidden_read"):
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
            rank = ranks.ranks[0]
            sizes = dict(zip("THIEK", SHAPES[name], strict=True))
            call = traced_call("forward", sizes, rank.task_spans, rank.pull_spans)
        describe(call)
        file = arguments.out / f"forward-timeline-{name.replace(' ', '-').replace('=', '')}"
        draw_timeline(call.timeline, f"{file}.png")
        write_chrome_trace(call.timeline, f"{file}.json")
        print(f"  {file}.png", flush=True)


if __name__ == "__main__":
    main()
