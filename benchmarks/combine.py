"""How close to the memory's bandwidth is the combine epilogue (and the same sum for dx)?

    python benchmarks/combine.py [--out FOLDER]

Bytes are those the sum has to move: every row, id and weight once, the result once. Beside it: a
plain device copy of as many bytes, and torch's batched product with weights rounded to BF16 (less
exact than the contract, and blind to -1 routes).
"""

import argparse
from pathlib import Path

import torch

import mok
from benchmarks._gpu_timing import both_clocks
from benchmarks._timing import RESULTS, statistics_ms, write_results

TARGET_GB_PER_S = 3700  # of shape A on an H200, whose memory's peak is 4800

# name: T, K, H, shared expert, weights
CASES = {
    "A": (16384, 8, 2048, False, True),
    "A dx": (16384, 8, 2048, False, False),
    "A shared": (16384, 8, 2048, True, True),
    "B": (16384, 8, 4096, False, True),
    "H=7168": (8192, 8, 7168, False, True),
    "gpt-oss": (16384, 4, 2880, False, True),
    "K=10": (16384, 10, 2048, False, True),
    "T=4096": (4096, 8, 2048, False, True),
    "T=256": (256, 8, 2048, False, True),
}


def make_case(tokens, top_k, hidden, shared, weighted):
    """Arguments of the op, its output last."""
    rows = torch.randn(tokens * top_k, hidden, device="cuda", dtype=torch.bfloat16)
    shared_rows = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    ids_TK = torch.randint(0, 128, (tokens, top_k), device="cuda", dtype=torch.int32)
    weights_TK = torch.rand(tokens, top_k, device="cuda")
    out_TH = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    return (
        rows,
        shared_rows if shared else None,
        torch.rand(tokens, device="cuda") if shared else None,
        ids_TK,
        weights_TK if weighted else None,
        out_TH,
    )


def exact_sum(case, count):
    """The first `count` tokens in FP64."""
    rows, shared_rows, shared_weight, ids_TK, weights_TK, _ = case
    top_k = ids_TK.shape[1]
    rows_TKH = rows[: count * top_k].view(count, top_k, -1).double()
    if weights_TK is not None:
        rows_TKH = rows_TKH * weights_TK[:count, :, None].double()
    exact = rows_TKH.sum(1)
    if shared_rows is not None:
        exact += shared_rows[:count].double() * shared_weight[:count, None].double()
    return exact


def relative_error(case):
    count = min(512, case[-1].shape[0])
    exact = exact_sum(case, count)
    return ((case[-1][:count].double() - exact).norm() / exact.norm()).item()


def contestants(case):
    rows, shared_rows, _, ids_TK, weights_TK, out_TH = case
    tokens, top_k = ids_TK.shape
    moved = sum(tensor.numel() * tensor.element_size() for tensor in case if tensor is not None)
    source = torch.empty(moved // 2, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    calls = {
        "mok": lambda: torch.ops.mok._weighted_sum_out(*case),
        "copy": lambda: target.copy_(source),
    }
    if weights_TK is not None and shared_rows is None:
        weights = weights_TK.bfloat16()[:, None]
        rows_TKH, out = rows.view(tokens, top_k, -1), out_TH[:, None]
        calls["torch_bmm"] = lambda: torch.bmm(weights, rows_TKH, out=out)
    return calls, moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    arguments = parser.parse_args()
    assert mok._C is not None
    records = []
    print(f"{'case':10} {'contestant':10} {'regime':10} {'ms':>8} {'GB/s':>7} {'error':>9}")
    for name, (tokens, top_k, hidden, shared, weighted) in CASES.items():
        case = make_case(tokens, top_k, hidden, shared, weighted)
        calls, moved = contestants(case)
        for contestant, call in calls.items():
            call()
            error = None if contestant == "copy" else relative_error(case)
            assert error is None or error < 2**-7, f"{contestant} is wrong: {error}"
            for regime, seconds in both_clocks(call).items():
                times = statistics_ms(seconds)
                rate = moved / times["ms"] * 1e-6
                shown = "-" if error is None else f"{error:.1e}"
                line = f"{name:10} {contestant:10} {regime:10} {times['ms']:8.4f} {rate:7.0f}"
                print(f"{line} {shown:>9}")
                records.append(
                    {
                        "bench": "combine",
                        "contestant": contestant,
                        "shape": name,
                        "T": tokens,
                        "H": hidden,
                        "I": None,
                        "E": None,
                        "K": top_k,
                        "ranks": 1,
                        "dtype": "bf16",
                        "pass": "forward" if weighted else "backward",
                        "regime": regime,
                        **times,
                        "tflops": None,
                        "rel_error": error,
                        "gb_per_s": round(rate),
                        "settings": {"shared": shared, "weights": weighted},
                    }
                )
    best = max(r["gb_per_s"] for r in records if (r["shape"], r["contestant"]) == ("A", "mok"))
    verdict = "reached" if best >= TARGET_GB_PER_S else "MISSED"
    print(f"shape A: {best} GB/s, target {TARGET_GB_PER_S}: {verdict}")
    print(write_results("combine", records, arguments.out))


if __name__ == "__main__":
    main()
