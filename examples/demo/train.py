"""Trains a small MoE transformer with mok and, beside it, the same model in plain PyTorch.

    python examples/demo/train.py                      # everything, under three minutes on 2 cores
    python examples/demo/train.py --layer mok          # one run only
    python examples/demo/train.py --layer mok --resume demo_out/checkpoint

Every rank is a process that holds a share of the experts. The full run trains with mok, resumes
mok's checkpoint in new processes, trains the plain model, compares the three and draws the curves.
It exits with an error when the runs disagree.
"""

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import mok
import torch
import torch.distributed as dist

import checkpoint
import data
import report
from launch import RankFailedError, run_ranks
from machine import bf16_is_slow, choose_device
from model import ModelConfig, Transformer, generate, initialize
from parallel import clip_gradients, mean_over_ranks, synchronize_gradients

SEED = 1234
WARMUP_STEPS = 20
RESUMED_STEPS = 20
HELD_OUT_BATCHES = 8
PROMPTS = (b"def ", b"class ", b"import ", b"    return ")
SAMPLE_BYTES = 160


@dataclass(frozen=True)
class Job:
    """One training run, as every rank gets it."""

    label: str
    model: ModelConfig
    result: Path  # JSON file that rank 0 writes
    device_type: str
    steps: int  # the length of the learning-rate schedule
    stop: int  # the step after which to stop; steps, or less for a partial run
    batch: int  # sequences of the global batch, divided over the ranks
    learning_rate: float
    initial_seed: int = SEED
    checkpoint: Path | None = None
    checkpoint_step: int = 0
    resume: Path | None = None
    evaluate: bool = True
    sample_bytes: int = 0  # of text to generate at the end


def learning_rate(job: Job, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    warmup = min(WARMUP_STEPS, job.steps // 4)
    if step < warmup:
        return job.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, job.steps - warmup)
    return job.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train_rank(rank: int, world: int, jobs: list[Job]) -> None:
    """Does one rank's share of the jobs; runs in a process of its own, inside a process group."""
    for job in jobs:
        result = train(rank, world, job)
        if rank == 0:
            job.result.write_text(json.dumps(result))


def train(rank: int, world: int, job: Job) -> dict:
    """Trains one model; returns what is worth recording."""
    device = torch.device(job.device_type, rank) if job.device_type == "cuda" else "cpu"
    model = Transformer(job.model, dist.group.WORLD if world > 1 else None).to(device)
    initialize(model, job.initial_seed, rank, world)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job.learning_rate, betas=(0.9, 0.95), fused=True
    )
    first = checkpoint.load(job.resume, model, optimizer) if job.resume else 0
    if first >= job.stop:
        raise ValueError(
            f"the checkpoint {job.resume} is at step {first} and the run ends at step {job.stop}; "
            "raise --steps."
        )
    text, held_out = data.load_text()
    tokens_per_step = job.batch * job.model.length
    rows = slice(rank * job.batch // world, (rank + 1) * job.batch // world)

    def own_windows(source: torch.Tensor, seed: int) -> torch.Tensor:
        return data.global_batch(source, job.batch, job.model.length, seed)[rows].to(device)

    losses, norms, seconds = [], [], []
    progress = report.Progress(job.label, first, job.stop, tokens_per_step)
    for step in range(first, job.stop):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job, step)
        loss = model.loss(own_windows(text, step))
        loss.backward()
        synchronize_gradients(model, world)
        norm = clip_gradients(model, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss, world))
        norms.append(float(norm))
        seconds.append(time.perf_counter() - start)
        if rank == 0:
            progress.update(step + 1, losses[-1])
        if job.checkpoint and step + 1 == job.checkpoint_step:
            checkpoint.save(job.checkpoint, model, optimizer, step + 1)

    result = {
        "losses": losses,
        "grad_norms": norms,
        "tokens_per_s": tokens_per_step / statistics.median(seconds),
    }
    if job.evaluate:
        with torch.no_grad():
            held = [model.loss(own_windows(held_out, i)) for i in range(HELD_OUT_BATCHES)]
        result["held_out"] = mean_over_ranks(torch.stack(held).mean(), world)
    if job.sample_bytes:
        prompt = PROMPTS[rank % len(PROMPTS)]
        sample = generate(model, prompt, job.sample_bytes, seed=rank)
        result["sample"] = sample.decode("utf-8", errors="replace")
    return result


