"""`mok.simulate`: runs a layer's schedule on the host, under an adversary or against a clock.

The megakernels take their tasks, counters and pull lists from `csrc/schedule`; this runs the same
functions for all ranks of a group, without data, and checks every rule on the way. It needs no GPU.
docs/schedule.md says what is checked and why the schedule cannot deadlock.

Legend: T tokens of one rank, K experts per token, E experts in all R ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mok import _native
from mok.shapes import PAD
from mok.timeline import TimelineEntry

ROUTINGS = ("random", "zipf", "one_rank", "one_expert", "none")

ALL_GRADIENTS = {
    "x": 1 << 0,
    "weights": 1 << 1,
    "shared_weight": 1 << 2,
    "gate": 1 << 3,
    "up": 1 << 4,
    "down": 1 << 5,
    "b_gate": 1 << 6,
    "b_up": 1 << 7,
    "b_down": 1 << 8,
    "shared_gate": 1 << 9,
    "shared_up": 1 << 10,
    "shared_down": 1 << 11,
}
"""Names of the gradients a backward pass can be asked for, with their bits in the ops' mask."""


@dataclass(frozen=True)
class SimulationError:
    """One broken rule."""

    type: str
    """"deadlock", "read before written", "overwritten before last reader", "tile twice", ..."""
    message: str
    rank: int
    cta: int
    agent: str
    task: str
    counter: str
    expected: int
    seen: int
    seed: int


@dataclass(frozen=True)
class SimulationResult:
    """What a simulation found.

    `statistics`: "interleavings", "steps" and "waits" over all of them; "tasks", "pulls" (pieces of
    rows), "units" (distinct rows pulled) and "chunks", summed over ranks; of a timed run "duration"
    and "busy" (time of all tiles), in microseconds.
    """

    errors: list[SimulationError] = field(default_factory=list)
    statistics: dict[str, float] = field(default_factory=dict)
    timeline: list[TimelineEntry] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.errors


