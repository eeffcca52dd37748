"""How fast is a training step of the layer on one GPU, through autograd?

    python benchmarks/moe_layer.py [--out FOLDER] [--shapes A,B,C,D] [--save gate_up]

`mok.moe` with gradients for x, router weights and all expert weights: "forward" is a call whose
inputs need gradients, "forward_backward" adds `out.backward`. One rank holds all experts, so
nothing crosses a link; balanced random routing. Contestants: the megakernels, and the collective
backend, which is torch's grouped GEMM and elementwise kernels. `memory` is what a step takes at its
peak beyond weights, gradients and inputs.
"""

import argparse
import functools
from pathlib import Path

import torch

import mok
from benchmarks._gpu_timing import both_clocks
from benchmarks._timing import RESULTS, statistics_ms, write_results
from benchmarks.moe_forward import SHAPES

CONTESTANTS = {"mok": "megakernel", "torch_grouped_mm": "collective"}


class Step:
    """The tensors of one shape, and the passes over them."""

    def __init__(self, sizes, save: str):
        tokens, hidden, inner, experts, top_k = sizes
        bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
        self.save = save
        self.x = torch.randn(tokens, hidden, **bf16, requires_grad=True)
        scores = torch.rand(tokens, experts, device="cuda")
        self.ids = torch.topk(scores, top_k).indices
        self.weights = torch.rand(tokens, top_k, device="cuda", requires_grad=True)
        shapes = ((experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner))
        self.experts = [torch.empty(shape, **bf16) for shape in shapes]
        for weight in self.experts:
            for matrix in weight:
                matrix.copy_(torch.randn(matrix.shape, device="cuda") * matrix.shape[1] ** -0.5)
            weight.requires_grad_()
        self.dout = torch.randn(tokens, hidden, **bf16)

    def forward(self, backend: str) -> torch.Tensor:
        return mok.moe(
            self.x, self.ids, self.weights, *self.experts, save=self.save, backend=backend
        )

    def forward_backward(self, backend: str) -> None:
        for leaf in (self.x, self.weights, *self.experts):
            leaf.grad = None
        self.forward(backend).backward(self.dout)

    def peak_memory(self, backend: str) -> int:
        """Bytes at the peak of a step beyond what lies there before and after it."""
        self.forward_backward(backend)
        torch.cuda.synchronize()
        grads = sum(t.grad.nbytes for t in (self.x, self.weights, *self.experts))
        for leaf in (self.x, self.weights, *self.experts):
            leaf.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.forward(backend).backward(self.dout)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - grads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--save", default="gate_up", choices=("none", "gate_up", "all"))
    arguments = parser.parse_args()
    records = []
    print(f"{'shape':10} {'contestant':17} {'pass':17}  burst ms sustained  TFLOP/s")
    for name in arguments.shapes.split(","):
        tokens, hidden, inner, experts, top_k = SHAPES[name]
        step = Step(SHAPES[name], arguments.save)
        for contestant, backend in CONTESTANTS.items():
            memory = step.peak_memory(backend)
            for what, passes in (("forward", 1), ("forward_backward", 3)):
                clocks = both_clocks(functools.partial(getattr(step, what), backend))
                flops = passes * 6 * tokens * top_k * hidden * inner
                shown = []
                for regime, seconds in clocks.items():
                    times = statistics_ms(seconds)
                    shown.append(times["ms"])
                    records.append(
                        {
                            "bench": "moe_layer",
                            "contestant": contestant,
                            "shape": name,
                            "T": tokens,
                            "H": hidden,
                            "I": inner,
                            "E": experts,
                            "K": top_k,
                            "ranks": 1,
                            "dtype": "bf16",
                            "pass": what,
                            "regime": regime,
                            **times,
                            "tflops": round(flops / times["ms"] * 1e-9, 1),
                            "rel_error": None,
                            "settings": {"save": arguments.save, "memory": memory},
                        }
                    )
                rate = flops / shown[0] * 1e-9
                print(
                    f"{name:10} {contestant:17} {what:17} {shown[0]:9.3f} {shown[1]:9.3f} "
                    f"{rate:8.0f}  peak {memory / 2**20:.0f} MiB",
                    flush=True,
                )
        step = None
        torch.cuda.empty_cache()
    print(write_results("moe-layer", records, arguments.out))


if __name__ == "__main__":
    main()
