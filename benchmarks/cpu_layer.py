"""How fast is the CPU executor against the bare matrix products of the layer?

    python benchmarks/cpu_layer.py [--threads 1 2] [--repeats 7] [--write]

The bar is what nobody can beat with torch's own products: per expert `at::mm` of exactly the
layer's sizes on buffers that exist already, no routing, gathers, activation or weighted sum. mok
does the whole layer. On processors without AVX-512 BF16 torch multiplies BF16 several times slower
than FP32, so the FP32 products are shown as a second bar.
"""

import argparse

import torch

import mok
from benchmarks._timing import statistics_ms, time_interleaved, write_results
from mok.reference import moe_reference

T, H, I, E, K = 2048, 1024, 512, 16, 4
FLOPS_FORWARD = 6 * T * K * H * I


def make_layer(dtype):
    torch.manual_seed(0)
    ids_TK = torch.rand(T, E).topk(K).indices
    tensors = {
        "x_TH": torch.randn(T, H),
        "topk_weights_TK": torch.rand(T, K),
        "w_gate": torch.randn(E, I, H) / H**0.5,
        "w_up": torch.randn(E, I, H) / H**0.5,
        "w_down": torch.randn(E, H, I) / I**0.5,
    }
    for name in tensors:
        if name != "topk_weights_TK":
            tensors[name] = tensors[name].to(dtype)
        tensors[name].requires_grad_()
    return ids_TK, tensors


def mok_forward(ids_TK, tensors):
    with torch.no_grad():
        return call_moe(mok.moe, ids_TK, tensors)


def mok_forward_backward(ids_TK, tensors, grad_output):
    call_moe(mok.moe, ids_TK, tensors).backward(grad_output)
    for tensor in tensors.values():
        tensor.grad = None


def call_moe(function, ids_TK, tensors):
    x_TH, weights_TK, *weights = tensors.values()
    return function(x_TH, ids_TK, weights_TK, *weights)


def bare_products(ids_TK, dtype, backward):
    """The layer's products alone: 3 forward, 6 more backward, per expert with its own row count."""
    counts = torch.bincount(ids_TK.flatten(), minlength=E).tolist()
    w_in, w_out = torch.randn(I, H).to(dtype), torch.randn(H, I).to(dtype)
    work = []
    for rows in counts:
        x, h = torch.randn(rows, H).to(dtype), torch.randn(rows, I).to(dtype)
        into = torch.empty(rows, I, dtype=dtype), torch.empty(rows, H, dtype=dtype)
        grads = torch.empty(I, H, dtype=dtype), torch.empty(H, I, dtype=dtype)
        work.append((x, h, into, grads))

    def run():
        for x, h, (inner, outer), (grad_in, grad_out) in work:
            torch.mm(x, w_in.t(), out=inner)
            torch.mm(x, w_in.t(), out=inner)
            torch.mm(h, w_out.t(), out=outer)
            if backward:
                torch.mm(x, w_out, out=inner)
                torch.mm(h, w_in, out=outer)
                torch.mm(h, w_in, out=outer)
                torch.mm(h.t(), x, out=grad_in)
                torch.mm(h.t(), x, out=grad_in)
                torch.mm(x.t(), h, out=grad_out)

    return run


def relative_error(ids_TK, tensors):
    exact = {name: tensor.detach().double() for name, tensor in tensors.items()}
    expected = call_moe(moe_reference, ids_TK, exact)
    return float((mok_forward(ids_TK, tensors).double() - expected).norm() / expected.norm())


def measure(dtype, threads, repeats):
    torch.set_num_threads(threads)
    ids_TK, tensors = make_layer(dtype)
    grad_output = torch.randn(T, H).to(dtype)
    error = relative_error(ids_TK, tensors)
    if not error < (0.01 if dtype == torch.bfloat16 else 1e-5):
        raise SystemExit(f"the executor's output is wrong: relative error {error:.3g}")
    records = []
    for name, backward, flops in (
        ("forward", False, FLOPS_FORWARD),
        ("forward_backward", True, 3 * FLOPS_FORWARD),
    ):
        layer = (
            (lambda: mok_forward_backward(ids_TK, tensors, grad_output))
            if backward
            else (lambda: mok_forward(ids_TK, tensors))
        )
        contestants = {
            "mok": layer,
            "bare_mm": bare_products(ids_TK, dtype, backward),
            "bare_mm_fp32": bare_products(ids_TK, torch.float32, backward),
        }
        for contestant, seconds in time_interleaved(contestants, repeats).items():
            times = statistics_ms(seconds)
            records.append(
                {
                    "bench": "cpu_layer",
                    "contestant": contestant,
                    "shape": "T2048-H1024-I512-E16-K4",
                    **{"T": T, "H": H, "I": I, "E": E, "K": K, "ranks": 1},
                    "dtype": {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype],
                    "pass": name,
                    "regime": "cpu",
                    **times,
                    "tflops": round(flops / times["ms"] / 1e9, 5),
                    "rel_error": error if contestant == "mok" else None,
                    "settings": {"threads": threads, "isa": mok._C.kernels.selected()},
                }
            )
    return records


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/<date>-cpu-layer.json"
    )
    args = parser.parse_args()
    records = []
    print(
        f"{'dtype':5} {'threads':7} {'pass':17} {'contestant':13} "
        f"{'ms':>9} {'GF/s':>7} {'mok is':>7}"
    )
    for threads in args.threads:
        for dtype in args.dtypes:
            group = measure(getattr(torch, dtype), threads, args.repeats)
            ours = {r["pass"]: r["ms"] for r in group if r["contestant"] == "mok"}
            for record in group:
                ratio = record["ms"] / ours[record["pass"]]
                print(
                    f"{record['dtype']:5} {threads:7} {record['pass']:17} "
                    f"{record['contestant']:13} "
                    f"{record['ms']:9.1f} {record['tflops'] * 1e3:7.1f} {ratio:6.2f}x",
                    flush=True,
                )
            records += group
    if args.write:
        print(write_results("cpu-layer", records))


if __name__ == "__main__":
    main()
