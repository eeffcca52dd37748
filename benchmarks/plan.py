"""How long does the plan take on the device?

    python benchmarks/plan.py [--out FOLDER]

A graph of launches one after another, so a time holds a launch and no host work. Every case is
first compared with the host's plan. A budget is what the layer's preparation leaves for the plan.
"""

import argparse
from pathlib import Path

import numpy as np

import mok
from benchmarks._gpu_timing import both_clocks, in_a_graph
from benchmarks._timing import RESULTS, statistics_ms, write_results
from tests.gpu._plan import DevicePlanner
from tests.gpu._routing import make_ids

COPIES = 20

# name: T of each rank, the largest T, K, E, ranks, routing, budget in microseconds
CASES = {
    "A": (16384, 16384, 8, 128, 2, "random", 20),
    "A zipf": (16384, 16384, 8, 128, 2, "zipf", 20),
    "A one": (16384, 16384, 8, 128, 2, "one", 20),
    "A, R=1": (16384, 16384, 8, 128, 1, "random", None),
    "T=256": (256, 256, 8, 128, 2, "random", 8),
    "T=256 of 16384": (256, 16384, 8, 128, 2, "random", 8),
    # What a launch costs without routes, and without their spread over the experts.
    "T=0": (0, 256, 8, 128, 2, "random", None),
    "T=256 one": (256, 256, 8, 128, 2, "one", None),
    "T=4096": (4096, 4096, 8, 128, 2, "random", None),
    "E=896, K=16": (16384, 16384, 16, 896, 1, "random", None),
    "R=8": (8192, 8192, 8, 256, 8, "random", None),
    "R=72": (8192, 8192, 8, 144, 72, "random", None),
}


def make_planner(tokens, max_tokens, top_k, num_experts, ranks, routing) -> DevicePlanner:
    """Buffers with the ids of all ranks, checked against the host."""
    ids = [make_ids(routing, tokens, top_k, num_experts, seed=[rank, 7]) for rank in range(ranks)]
    planner = DevicePlanner(ranks, num_experts, top_k, max_tokens)
    planner.set_ids(ids)
    planner.launch(0)
    actual = planner.result()
    for name, expected in mok._C.build_plan(ids, 0, num_experts).items():
        np.testing.assert_array_equal(actual[name][: len(expected)], expected, err_msg=name)
    return planner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    arguments = parser.parse_args()
    records = []
    print(f"{'case':16} {'routes':>8} {'regime':10} {'us':>7} {'p10':>7} {'p90':>7} {'budget':>7}")
    for name, (tokens, max_tokens, top_k, experts, ranks, routing, budget) in CASES.items():
        planner = make_planner(tokens, max_tokens, top_k, experts, ranks, routing)
        replay = in_a_graph(lambda planner=planner: planner.launch(0), COPIES)
        for regime, seconds in both_clocks(replay).items():
            # A thousandfold: as it is, statistics_ms would round to tenths of a microsecond.
            micro = statistics_ms([value / COPIES * 1e3 for value in seconds])
            late = budget is not None and micro["ms"] > budget
            line = f"{name:16} {tokens * top_k * ranks:8d} {regime:10} "
            line += " ".join(f"{micro[key]:7.2f}" for key in ("ms", "p10", "p90"))
            print(f"{line} {budget or '-':>7}{' OVER' if late else ''}")
            records.append(
                {
                    "bench": "plan",
                    "contestant": "mok",
                    "shape": name,
                    "T": tokens,
                    "H": None,
                    "I": None,
                    "E": experts,
                    "K": top_k,
                    "ranks": ranks,
                    "dtype": None,
                    "pass": "forward",
                    "regime": regime,
                    **{key: round(value * 1e-3, 6) for key, value in micro.items()},
                    "tflops": None,
                    "rel_error": 0,
                    "settings": {"max_tokens": max_tokens, "routing": routing, "budget_us": budget},
                }
            )
    print(write_results("plan", records, arguments.out))


if __name__ == "__main__":
    main()
