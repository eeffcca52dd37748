"""How fast is the forward pass of one rank: the megakernel alone, and the whole call?

    python benchmarks/moe_forward.py [--out FOLDER] [--shapes A,B,C,D] [--save none]

One rank holds all experts, so nothing crosses a link; balanced random routing. EXPERIMENT is what
the experiment's kernel took on two GPUs (burst, sustained, ms); benchmarks/_gpu_timing.py says what
the clocks are. Over several GPUs: benchmarks/moe_layer.py --stages.
"""

import argparse
import functools
from pathlib import Path

import torch

from benchmarks._gpu_timing import clocks_of
from benchmarks._timing import RESULTS, statistics_ms, write_results
from tests.gpu._forward import KERNEL, MEET, PREPARE, SUM, Layer, Weights, make_batch, ranks_of

# shape: T, H, I, E, K
SHAPES = {
    "A": (16384, 2048, 768, 128, 8),
    "B": (8192, 4096, 1536, 128, 8),
    "C": (4096, 7168, 2048, 64, 8),
    "D": (8192, 4096, 14336, 8, 2),
    "A T=4096": (4096, 2048, 768, 128, 8),
    "A T=1024": (1024, 2048, 768, 128, 8),
    "A T=256": (256, 2048, 768, 128, 8),
    "B T=256": (256, 4096, 1536, 128, 8),
}
EXPERIMENT = {"A": (1.97, 2.19), "B": (3.68, 4.20), "C": (4.26, 4.78), "D": (8.0, 8.85)}
# Timed with the preparation in front of it, which the kernel cannot run twice without.
STAGES = {
    "call": PREPARE | KERNEL | MEET | SUM,
    "preparation + kernel": PREPARE | KERNEL,
    "preparation": PREPARE,
    "weighted sum": SUM,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--save", default="none", choices=("none", "gate_up", "all"))
    arguments = parser.parse_args()
    records = []
    print(
        f"{'shape':10} {'stages':22} {'regime':10} {'ms':>8} {'TFLOP/s':>8} {'experiment ms':>13}"
    )
    for name in arguments.shapes.split(","):
        tokens, hidden, intermediate, experts, top_k = SHAPES[name]
        layer = Layer(experts, top_k, hidden, intermediate, save=arguments.save)
        batch = make_batch(layer, tokens, none_share=0.0)
        with ranks_of(layer, Weights(layer), (tokens,), *batch) as ranks:
            first = ranks.out()
            assert torch.isfinite(first).all()
            rank = ranks.ranks[0]
            for stages, mask in STAGES.items():
                clocks = clocks_of(functools.partial(rank.launch, mask))
                for regime, seconds in clocks.items():
                    times = statistics_ms(seconds)
                    flops = 6.0 * tokens * top_k * hidden * intermediate
                    tflops = flops * 1e-9 / times["ms"] if mask & KERNEL else None
                    experiment = (
                        EXPERIMENT[name][regime == "sustained"] if name in EXPERIMENT else None
                    )
                    shown = "-" if tflops is None else f"{tflops:.0f}"
                    line = f"{name:10} {stages:22} {regime:10} {times['ms']:8.4f} {shown:>8}"
                    print(f"{line} {'-' if experiment is None else experiment:>13}", flush=True)
                    records.append(
                        {
                            "bench": "moe_forward",
                            "contestant": "mok",
                            "shape": name,
                            "T": tokens,
                            "H": hidden,
                            "I": intermediate,
                            "E": experts,
                            "K": top_k,
                            "ranks": 1,
                            "dtype": "bf16",
                            "pass": "forward",
                            "regime": regime,
                            **times,
                            "tflops": None if tflops is None else round(tflops, 1),
                            "rel_error": None,
                            "settings": {"stages": stages, "save": arguments.save},
                        }
                    )
            assert torch.equal(ranks.out(), first)
    print(write_results("moe-forward-kernel", records, arguments.out))


if __name__ == "__main__":
    main()
