"""How long does the preparation of a call take on the device, and where does the time go?

    python benchmarks/preparation.py [--out FOLDER] [--ranks-only] [--tiny]

From a rank's ids to plan, table and pull lists; x lies in the heap and is not copied. Every case is
first compared with the host. A graph of calls one after another, so that a time holds launches and
no host work. How the ranks are there:

    alone      one rank
    kernel     the second kernel of one of several ranks; the ids of all were put into the windows
    virtual    several ranks on this GPU, each with its share of the multiprocessors
    GPUs       a process and a GPU each, where there are enough; alone with --ranks-only
    host       the CPU's: what --tiny measures where there is no GPU

The time line shows each block of one launch of the second kernel: a PNG and the numbers beside it.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks._gpu_timing import (
    TINY,
    both_clocks,
    clocks_of,
    in_a_graph,
    seconds_of_each,
    slowest,
)
from benchmarks._ranks import Ranks, add_arguments, run_on_ranks, settle
from benchmarks._timing import RESULTS, statistics_ms, write_results
from mok import _C, workspace
from tests._harness import close_pools
from tests.gpu._preparation import VirtualRanks, publish_by_hand
from tests.preparation_cases import Case, compare

COPIES = 20
LAYER = {"hidden": 2048, "intermediate": 768, "num_sms": 132}
PHASES = ("deal", "count", "meet", "scan", "place", "meet again", "units")

A = Case((16384, 16384), 8, 128, **LAYER)
SMALL = Case((256, 256), 8, 128, **LAYER)

# name: case, how its ranks are there, budget in microseconds
CASES = {
    "A": (A, "kernel", None),
    "A virtual": (A, "virtual", 35),
    "A, R=1": (replace(A, tokens=(16384,)), "alone", 35),
    "A zipf": (replace(A, routing="zipf"), "kernel", None),
    "A one": (replace(A, routing="one"), "kernel", None),
    "A in chunks": (replace(A, ring_rows=32768), "kernel", None),
    "A backward": (replace(A, direction="backward"), "kernel", None),
    "T=256": (SMALL, "kernel", None),
    "T=256 virtual": (SMALL, "virtual", 15),
    "T=256, R=1": (replace(SMALL, tokens=(256,)), "alone", 15),
    "T=0": (replace(SMALL, tokens=(0, 0), ring_rows=8192), "kernel", None),
    "T=4096": (replace(A, tokens=(4096, 4096)), "kernel", None),
    "E=896, K=16": (Case((16384,), 16, 896, **LAYER), "alone", None),
    "R=8": (Case((8192,) * 8, 8, 256, **LAYER), "kernel", None),
    "R=72": (Case((8192,) * 72, 8, 144, **(LAYER | {"hidden": 8})), "kernel", None),
}
TIMELINES = ("A", "A, R=1", "T=256", "T=256, R=1", "R=72")


class Alone:
    """The launches of one case on this GPU."""

    def __init__(self, case: Case, how: str, timed: bool = False):
        blocks = (
            0 if how == "virtual" else torch.cuda.get_device_properties(0).multi_processor_count
        )
        self.case, self.how = case, how
        self.ids = case.ids()
        self.ranks = VirtualRanks(case, x_in_heap=True, timed=timed, blocks=blocks)
        self.ranks.set_ids(self.ids)
        if how == "kernel":
            publish_by_hand(self.ranks.preparations[0], self.ids, case.num_experts)

    def call(self) -> None:
        if self.how == "kernel":
            stream = torch.cuda.current_stream().cuda_stream
            self.ranks.preparations[0].launch_published(self.case.tokens[0], stream)
        else:
            self.ranks.launch(meets_outputs=False)

    def check(self) -> None:
        self.call()
        torch.cuda.synchronize()
        for rank in range(1 if self.how == "kernel" else self.case.num_ranks):
            self.ranks.workspaces[rank].check()
            result = self.ranks.preparations[rank].result()
            compare(result, self.case.expected(self.ids, rank), f"rank {rank}")

    def graph(self):
        """COPIES calls; virtual ranks follow each other by their barriers alone."""
        if self.how != "virtual":
            return in_a_graph(self.call, COPIES)
        return in_a_graph(lambda: self.ranks.launch(COPIES, meets_outputs=False), 1)

    def timeline(self) -> np.ndarray:
        """nanoseconds [blocks, stamps] of one launch, those that took part."""
        for _ in range(3):
            self.call()
        torch.cuda.synchronize()
        preparation = self.ranks.preparations[0]
        preparation.clear_times()
        self.call()
        torch.cuda.synchronize()
        times = preparation.times()
        return times[times[:, -1] > 0].astype(np.int64)

    def close(self) -> None:
        self.ranks.close()


def measure_rank(ranks: Ranks, case: Case, replays: int) -> list[float]:
    """Seconds per call of each replay, on a GPU of its own."""
    rank, group = ranks.rank, ranks.group
    settings = {"hidden_size": case.hidden, "top_k": case.top_k, "dtype": torch.bfloat16}
    opened = workspace.ensure(
        workspace.declare(group, max_tokens=case.max_tokens, **settings, device="cuda")
    )
    opened.set_timeout(20.0)
    ids = case.ids()
    own = torch.from_numpy(ids[rank]).cuda()
    x = workspace.symm_empty(case.tokens[rank], case.hidden, workspace=opened)
    rows = _C.InputRows(x.data_ptr(), 2 * case.hidden)
    preparation = _C.DevicePreparation(opened._core, case.top_k, case.max_tokens, case.settings())

    def call(meets_outputs=False):
        stream = torch.cuda.current_stream().cuda_stream
        arguments = (own.data_ptr(), True, len(own), rows, _C.InputRows())
        preparation.launch(*arguments, meets_outputs, stream)

    call(meets_outputs=True)
    torch.cuda.synchronize()
    opened.check()
    compare(preparation.result(), case.expected(ids, rank), f"rank {rank}")
    replay = in_a_graph(call, COPIES)
    seconds_of_each(replay, 20)
    opened._core.barrier(2, torch.cuda.current_stream().cuda_stream)
    seconds = seconds_of_each(replay, replays)
    opened._core.barrier(2, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    opened.check()
    opened.close()
    return [value / COPIES for value in seconds]


def record(name: str, case: Case, how: str, budget, regime: str, seconds: list[float]) -> dict:
    # A thousandfold: as it is, statistics_ms would round to tenths of a microsecond.
    micro = statistics_ms([value * 1e3 for value in seconds])
    late = budget is not None and micro["ms"] > budget
    line = f"{name:16} {how:8} {regime:10} "
    line += " ".join(f"{micro[key]:7.2f}" for key in ("ms", "p10", "p90"))
    print(f"{line} {budget or '-':>7}{' OVER' if late else ''}", flush=True)
    return {
        "bench": "preparation",
        "contestant": "mok",
        "shape": name,
        "T": case.max_tokens,
        "H": case.hidden,
        "I": case.intermediate,
        "E": case.num_experts,
        "K": case.top_k,
        "ranks": case.num_ranks,
        "dtype": None,
        "pass": case.direction,
        "regime": regime,
        **{key: round(value * 1e-3, 6) for key, value in micro.items()},
        "tflops": None,
        "rel_error": 0,
        "settings": {"ranks_as": how, "routing": case.routing, "budget_us": budget},
    }


def measure_host() -> list[dict]:
    """The host's preparation of a small case on each rank: a dry run of this file."""
    case = replace(SMALL, tokens=(32, 16), hidden=64, intermediate=64, num_experts=8)
    ids = case.ids()
    records = []

    def call() -> None:
        for rank in range(case.num_ranks):
            case.expected(ids, rank)

    for regime, seconds in clocks_of(call, device="cpu", clocks=TINY).items():
        records.append(record("tiny", case, "host", None, regime, seconds))
    return records


