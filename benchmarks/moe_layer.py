"""How fast are whole layer calls over one or several GPUs, and how much memory do they take?

    python benchmarks/moe_layer.py [--ranks 2] [--out FOLDER] [--only TEXT] [--budget SECONDS]
                                   [--stages] [--trace NAMES [--only-traced]] [--tiny]

`mok.moe` as a user calls it, one process and GPU per rank: ids, plan, staging of x, barriers,
kernel and weighted sum. Passes: "inference" without gradients, "forward" with them, "backward"
alone through autograd, and both. Each call's time is that of the slowest rank; shown is the median.
benchmarks/_gpu_timing.py says what burst, burst3 and sustained are. Beside each: the floor (the
largest of the matrix rate that the experiment reached, 335 GB/s of NVLink in each direction, and
the weights through HBM; on the most loaded rank) and the target of benchmarks/_layer_cases.py.
Every case first gives equal bits twice; in a job of its own it agrees with torch's products.

--only picks cases whose name contains one of the comma-separated texts; --stages adds the times of
preparation, kernel, barrier and sum of a case's last pass, from calls traced beside; --trace writes
time lines of the named cases (FOLDER/trace-...), and nothing else with --only-traced. With
--budget, cases that would start later are left out.
"""

import argparse
import time
from pathlib import Path

from benchmarks._gpu_timing import slowest
from benchmarks._layer_cases import PRODUCTS, LayerCase, layer_cases
from benchmarks._layer_step import NOTHING_BESIDE, look_beside, measure
from benchmarks._ranks import add_arguments, describe_ranks, is_shared, run_on_ranks, settle
from benchmarks._timing import RESULTS, statistics_ms, write_results
from tests._harness import RankError, RankTimeoutError, close_pools

CASE_SECONDS = 120.0


def records_of(case: LayerCase, ranks: int, device: str, by_rank: list[dict]) -> list[dict]:
    """Prints a line per pass, and returns a record per pass and clock."""
    tokens, hidden, inner, top_k, num_experts = case.sizes
    records = []
    first = by_rank[0]
    for what in case.passes:
        floors = first["floors"][what]
        flops = PRODUCTS[what] * 6.0 * tokens * top_k * hidden * inner
        shown = {}
        for regime in ("burst", "burst3", "sustained"):
            times = statistics_ms(slowest([rank["times"][what][regime] for rank in by_rank]))
            floor = max(floors.matrix[regime], floors.link, floors.weights)
            shown[regime] = times["ms"]
            records.append(
                {
                    "bench": "moe_layer",
                    "contestant": "mok_collective" if case.backend == "collective" else "mok",
                    "shape": case.name,
                    "T": tokens,
                    "H": hidden,
                    "I": inner,
                    "E": num_experts,
                    "K": top_k,
                    "ranks": ranks,
                    "dtype": "bf16",
                    "pass": what,
                    "regime": regime,
                    **times,
                    "tflops": round(flops / times["ms"] * 1e-9, 1),
                    "rel_error": first["rel_error"],
                    "settings": {
                        "device": device,
                        "save": case.save,
                        "routing": case.routing,
                        "ring": case.ring,
                        "x_in_heap": case.x_in_heap,
                        "main_grad": case.main_grad,
                        "floor_ms": round(floor, 6),
                        "floor_link_ms": round(floors.link, 6),
                        "floor_weights_ms": round(floors.weights, 6),
                        "load": round(floors.load, 3),
                        "target_ms": case.target(what, regime) if ranks == 2 else None,
                        "memory": first["memory"],
                    },
                }
            )
        target = records[-3]["settings"]["target_ms"]
        floor = max(floors.matrix["burst"], floors.link, floors.weights)
        late = target is not None and shown["burst"] > target
        print(
            f"{case.name:24} {what:17} {shown['burst']:8.3f} {shown['burst3']:8.3f} "
            f"{shown['sustained']:9.3f} {records[-2]['tflops']:8.0f} {floor:8.3f} "
            f"{floors.link:8.3f} {'-' if target is None else format(target, '.2f'):>7}"
            f"{' OVER' if late else ''}",
            flush=True,
        )
    memory = first["memory"]
    if memory is not None:
        shown = ", ".join(
            f"{name} {size / 2**20:.1f} MiB ({size / tokens:.0f} B a token)"
            for name, size in memory.items()
        )
        print(f"{case.name:24} memory: {shown}", flush=True)
    return records + stage_records(case, ranks, by_rank)


