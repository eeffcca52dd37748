"""Does a layer's peak memory depend on where the router sends the tokens?

    python benchmarks/cpu_memory.py [--ranks 2] [--write]

Each routing (balanced, zipf, all to one rank) runs forward and backward twice in fresh processes.
Printed per rank: the process's peak resident memory beyond what it was before the layer, and what
the workspace holds in windows and scratch. The ring bounds both, whatever the routing.
"""

import argparse
import multiprocessing
import resource
import tempfile

import torch
import torch.distributed as dist

from benchmarks._timing import write_results

T, H, I, E, K = 4096, 512, 256, 16, 4
ROUTINGS = ("balanced", "zipf", "all_to_one_rank")


def route(routing, ranks, generator):
    if routing == "balanced":
        return (torch.arange(T * K).view(T, K) * 7) % E
    if routing == "zipf":
        popularity = 1.0 / torch.arange(1, E + 1)
        return torch.multinomial(popularity.expand(T, E), K, generator=generator)
    return torch.rand(T, E // ranks, generator=generator).topk(K).indices


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run_rank(rank, ranks, routing, init, results):
    import mok
    from mok import workspace

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"file://{init}")
    generator = torch.Generator().manual_seed(rank)
    layer = mok.MoELayer(
        H, I, E, K, group=dist.group.WORLD, max_tokens=T, router=None, dtype=torch.bfloat16
    )
    x_TH = torch.randn(T, H, generator=generator).bfloat16().requires_grad_()
    weights_TK = torch.rand(T, K, generator=generator)
    ids_TK = route(routing, ranks, generator)
    dist.barrier()
    before = peak_bytes()
    for _ in range(2):
        out = layer(x_TH, topk_ids=ids_TK, topk_weights=weights_TK)
        out.backward(torch.ones_like(out))
        layer.zero_grad()
        x_TH.grad = None
    counts = torch.bincount(ids_TK.flatten() // (E // ranks), minlength=ranks)
    dist.all_reduce(counts)
    held = [open_workspace.memory_bytes for open_workspace in workspace.all_open()]
    results.put((rank, peak_bytes() - before, sum(held), int(counts[rank])))
    dist.barrier()
    dist.destroy_process_group()


def measure(routing, ranks):
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=run_rank, args=(r, ranks, routing, f"{folder}/init", results))
            for r in range(ranks)
        ]
        for process in processes:
            process.start()
        rows = sorted(results.get() for _ in processes)
        for process in processes:
            process.join()
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    records = []
    print(f"{'routing':16} {'rank':4} {'routes here':>11} {'peak MiB':>9} {'workspace MiB':>13}")
    for routing in ROUTINGS:
        for rank, peak, held, routes in measure(routing, args.ranks):
            print(
                f"{routing:16} {rank:4} {routes:11} {peak / 2**20:9.1f} {held / 2**20:13.1f}",
                flush=True,
            )
            records.append(
                {
                    "bench": "cpu_memory",
                    "contestant": "mok",
                    "shape": f"T{T}-H{H}-I{I}-E{E}-K{K}",
                    **{"T": T, "H": H, "I": I, "E": E, "K": K, "ranks": args.ranks},
                    "dtype": "bf16",
                    "pass": "forward_backward",
                    "regime": "cpu",
                    "settings": {"routing": routing, "rank": rank, "routes": routes},
                    "peak_mib": round(peak / 2**20, 1),
                    "workspace_mib": round(held / 2**20, 1),
                }
            )
    if args.write:
        print(write_results("cpu-memory", records))


if __name__ == "__main__":
    main()
