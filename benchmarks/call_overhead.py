"""How long does a call of the layer keep the CPU, when nobody waits for the GPU?

    python benchmarks/call_overhead.py [--out FOLDER]

CPU time until the call has returned, on a device that is never behind: few tokens, and a
synchronisation between the timed calls. TARGETS are microseconds; without a GPU the figures hold
the CPU executor's work too and have no target.
"""

import argparse
import time
from pathlib import Path

import torch

import mok
from benchmarks._timing import RESULTS, statistics_ms, write_results

TARGETS = {"op": 60.0, "moe": None, "layer": 150.0}  # torch.ops.mok.*, mok.moe, MoELayer.forward
CALLS = 400
SIZES = {"H": 256, "I": 128, "E": 8, "K": 2}
TOKENS = 16


def seconds_of_each(call, synchronize) -> list[float]:
    for _ in range(30):
        call()
    seconds = []
    for _ in range(CALLS):
        synchronize()
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    synchronize()
    return seconds


def calls_of(device: str) -> dict:
    """The same forward pass through each of the three doors."""
    layer = mok.MoELayer(
        SIZES["H"], SIZES["I"], SIZES["E"], SIZES["K"], dtype=torch.bfloat16, device=device
    )
    x = torch.randn(TOKENS, SIZES["H"], dtype=torch.bfloat16, device=device)
    ids = torch.randint(SIZES["E"], (TOKENS, SIZES["K"]), device=device)
    weights = torch.rand(TOKENS, SIZES["K"], device=device)
    experts = layer.experts
    arguments: list = []
    op = torch.ops.mok.moe_forward

    def recording(*args):
        arguments[:] = args
        return op(*args)

    torch.ops.mok.moe_forward = recording
    try:
        mok.moe(x, ids, weights, experts.w_gate, experts.w_up, experts.w_down)
    finally:
        torch.ops.mok.moe_forward = op
    return {
        "op": lambda: op(*arguments),
        "moe": lambda: mok.moe(x, ids, weights, experts.w_gate, experts.w_up, experts.w_down),
        "layer": lambda: layer(x),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    records = []
    with torch.no_grad():
        for name, call in calls_of(device).items():
            times = statistics_ms(seconds_of_each(call, synchronize))
            target = TARGETS[name] if device == "cuda" else None
            note = "" if target is None else f"target {target:.0f} us"
            if target is not None and 1e3 * times["ms"] > target:
                note += " MISSED"
            print(f"{name:6} {1e3 * times['ms']:8.1f} us  p90 {1e3 * times['p90']:8.1f}  {note}")
            records.append(
                {
                    "bench": "call_overhead",
                    "contestant": "mok",
                    "shape": None,
                    "T": TOKENS,
                    **SIZES,
                    "ranks": 1,
                    "dtype": "bf16",
                    "pass": "forward",
                    "regime": "cpu",
                    **times,
                    "tflops": None,
                    "rel_error": None,
                    "settings": {"door": name, "device": device},
                }
            )
    print(write_results("call-overhead", records, arguments.out))


if __name__ == "__main__":
    main()
