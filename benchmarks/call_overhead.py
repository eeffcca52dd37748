"""How long does a call of the layer keep the CPU, when nobody waits for the GPU?

    python benchmarks/call_overhead.py [--out FOLDER] [--profile]

CPU time until a call has returned, on a device that is never behind: few tokens, and a
synchronisation between the timed calls. Each door is made of the ones before it, so that their
differences are the parts: `raw op` (checks and launches in C++), `op` (its results and torch's
dispatcher), `moe` (settings, but without the dispatcher's way through Python), `choice` (the ids),
`router`, `layer`. TARGETS are microseconds, without gradients;
without a GPU the figures hold the CPU executor's work too and have no target. `--profile` lists the
Python functions of the layer's call.
"""

import argparse
import cProfile
import io
import pstats
import time
from pathlib import Path

import torch

import mok
from benchmarks._timing import RESULTS, statistics_ms, write_results

TARGETS = {"op": 60.0, "layer": 150.0}  # torch.ops.mok.moe_forward, MoELayer.forward
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


def op_arguments(x, ids, weights, experts, gradients: bool) -> tuple:
    """The positional arguments that `mok.moe` gives torch.ops.mok.moe_forward."""
    seen: list[tuple] = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.mok.moe_forward.default:
                seen.append(args)
            return function(*args, **(kwargs or {}))

    with Recorder(), torch.set_grad_enabled(gradients):
        mok.moe(x, ids, weights, experts.w_gate, experts.w_up, experts.w_down)
    x, ids, weights, _, _, _, *rest = seen[0]
    # The mode has seen tensors that autograd knows nothing of.
    return (x, ids, weights, experts.w_gate, experts.w_up, experts.w_down, *rest)


def doors(device: str) -> dict:
    """(door, whether with gradients) -> the same forward pass through it."""
    layer = mok.MoELayer(
        SIZES["H"], SIZES["I"], SIZES["E"], SIZES["K"], dtype=torch.bfloat16, device=device
    )
    x = torch.randn(TOKENS, SIZES["H"], dtype=torch.bfloat16, device=device)
    ids = torch.randint(SIZES["E"], (TOKENS, SIZES["K"]), device=device)
    weights = torch.rand(TOKENS, SIZES["K"], device=device)
    scores = torch.rand(TOKENS, SIZES["E"], device=device)
    experts = layer.experts
    calls = {}
    for gradients in (False, True):
        arguments = op_arguments(x, ids, weights, experts, gradients)
        with torch.no_grad():
            out, *saved = torch.ops.mok.moe_forward(*arguments)
        of_this = {
            "raw op": lambda args=arguments, out=out, saved=saved: torch.ops.mok.moe_forward_out(
                *args, out, saved
            ),
            "op": lambda args=arguments: torch.ops.mok.moe_forward(*args),
            "moe": lambda: mok.moe(x, ids, weights, experts.w_gate, experts.w_up, experts.w_down),
            "choice": lambda: mok.router.top_k_lowest_first(scores, SIZES["K"]),
            "router": lambda: layer.router(x),
            "layer": lambda: layer(x),
        }
        calls |= {(door, gradients): call for door, call in of_this.items()}

    def step():
        out = layer(x)
        out.backward(out.detach())

    calls["forward and backward", True] = step
    return calls


def context_of(door: str, gradients: bool):
    return torch.set_grad_enabled(gradients and door != "raw op")


def print_profile(call) -> None:
    with cProfile.Profile() as profile:
        for _ in range(CALLS):
            call()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(30)
    print(text.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--profile", action="store_true", help="also where Python spends the time")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    records = []
    calls = doors(device)
    for (door, gradients), call in calls.items():
        with context_of(door, gradients):
            times = statistics_ms(seconds_of_each(call, synchronize))
        target = TARGETS.get(door) if device == "cuda" and not gradients else None
        note = "" if target is None else f"target {target:.0f} us"
        if target is not None and 1e3 * times["ms"] > target:
            note += " MISSED"
        what = "gradients" if gradients else ""
        print(
            f"{door:20} {what:9} {1e3 * times['ms']:8.1f} us  p90 {1e3 * times['p90']:8.1f}  {note}"
        )
        records.append(
            {
                "bench": "call_overhead",
                "contestant": "mok",
                "shape": None,
                "T": TOKENS,
                **SIZES,
                "ranks": 1,
                "dtype": "bf16",
                "pass": "forward_backward" if door == "forward and backward" else "forward",
                "regime": "cpu",
                **times,
                "tflops": None,
                "rel_error": None,
                "settings": {"door": door, "device": device, "gradients": gradients},
            }
        )
    if arguments.profile:
        for gradients in (False, True):
            with context_of("layer", gradients):
                print_profile(calls["layer", gradients])
    print(write_results("call-overhead", records, arguments.out))


if __name__ == "__main__":
    main()