def print_timeline(name: str, times: np.ndarray) -> dict:
    """Microseconds since the first block's start at which the phases end."""
    relative = (times - times[:, 0].min()) * 1e-3
    work, table = relative[:-1] if len(relative) > 1 else relative, relative[-1]
    print(f"  time line of {name}: {len(relative)} blocks; us until the end of each phase")
    print(f"    {'':12} {'first':>7} {'median':>7} {'last':>7} {'table':>7}")
    for phase, column, its in zip(("start", *PHASES), work.T, table, strict=True):
        values = (column.min(), np.median(column), column.max(), its)
        print(f"    {phase:12} " + " ".join(f"{value:7.2f}" for value in values))
    return {"phases": PHASES, "microseconds": relative.round(3).tolist()}


def draw_timelines(timelines: dict[str, dict], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("preparation: no picture of the time lines without matplotlib")
        return
    figure, axes = pyplot.subplots(len(timelines), 1, figsize=(9, 2.6 * len(timelines)))
    for axis, (name, timeline) in zip(np.atleast_1d(axes), timelines.items(), strict=True):
        stamps = np.array(timeline["microseconds"])
        for index, phase in enumerate(PHASES):
            begin, end = stamps[:, index], stamps[:, index + 1]
            axis.barh(range(len(stamps)), end - begin, left=begin, height=1.0, label=phase)
        axis.set_title(f"{name}: blocks of the second kernel, the table's last", fontsize=9)
        axis.set_xlabel("microseconds")
    np.atleast_1d(axes)[0].legend(ncol=len(PHASES), fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--ranks-only", action="store_true", help="only a process and GPU each")
    add_arguments(parser, ranks=2)
    arguments = parser.parse_args()
    if not settle(arguments, "preparation"):
        return
    records, timelines = [], {}
    print(f"{'case':16} {'ranks':8} {'regime':10} {'us':>7} {'p10':>7} {'p90':>7} {'budget':>7}")
    if arguments.device == "cpu":
        write_results("preparation", measure_host(), arguments.out)
        return
    for name, (case, how, budget) in ({} if arguments.ranks_only else CASES).items():
        alone = Alone(case, how)
        alone.check()
        for regime, seconds in both_clocks(alone.graph()).items():
            seconds = [value / COPIES for value in seconds]
            records.append(record(name, case, how, budget, regime, seconds))
        alone.close()
    if torch.cuda.device_count() >= 2:
        from benchmarks.preparation import measure_rank  # by the name that the workers find

        for name, case, budget in (("A", A, 35), ("T=256", SMALL, 15)):
            by_rank = run_on_ranks(2, measure_rank, "cuda", case, 100, timeout=90)
            records.append(record(name, case, "GPUs", budget, "burst", slowest(by_rank)))
        close_pools()
    for name in () if arguments.ranks_only else TIMELINES:
        case, how, _ = CASES[name]
        alone = Alone(case, how, timed=True)
        timelines[name] = print_timeline(name, alone.timeline())
        alone.close()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = write_results("preparation", records, arguments.out)
    print(path)
    if not timelines:
        return
    lines = Path(path).with_name(Path(path).stem + "-timeline.json")
    lines.write_text(json.dumps(timelines))
    draw_timelines(timelines, lines.with_suffix(".png"))


if __name__ == "__main__":
    main()