def run(jobs: list[Job], world: int) -> list[dict]:
    """Runs jobs one after the other on `world` new processes; returns what rank 0 recorded."""
    for job in jobs:
        job.result.unlink(missing_ok=True)
    run_ranks(train_rank, world, jobs[0].device_type, jobs)
    return [json.loads(job.result.read_text()) for job in jobs]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="training steps (default 400)")
    parser.add_argument("--ranks", type=int, default=2, help="expert-parallel ranks (default 2)")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step over all ranks")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--layer", choices=("both", "mok", "plain"), default="both", help="what to train"
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for results")
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from (with one --layer)")
    parser.add_argument("--checkpoint-step", type=int, help="step to save at (default: half way)")
    parser.add_argument(
        "--max-loss", type=float, default=2.4, help="fail when a final 20-step mean is above this"
    )
    args = parser.parse_args()
    experts = ModelConfig.experts
    if args.ranks < 1 or experts % args.ranks or args.batch < 1 or args.batch % args.ranks:
        parser.error(f"--ranks must divide --batch ({args.batch}) and the {experts} experts")
    if args.checkpoint_step is None:
        args.checkpoint_step = max(1, args.steps // 2)
    if not 1 <= args.checkpoint_step < args.steps:
        parser.error("--steps must be 2 or more and --checkpoint-step from 1 to --steps - 1")
    if args.resume and args.layer == "both":
        parser.error("--resume needs --layer mok or --layer plain")
    if args.resume and not (args.resume / ".metadata").is_file():
        parser.error(f"--resume {args.resume} is not a checkpoint: it has no .metadata file")
    return args


def train_and_compare(args: argparse.Namespace, job: Job) -> int:
    """Runs mok, mok resumed and plain; returns the exit status."""
    start = time.perf_counter()
    (ours,) = run([job], args.ranks)
    # The resumed run has new processes and other initial weights: only the checkpoint can make it
    # agree with the first.
    resumed_job = replace(
        job,
        label="mok, resumed",
        result=args.out / "mok_resumed.json",
        initial_seed=SEED + 1,
        resume=job.checkpoint,
        checkpoint=None,
        stop=min(args.steps, args.checkpoint_step + RESUMED_STEPS),
        evaluate=False,
        sample_bytes=0,
    )
    plain_job = replace(
        job,
        label="plain PyTorch",
        model=replace(job.model, layer="plain"),
        result=args.out / "plain.json",
        checkpoint=None,
        sample_bytes=0,
    )
    resumed, plain = run([resumed_job, plain_job], args.ranks)

    picture = args.out / "loss.png"
    report.plot_losses(picture, ours["losses"], plain["losses"], args.checkpoint_step)
    problems = report.compare_resumed(ours["losses"], resumed["losses"], args.checkpoint_step)
    if not problems:
        count = len(resumed["losses"])
        print(f"Resumed at step {args.checkpoint_step}: {count} losses equal bit for bit.")
    problems += report.compare_runs(ours["losses"], plain["losses"], args.max_loss)
    print(f"\nText by the trained model:\n{ours['sample']}\n")
    for problem in problems:
        print(f"The demo failed: {problem}.", file=sys.stderr)
    final, plain_final = (report.window_means(r["losses"])[-1] for r in (ours, plain))
    print(
        f"{'FAILED' if problems else 'OK'}: final loss mok {final:.3f}, plain {plain_final:.3f}"
        f" (held out {ours['held_out']:.3f}, {plain['held_out']:.3f}); largest difference "
        f"{max(report.differences(ours['losses'], plain['losses'])):.3f}; "
        f"mok {ours['tokens_per_s']:,.0f} tokens/s, plain {plain['tokens_per_s']:,.0f}; "
        f"{time.perf_counter() - start:.0f} s; curves in {picture}"
    )
    return 1 if problems else 0


def main() -> int:
    args = parse_args()
    try:
        _ = mok.MoELayer  # what cannot be used here says so in one line
    except ImportError as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    device_type = choose_device(args.device, args.ranks)
    emulate_bf16 = device_type == "cpu" and bf16_is_slow()
    if emulate_bf16:
        print("This CPU is slow at BF16: plain PyTorch's products run in FP32 on rounded operands.")
    layer = "mok" if args.layer == "both" else args.layer
    tokens_per_rank = args.batch // args.ranks * ModelConfig.length
    args.out.mkdir(parents=True, exist_ok=True)
    job = Job(
        label="mok" if layer == "mok" else "plain PyTorch",
        model=ModelConfig(layer=layer, max_tokens=tokens_per_rank, emulate_bf16=emulate_bf16),
        result=args.out / f"{layer}.json",
        device_type=device_type,
        steps=args.steps,
        stop=args.steps,
        batch=args.batch,
        learning_rate=args.lr,
        checkpoint=args.out / "checkpoint",
        checkpoint_step=args.checkpoint_step,
        resume=args.resume,
        sample_bytes=SAMPLE_BYTES,
    )
    try:
        if not args.resume:
            # From now on an older run's checkpoint is none.
            (job.checkpoint / ".metadata").unlink(missing_ok=True)
        if args.layer == "both":
            return train_and_compare(args, job)
        (result,) = run([job], args.ranks)
    except RankFailedError as error:
        print(f"The demo failed: {error}", file=sys.stderr)
        return 1
    final = report.window_means(result["losses"])[-1]
    print(f"\n{result['sample']}\n")
    print(f"final loss {final:.3f}, held out {result['held_out']:.3f}; results in {job.result}")
    if not final < args.max_loss:  # true for NaN too
        print(
            f"The demo failed: the run ends at loss {final:.3f}; the limit is {args.max_loss}.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
