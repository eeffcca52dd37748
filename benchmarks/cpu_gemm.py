"""How fast is mok's CPU GEMM on one thread, against torch.mm of the same product?

    python benchmarks/cpu_gemm.py [--shapes 512x1024x512 ...] [--isa avx2 ...] [--repeats 30]

Shapes are M x K x N: M rows, contraction K, N columns. "product" multiplies an already packed B,
"call" packs B as well (what mok pays per expert and call), "call_mn" has both operands contiguous
along M and N, as in a weight gradient. The clock is the thread's CPU time: what else the machine
does takes cache and frequency, not time slices. The table has the median, p10 and p90.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from collections.abc import Callable

import numpy as np
import torch
from mok._C import kernels

from benchmarks._timing import statistics_ms, time_interleaved, write_results

SHAPES_MKN = ("512x1024x512", "512x512x1024", "128x1024x512", "1024x512x1024")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def as_numpy(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


class Problem:
    """C = A B^T of one shape and dtype."""

    def __init__(self, m: int, k: int, n: int, dtype: str) -> None:
        self.dtype = dtype
        self.a_MK = torch.randn(m, k).to(DTYPES[dtype])
        self.b_NK = torch.randn(n, k).to(DTYPES[dtype])
        self.c_MN = np.empty((m, n), np.float32)

    def contestants(self, isas: list[str]) -> dict[str, Callable[[], object]]:
        a, b, c_MN = as_numpy(self.a_MK), as_numpy(self.b_NK), self.c_MN
        a_mn, b_mn = np.asfortranarray(a), np.asfortranarray(b)
        calls = {"torch.mm": lambda: torch.mm(self.a_MK, self.b_NK.T)}
        for isa in isas:
            packed = kernels.pack_b(isa, self.dtype, b)
            head = (isa, self.dtype)
            calls |= {
                f"{isa}.product": lambda h=head, p=packed: kernels.gemm_packed(*h, a, p, c_MN),
                f"{isa}.call": lambda h=head: kernels.gemm(*h, a, b, c_MN),
                f"{isa}.call_mn": lambda h=head: kernels.gemm(*h, a_mn, b_mn, c_MN),
            }
        return calls

    def relative_error(self) -> float:
        """Of what the last of our contestants left in C."""
        exact = self.a_MK.double() @ self.b_NK.double().T
        return float((torch.from_numpy(self.c_MN) - exact).norm() / exact.norm())


def measure(shape: str, dtype: str, isas: list[str], repeats: int) -> list[dict]:
    m, k, n = map(int, shape.split("x"))
    problem = Problem(m, k, n, dtype)
    calls = problem.contestants(isas)
    for name, call in calls.items():
        problem.c_MN.fill(np.nan)
        call()
        if name != "torch.mm" and not problem.relative_error() < 1e-5:
            raise SystemExit(f"{name} is wrong: relative error {problem.relative_error():.3g}")
    records = []
    for name, seconds in time_interleaved(calls, repeats, clock=time.thread_time).items():
        times = statistics_ms(seconds)
        records.append(
            {
                "bench": "cpu_gemm",
                "contestant": name,
                "shape": shape,
                "dtype": dtype,
                "regime": "cpu",
                **times,
                "tflops": round(2e-9 * m * k * n / times["ms"], 5),
                "settings": {"threads": 1, "clock": "thread_time"},
            }
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES_MKN, metavar="MxKxN")
    parser.add_argument("--repeats", type=int, default=30)
    usable = [name for name in kernels.available() if name != "emulated"]
    parser.add_argument("--isa", nargs="+", default=usable, choices=usable)
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/<date>-cpu-gemm.json"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    records = []
    print(
        f"{'MxKxN':14} {'dtype':5} {'contestant':17} {'ms':>8} {'p10':>8} "
        f"{'p90':>8} {'GF/s':>7}  /mm"
    )
    for shape in args.shapes:
        for dtype in DTYPES:
            group = measure(shape, dtype, args.isa, args.repeats)
            for record in group:
                print(
                    f"{shape:14} {dtype:5} {record['contestant']:17} {record['ms']:8.3f} "
                    f"{record['p10']:8.3f} {record['p90']:8.3f} {record['tflops'] * 1e3:7.1f} "
                    f"{group[0]['ms'] / record['ms']:4.2f}",
                    flush=True,
                )
            records += group
    if args.write:
        print(write_results("cpu-gemm", records))


if __name__ == "__main__":
    main()
