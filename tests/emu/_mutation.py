"""Leaves out each synchronising call of a kernel in turn.

A call is noticed if a run of some seed ends with a report, with wrong results (an AssertionError of
the case) or with a warning. Of flags and atomic operations only the order is left out, the access
stays. A call that nobody notices is redundant, or the checker or the case is too weak: a test lists
those with the reason.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 4


@dataclasses.dataclass(frozen=True)
class Site:
    """A call by its source line, which says the same when lines are added before it."""

    wrapper: str
    file: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.wrapper} in `{self.text}`"


def site_of(call) -> Site:
    text = (ROOT / call.file).read_text().splitlines()[call.line - 1].strip()
    return Site(call.wrapper, call.file, text)


def unnoticed(emulator: ModuleType, run: Callable, seeds: int = SEEDS) -> tuple[list[Site], int]:
    """The calls that no run notices, and how many there are in all.

    `run(options)` runs the case once and compares its results.
    """
    run(emulator.RunOptions(seed=0, collect_sites=True))
    clean = emulator.last_result()
    assert clean.warnings == [], "the case itself warns"
    limit = 100 * clean.stats.steps + 1_000_000
    missed = []
    for call in clean.sites:
        left_out = (call.wrapper, call.file, call.line)
        if not any(is_noticed(emulator, run, left_out, seed, limit) for seed in range(seeds)):
            missed.append(site_of(call))
    return missed, len(clean.sites)


def is_noticed(emulator, run, left_out, seed: int, limit: int) -> bool:
    options = emulator.RunOptions(seed=seed, left_out=left_out, max_steps=limit)
    try:
        run(options)
    except (emulator.EmulatorError, AssertionError):
        return True
    return bool(emulator.last_result().warnings)
