"""How fast is the backward kernel of one rank, as a whole and by kind of task?

    python benchmarks/moe_backward.py [--out FOLDER] [--shapes A,B,C,D] [--float32] [--accumulate]

One rank with the experts and rows that a rank of two has, all from its own tokens, so that nothing
crosses a link; random routing, gate and up saved, gradients for x, router weights and all expert
weights. Times are of preparation and kernel; benchmarks/_gpu_timing.py says what the clocks are.
The rate of a kind is its products over the time that the multiprocessors spent in its tasks, from
the recorded time line, beside their clock and the share of the tensor cores' peak per cycle;
EXPERIMENT is what the experiment's kernels reached alone (burst). Over several GPUs:
benchmarks/moe_layer.py --stages.
"""

import argparse
import functools
from pathlib import Path

import torch

from benchmarks._gpu_timing import clocks_of
from benchmarks._spans import span_memory, traced_call
from benchmarks._timing import RESULTS, statistics_ms, write_results
from mok import _C
from mok.timeline import KindRate

# shape: T, H, I, E, K of one of two ranks
SHAPES = {
    "A": (16384, 2048, 768, 64, 8),
    "B": (8192, 4096, 1536, 64, 8),
    "C": (4096, 7168, 2048, 32, 8),
    "D": (8192, 4096, 14336, 4, 2),
}
BF16 = torch.bfloat16
GRADIENTS = 1 | 2 | 7 << 3  # x, router weights, the three matrices
PAD, MAX_SPANS = 128, 1 << 19
EXPERIMENT = {
    "dhidden": {"A": 520, "B": 640, "C": 703, "D": 666},
    "dx": {"A": 764, "B": 781, "C": 783, "D": 747},
    "wgrad": {"A": 748, "B": 743, "C": 746, "D": 796},
}


