"""Progress line, the comparison of two training runs, and the loss-curve picture."""

import math
import sys
import time
from pathlib import Path

WINDOW = 20
MAX_DIFFERENCE = 0.06
MAX_FINAL_DIFFERENCE = 0.04


class Progress:
    """A progress bar on a terminal, one line per tenth of the run elsewhere (logs, CI)."""

    def __init__(self, label: str, first: int, last: int, tokens_per_step: int):
        self.label, self.first, self.last = label, first, last
        self.tokens_per_step = tokens_per_step
        self.start = time.perf_counter()
        self.terminal = sys.stdout.isatty()

    def update(self, step: int, loss: float) -> None:
        """Shows that `step` steps are done."""
        done = (step - self.first) / (self.last - self.first)
        tenth = max(1, (self.last - self.first) // 10)
        if not self.terminal and (step - self.first) % tenth and step < self.last:
            return
        speed = (step - self.first) * self.tokens_per_step / (time.perf_counter() - self.start)
        bar = "#" * round(24 * done)
        line = f"{self.label:>13} [{bar:<24}] step {step}/{self.last}"
        line += f"  loss {loss:.3f}  {speed:,.0f} tokens/s"
        end = "\n" if not self.terminal or step == self.last else ""
        print(("\r" if self.terminal else "") + line + "   ", end=end, flush=True)


def window_means(losses: list[float], window: int = WINDOW) -> list[float]:
    """Returns the mean of every `window` consecutive losses (of all when there are fewer)."""
    window = min(window, len(losses))
    return [sum(losses[i : i + window]) / window for i in range(len(losses) - window + 1)]


def differences(losses: list[float], others: list[float]) -> list[float]:
    """Returns the absolute differences of the two curves' window means, one per window."""
    means, other_means = window_means(losses), window_means(others)
    return [abs(a - b) for a, b in zip(means, other_means, strict=True)]


def compare_runs(losses: list[float], others: list[float], max_loss: float) -> list[str]:
    """Returns what is wrong with the two runs, one sentence per miss; empty when all is well."""
    problems = []
    for name, curve in (("mok", losses), ("plain", others)):
        bad = [step for step, loss in enumerate(curve) if not math.isfinite(loss)]
        if bad:
            problems.append(f"the {name} run's loss is {curve[bad[0]]} at step {bad[0]}")
        elif not (final := window_means(curve)[-1]) < max_loss:
            problems.append(f"the {name} run ends at loss {final:.3f}; the limit is {max_loss}")
    gaps = differences(losses, others)
    # "not <=" rather than ">": a NaN must count as a miss.
    if not all(gap <= MAX_DIFFERENCE for gap in gaps):
        at = next(i for i, gap in enumerate(gaps) if not gap <= MAX_DIFFERENCE)
        problems.append(
            f"the {WINDOW}-step means differ by {gaps[at]:.3f} from step {at} on; "
            f"the limit is {MAX_DIFFERENCE}"
        )
    if not gaps[-1] <= MAX_FINAL_DIFFERENCE:
        problems.append(
            f"the final {WINDOW}-step means differ by {gaps[-1]:.3f}; "
            f"the limit is {MAX_FINAL_DIFFERENCE}"
        )
    return problems


def compare_resumed(losses: list[float], resumed: list[float], step: int) -> list[str]:
    """Checks that a run resumed at `step` repeats the uninterrupted run's losses bit for bit."""
    if not resumed:
        return [f"the run resumed at step {step} took no step"]
    for offset, loss in enumerate(resumed):
        if loss != losses[step + offset]:
            return [
                f"the run resumed at step {step} has loss {loss!r} at step {step + offset}, "
                f"the uninterrupted run {losses[step + offset]!r}"
            ]
    return []


def plot_losses(path: Path, losses: list[float], others: list[float], resumed_at: int) -> None:
    """Writes a PNG with both loss curves as window means and, below, their difference."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    window = min(WINDOW, len(losses))
    # A window's mean is drawn at its middle, so that the curves do not look delayed.
    steps = [i + (window - 1) / 2 for i in range(len(losses) - window + 1)]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=[3, 1], layout="constrained"
    )
    top.plot(losses, color="C0", alpha=0.2, linewidth=0.8)
    top.plot(others, color="C1", alpha=0.2, linewidth=0.8)
    top.plot(steps, window_means(losses), color="C0", linewidth=2.5, label="mok")
    top.plot(steps, window_means(others), color="C1", linewidth=1.5, linestyle="--", label="plain")
    top.axvline(resumed_at, color="grey", linewidth=0.8, linestyle=":", label="checkpoint")
    top.set_ylabel("loss (nats per byte)")
    top.set_title("MoE transformer on the standard library's sources: mok and plain PyTorch")
    top.legend(title=f"means of {window} steps")
    top.grid(alpha=0.3)
    bottom.plot(steps, differences(losses, others), color="C2", linewidth=1.2)
    bottom.axhline(MAX_DIFFERENCE, color="C3", linewidth=0.8, linestyle="--", label="limit")
    bottom.set_ylim(0, None)
    bottom.set_xlabel("training step")
    bottom.set_ylabel("|difference|")
    bottom.legend(loc="upper right")
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