def routing_ids(
    routing: str,
    *,
    num_ranks: int,
    num_tokens: int | Sequence[int],
    num_experts: int,
    top_k: int,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Ids [T, K] of every rank: distinct experts per token where there are enough.

    "random" is uniform, "zipf" strongly skewed, "one_rank" sends all routes to rank 0's experts,
    "one_expert" to expert 0, "none" has no routes (-1).
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing = {routing!r}: must be one of {', '.join(ROUTINGS)}.")
    tokens = [num_tokens] * num_ranks if isinstance(num_tokens, int) else list(num_tokens)
    if len(tokens) != num_ranks:
        raise ValueError(
            f"num_tokens has {len(tokens)} entries: pass one number, or one for each of the "
            f"{num_ranks} ranks."
        )
    generator = torch.Generator().manual_seed(seed)
    reachable = {"one_rank": num_experts // num_ranks, "one_expert": 1}.get(routing, num_experts)
    weights_E = torch.ones(reachable)
    if routing == "zipf":
        weights_E = 1.0 / torch.arange(1, reachable + 1).float() ** 1.5
    ids = []
    for T in tokens:
        if routing == "none":
            ids.append(torch.full((T, top_k), -1))
        elif T == 0:
            ids.append(torch.zeros((0, top_k), dtype=torch.int64))
        else:
            weights_TE = weights_E.expand(T, -1)
            ids.append(torch.multinomial(weights_TE, top_k, reachable < top_k, generator=generator))
    return ids


def simulate(
    ids: Sequence[torch.Tensor] | None = None,
    *,
    routing: str = "random",
    num_ranks: int = 2,
    num_tokens: int | Sequence[int] = 256,
    num_experts: int = 8,
    top_k: int = 2,
    hidden: int = 512,
    intermediate: int = 256,
    shared_intermediate: int = 0,
    ring_rows: int | None = None,
    save: str = "gate_up",
    direction: str = "forward",
    gradients: Iterable[str] | None = None,
    accumulate: bool = False,
    seeds: int | Iterable[int] = 1,
    policy: str = "mixed",
    num_ctas: int = 4,
    resident_ctas: int | None = None,
    late_after_exit: bool = False,
    stalled_rank: int | None = None,
    pull_batch: int = 4,
    bug: str | None = None,
    costs: Mapping[str, float] | None = None,
    tuning: Mapping[str, int] | None = None,
) -> SimulationResult:
    """Runs the schedule of all ranks of a layer call and checks it.

    Args:
        ids: expert ids [T, K] per rank (T may differ); -1 and ids outside [0, E) are no routes.
            None: drawn by `routing` from `num_ranks`, `num_tokens`, `top_k` and the first seed.
        num_experts: E; a multiple of the number of ranks.
        ring_rows: rows of the ring, a multiple of 128. None: the layer's default.
        save: what forward keeps of the first chunk: "all", "gate_up" or "none".
        direction: "forward", "backward" or "recompute".
        gradients: names from `ALL_GRADIENTS` that backward makes. None: all but the biases'.
        accumulate: backward adds to weight gradients, so idle experts' are left alone.
        seeds: a number of interleavings or the seeds themselves. They stop at the first that
            breaks a rule.
        policy: what an interleaving is like: "random", "latest", "oldest", "burst", "starve_cta",
            "starve_role", "hold_stores", or "mixed": one of these by seed.
        num_ctas: CTAs per rank, which is also what the schedule takes as the size of a wave.
        resident_ctas: so many run from the start, the others arrive at any time, or with
            `late_after_exit` only when another one exits. None: all.
        stalled_rank: a rank that moves only when no other can.
        pull_batch: pieces of rows that a pull warp claims at a time.
        bug: a mistake to plant, such as "drop_wait:gate_up" or "ring_short" (docs/schedule.md).
        costs: microseconds per step; the run is then timed instead of adversarial. Keys: task kinds
            ("gate_up", "down", "dhidden", "dx", and per row block "wgrad_gate", ...), "claim",
            "store", "pull" (per piece and pull warp), "link" (per piece from another rank, all
            pull warps of a rank together), "launch" (rank r starts r times this later).
        tuning: overrides of the configuration table ("lag_waves", "group_m", "window_blocks", ...);
            "block_m" is also the pad of the plan.

    Raises ValueError naming the argument for sizes that no layer can have. A broken rule is no
    exception: it is in the result's `errors`.
    """
    native = _native.load()
    seed_list = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if not seed_list:
        raise ValueError("seeds is empty: pass a positive number or the seeds to run.")
    if ids is None:
        ids = routing_ids(
            routing,
            num_ranks=num_ranks,
            num_tokens=num_tokens,
            num_experts=num_experts,
            top_k=top_k,
            seed=seed_list[0],
        )
    arrays = [torch.as_tensor(rank_ids).to(torch.int64).numpy() for rank_ids in ids]
    if not arrays:
        raise ValueError("ids is empty: pass one [T, K] tensor per rank.")
    if any(array.ndim != 2 or array.shape[1] == 0 for array in arrays):
        raise ValueError("ids must be [T, K] with K >= 1 for every rank.")
    settings = schedule_settings(
        native,
        arrays,
        num_experts=num_experts,
        hidden=hidden,
        intermediate=intermediate,
        shared_intermediate=shared_intermediate,
        ring_rows=ring_rows,
        save=save,
        direction=direction,
        gradients=gradients,
        accumulate=accumulate,
        num_sms=num_ctas,
        tuning=tuning,
    )
    settings |= {
        "policy": policy,
        "bug": bug or "none",
        "num_ctas": num_ctas,
        "resident_ctas": num_ctas if resident_ctas is None else resident_ctas,
        "late_after_exit": late_after_exit,
        "stalled_rank": -1 if stalled_rank is None else stalled_rank,
        "pull_batch": pull_batch,
    }
    found = native.simulate(arrays, settings, seed_list, None if costs is None else dict(costs))
    return SimulationResult(
        errors=[SimulationError(**error) for error in found["errors"]],
        statistics=found["stats"],
        timeline=[TimelineEntry(*entry) for entry in found["timeline"]],
    )


def schedule_settings(
    native,
    arrays,
    *,
    num_experts: int,
    hidden: int,
    intermediate: int,
    shared_intermediate: int = 0,
    ring_rows: int | None = None,
    save: str = "gate_up",
    direction: str = "forward",
    gradients: Iterable[str] | None = None,
    accumulate: bool = False,
    num_sms: int = 132,
    tuning: Mapping[str, int] | None = None,
) -> dict:
    """What the native `schedule` and `simulate` take, with every default filled in."""
    if gradients is None:
        gradients = [name for name in ALL_GRADIENTS if not name.startswith("b_")]
    unknown = sorted(set(gradients) - set(ALL_GRADIENTS))
    if unknown:
        raise ValueError(f"gradients has {unknown[0]!r}: use {', '.join(ALL_GRADIENTS)}.")
    tuning = dict(tuning or {})
    pad = tuning.get("block_m", PAD)
    if ring_rows is None:
        ring_rows = native.default_ring_rows(
            len(arrays), num_experts, arrays[0].shape[1], max(map(len, arrays)), pad
        )
    return {
        "num_experts": num_experts,
        "pad": pad,
        "hidden": hidden,
        "intermediate": intermediate,
        "shared_intermediate": shared_intermediate,
        "ring_rows": ring_rows,
        "save": save,
        "direction": direction,
        "gradients": sum(ALL_GRADIENTS[name] for name in set(gradients)),
        "zero_idle": not accumulate,
        "num_sms": num_sms,
        "row_bytes": 2 * hidden,
        "tuning": tuning,
    }