class Backward:
    """Buffers of one rank and its launches."""

    def __init__(self, shape, *, float32: bool, accumulate: bool):
        tokens, hidden, intermediate, experts, top_k = shape
        self.rows = tokens * top_k
        self.num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        ring_rows = _C.default_ring_rows(1, experts, top_k, tokens, PAD)
        settings = {
            "num_experts": experts,
            "pad": PAD,
            "hidden": hidden,
            "intermediate": intermediate,
            "shared_intermediate": 0,
            "ring_rows": ring_rows,
            "save": "gate_up",
            "direction": "backward",
            "gradients": GRADIENTS,
            "zero_idle": not accumulate,
            "num_sms": self.num_sms,
            "row_bytes": 2 * hidden,
            "tuning": {},
        }
        (self.workspace,) = _C.virtual_workspaces(
            "backward", 1, tokens, hidden, top_k, True, 1 << 20, 0, self.num_sms
        )
        self.backward = _C.DeviceBackward(self.workspace, settings, top_k, tokens)
        generator = torch.Generator("cuda").manual_seed(0)
        self.kept = {}

        def normal(name, *sizes, scale=1.0):
            tensor = torch.empty(*sizes, dtype=BF16, device="cuda")
            for part in tensor if len(sizes) == 3 else (tensor,):
                part.copy_(torch.randn(part.shape, generator=generator, device="cuda") * scale)
            self.kept[name] = tensor

        def empty(name, *sizes, dtype=BF16):
            self.kept[name] = torch.zeros(*sizes, dtype=dtype, device="cuda")

        normal("x", tokens, hidden)
        normal("dout", tokens, hidden)
        for name in ("w_gate", "w_up"):
            normal(name, experts, intermediate, hidden, scale=hidden**-0.5)
        normal("w_down", experts, hidden, intermediate, scale=intermediate**-0.5)
        for name in ("saved_gate", "saved_up"):
            normal(name, ring_rows, intermediate)
        scores_TE = torch.rand(tokens, experts, generator=generator, device="cuda")
        self.kept["topk_ids"] = scores_TE.topk(top_k, dim=1).indices.int()
        self.kept["topk_weights"] = torch.rand(tokens, top_k, generator=generator, device="cuda")
        for name in ("ring_x", "ring_dout"):
            empty(name, ring_rows, hidden)
        for name in ("ring_dgate", "ring_dup", "ring_hidden"):
            empty(name, ring_rows, intermediate)
        empty("ring_partials", ring_rows, -(-intermediate // 64), dtype=torch.float32)
        empty("home_rows", self.rows, hidden)
        empty("weight_grads", self.rows, dtype=torch.float32)
        self.spans = span_memory(MAX_SPANS)
        self.arguments = {name: tensor.data_ptr() for name, tensor in self.kept.items()}
        for name in ("w_gate", "w_up", "w_down"):
            weight = self.kept[name]
            strides = [2 * stride for stride in weight.stride()[:2]]
            self.arguments[name] = (weight.data_ptr(), *strides)
            gradient = torch.zeros_like(weight, dtype=torch.float32 if float32 else BF16)
            self.kept["d" + name] = gradient
            size = gradient.element_size()
            strides = [size * stride for stride in gradient.stride()[:2]]
            self.arguments["d" + name] = (gradient.data_ptr(), float32, *strides)
        self.arguments |= {
            "num_tokens": tokens,
            "save_rows": ring_rows,
            "accumulate": int(accumulate),
        }

    def launch(self, spans: bool = False) -> None:
        arguments = self.arguments
        if spans:
            arguments = arguments | {"task_spans": self.spans.data_ptr()}
            arguments["num_task_spans"] = MAX_SPANS
        self.backward.launch(arguments, torch.cuda.current_stream().cuda_stream)

    def rates(self, shape) -> list[KindRate]:
        """Of the five products, from one recorded launch."""
        torch.cuda.synchronize()
        self.launch(spans=True)
        torch.cuda.synchronize()
        call = traced_call("backward", dict(zip("THIEK", shape, strict=True)), self.spans)
        return [rate for rate in call.rates if rate.tflops > 0]

    def check(self) -> None:
        self.launch()
        torch.cuda.synchronize()
        self.workspace.check()
        for name in ("home_rows", "weight_grads", "dw_gate", "dw_up", "dw_down"):
            tensor = self.kept[name]
            assert torch.isfinite(tensor).all(), name
            assert tensor.any(), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--shapes", default="A,B,C,D")
    parser.add_argument("--float32", action="store_true", help="FP32 weight gradients")
    parser.add_argument("--accumulate", action="store_true", help="add to what is there")
    arguments = parser.parse_args()
    settings = {"float32": arguments.float32, "accumulate": arguments.accumulate}
    records = []
    for shape in arguments.shapes.split(","):
        tokens, hidden, intermediate, experts, top_k = SHAPES[shape]
        backward = Backward(SHAPES[shape], **settings)
        backward.check()
        rates = backward.rates(SHAPES[shape])
        for rate in rates:
            experiment = EXPERIMENT[rate.kind.split("_")[0]].get(shape, "-")
            print(
                f"{shape:9} {rate.kind:12} {rate.tflops:7.0f} TFLOP/s, {rate.mhz:.0f} MHz, "
                f"{rate.of_peak:.1%} of the peak per cycle, experiment {experiment} TFLOP/s"
            )
        flops = 12.0 * backward.rows * hidden * intermediate
        for regime, seconds in clocks_of(functools.partial(backward.launch)).items():
            times = statistics_ms(seconds)
            tflops = flops * 1e-9 / times["ms"]
            print(f"{shape:9} {regime:12} {times['ms']:8.3f} ms {tflops:7.0f} TFLOP/s", flush=True)
            records.append(
                {
                    "bench": "moe_backward",
                    "contestant": "mok",
                    "shape": shape,
                    "T": tokens,
                    "H": hidden,
                    "I": intermediate,
                    "E": experts,
                    "K": top_k,
                    "ranks": 1,
                    "dtype": "bf16",
                    "pass": "backward",
                    "regime": regime,
                    **times,
                    "tflops": round(tflops, 1),
                    "rel_error": None,
                    "settings": settings
                    | {"rates": {rate.kind: round(rate.tflops, 1) for rate in rates}}
                    | {"mhz": {rate.kind: round(rate.mhz) for rate in rates}}
                    | {"of_peak": {rate.kind: round(rate.of_peak, 4) for rate in rates}},
                }
            )
        backward.workspace.close(0)
        del backward
        torch.cuda.empty_cache()
    print(write_results("moe-backward-kernel", records, arguments.out))


if __name__ == "__main__":
    main()