def stage_records(case: LayerCase, ranks: int, by_rank: list[dict]) -> list[dict]:
    """The stages of the traced calls: of each call the slowest rank's, then the median."""
    records = []
    for direction, stages in by_rank[0]["stages"].items():
        medians = {}
        for stage in stages:
            seconds = slowest([rank["stages"][direction][stage] for rank in by_rank])
            medians[stage] = statistics_ms(seconds)
            records.append(
                {
                    "bench": "moe_layer_stages",
                    "contestant": "mok",
                    "shape": case.name,
                    "ranks": ranks,
                    "pass": direction,
                    "regime": "burst, traced",
                    **medians[stage],
                    "settings": {"stage": stage},
                }
            )
        shown = ", ".join(f"{stage} {times['ms'] * 1e3:.1f}" for stage, times in medians.items())
        print(f"{case.name:24} {direction} stages, traced, us: {shown}", flush=True)
    return records


def describe_targets(records: list[dict]) -> str:
    """How many targets were reached, in one line."""
    wanted = [
        record
        for record in records
        if record["regime"] != "burst3" and record["settings"].get("target_ms") is not None
    ]
    missed = [
        f"{record['shape']} {record['pass']} {record['regime']}"
        for record in wanted
        if record["ms"] > record["settings"]["target_ms"]
    ]
    text = f"targets: {len(wanted) - len(missed)} of {len(wanted)} reached"
    return text + (f", missed by {', '.join(missed)}" if missed else "")


def run_job(case: LayerCase, arguments, job, *options) -> list[dict] | None:
    """The results by rank. A job that fails is named and ends nothing else."""
    try:
        return run_on_ranks(
            arguments.ranks, job, arguments.device, case, *options, timeout=CASE_SECONDS
        )
    except (RankError, RankTimeoutError) as error:
        print(f"{case.name:24} FAILED in {job.__name__}: {error}", flush=True)
        return None


def run_case(case: LayerCase, arguments, trace: str | None) -> list[dict] | None:
    """Records of its times, whatever becomes of what is looked at beside; None if it failed."""
    times = [] if arguments.only_traced else run_job(case, arguments, measure)
    if times is None:
        return None
    beside = None
    if not arguments.failed_beside:
        beside = run_job(case, arguments, look_beside, trace, arguments.stages)
        # Each failure costs new processes; what one case shows, the others would show too.
        arguments.failed_beside = beside is None
    beside = beside or [NOTHING_BESIDE] * arguments.ranks
    records = []
    if times:
        by_rank = [one | other for one, other in zip(times, beside, strict=True)]
        records = records_of(case, arguments.ranks, arguments.device, by_rank)
    for rank, result in enumerate(beside):
        if result["report"] is not None:
            print(f"  time line of rank {rank}: {result['report']}", flush=True)
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--only", default="", help="texts of which a case's name has one")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--trace", default="", help="names of cases")
    parser.add_argument("--only-traced", action="store_true", help="only time lines")
    parser.add_argument("--stages", action="store_true", help="also the stages of traced calls")
    add_arguments(parser, ranks=1)
    arguments = parser.parse_args()
    arguments.failed_beside = False
    if not settle(arguments, "moe_layer"):
        return 0
    texts = [text for text in arguments.only.split(",") if text]
    traced = arguments.trace.split(",")
    begin, records, failed = time.monotonic(), [], 0
    print(describe_ranks(arguments.ranks, arguments.device) + ", milliseconds")
    print(
        f"{'case':24} {'pass':17} {'burst':>8} {'burst3':>8} {'sustained':>9} {'TFLOP/s':>8} "
        f"{'floor':>8} {'link':>8} {'target':>7}"
    )
    for case in layer_cases(arguments.tiny):
        if case.x_in_heap and arguments.ranks == 1:
            continue  # one rank reads x where it is
        if case.backend == "collective" and is_shared(arguments.ranks, arguments.device):
            continue  # NCCL refuses ranks that share a GPU
        if arguments.only_traced and case.name not in traced:
            continue
        if texts and not any(text in case.name for text in texts):
            continue
        if time.monotonic() - begin > arguments.budget:
            print(f"{case.name:24} left out: no time left")
            continue
        trace = None
        if case.name in traced:
            trace = str(arguments.out / f"trace-{case.name.replace(' ', '-').replace('=', '')}")
        found = run_case(case, arguments, trace)
        failed += found is None
        if found:
            records += found
            # After every case: who stops this keeps what there is.
            path = write_results(f"moe-layer-ep{arguments.ranks}", records, arguments.out)
    close_pools()
    if records:
        print(path)
    beside = ", and what is looked at beside" if arguments.failed_beside else ""
    print(describe_targets(records) + f"; {failed} case(s) failed{beside}")
    return 1 if failed or arguments.failed_beside else 0


if __name__ == "__main__":
    raise SystemExit(main())
