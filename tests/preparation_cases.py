"""Calls whose preparation is compared with the host's, on a GPU and in the emulator."""

from dataclasses import dataclass, field

import numpy as np

import mok
from mok.simulation import schedule_settings
from tests.gpu._routing import ROUTINGS, make_ids

DIRECTIONS = (
    ("forward", "none"),
    ("forward", "gate_up"),
    ("forward", "all"),
    ("recompute", "gate_up"),
    ("recompute", "all"),
    ("backward", "none"),
    ("backward", "gate_up"),
    ("backward", "all"),
)


@dataclass(frozen=True)
class Case:
    """Sizes of a call, equal on all ranks but for their tokens."""

    tokens: tuple[int, ...]  # T of each rank
    top_k: int
    num_experts: int
    routing: str = "random"
    direction: str = "forward"
    save: str = "gate_up"
    ring_rows: int | None = None
    shared_intermediate: int = 0
    hidden: int = 64
    intermediate: int = 128
    gradients: tuple[str, ...] | None = None
    num_sms: int = 8
    tuning: dict = field(default_factory=dict)
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def max_tokens(self) -> int:
        return max(self.tokens)

    def ids(self) -> list[np.ndarray]:
        """[T, K] int64 of each rank, with ids that are no route where the routing has them."""
        return [
            make_ids(self.routing, count, self.top_k, self.num_experts, seed=[rank, self.seed])
            for rank, count in enumerate(self.tokens)
        ]

    def settings(self) -> dict:
        return schedule_settings(
            mok._C,
            [np.empty((count, self.top_k), np.int64) for count in self.tokens],
            num_experts=self.num_experts,
            hidden=self.hidden,
            intermediate=self.intermediate,
            shared_intermediate=self.shared_intermediate,
            ring_rows=self.ring_rows,
            save=self.save,
            direction=self.direction,
            gradients=self.gradients,
            num_sms=self.num_sms,
            tuning=self.tuning,
        )

    def expected(self, ids: list[np.ndarray], rank: int) -> dict:
        """What the host makes of it, and what of the result follows from the ids alone."""
        arrays = mok._C.prepared_by_host(ids, rank, self.settings())
        own = ids[rank]
        valid = (own >= 0) & (own < self.num_experts)
        arrays["ids"] = np.where(valid, own, -1).astype(np.int32).ravel()
        return arrays


def compare(actual: dict, expected: dict, note: str) -> None:
    """Every array bit for bit, the counters and claims zero."""
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=f"{name}, {note}")
    assert not actual["counters"].any(), f"counters, {note}"
    assert not actual["claims"].any(), f"claims, {note}"


# A ring of one or two row blocks cuts segments; short windows and pieces make many groups.
CUTTING = {"ring_rows": 256, "tuning": {"window_blocks": 1, "group_waves": 1}}

FIXED = {
    "one rank": Case((200,), 8, 16),
    "two ranks": Case((150, 170), 4, 8, "zipf"),
    "three ragged ranks": Case((90, 0, 130), 6, 12),
    "nobody has tokens": Case((0, 0), 2, 4),
    "one token": Case((0, 1), 1, 2),
    "all to one expert": Case((120, 80), 4, 8, "one"),
    "no routes": Case((60, 60), 4, 8, "none"),
    "duplicates and -1": Case((110, 70, 40), 5, 6, "mixed"),
    "cut segments": Case((160, 160), 4, 4, "zipf", **CUTTING),
    "all to one expert, cut": Case((130, 90), 6, 8, "one", **CUTTING),
    "duplicates, cut": Case((140, 60, 100), 8, 6, "mixed", **CUTTING),
    "whole warps of one token": Case((40, 33), 32, 64, "mixed"),
    "a round with idle lanes": Case((75, 64), 10, 20),
    "more experts than rows": Case((6,), 2, 300),
    "wide rows": Case((50, 60), 4, 8, hidden=4096, intermediate=1536),
    "shared expert": Case((130, 20), 2, 4, shared_intermediate=64),
    "forward saves x": Case((100, 130), 4, 8, save="all"),
    "forward saves x, cut": Case((160, 100), 6, 4, "zipf", save="all", **CUTTING),
    "recompute, cut": Case((160, 160), 4, 4, direction="recompute", **CUTTING),
    "backward": Case((100, 130), 4, 8, direction="backward"),
    "backward, x saved": Case((100, 130), 4, 8, "zipf", direction="backward", save="all"),
    "backward, cut": Case((130, 130), 6, 4, "mixed", direction="backward", save="none", **CUTTING),
    "backward without wgrad": Case((90, 90), 4, 8, direction="backward", gradients=("x",)),
    "backward of nothing": Case((90, 90), 4, 8, direction="backward", gradients=()),
}


def random_case(seed: int) -> Case:
    """A small call of any kind."""
    draw = np.random.default_rng([seed, 4])

    def integer(low, high):
        return int(draw.integers(low, high + 1))

    num_ranks = integer(1, 3)
    direction, save = DIRECTIONS[integer(0, len(DIRECTIONS) - 1)]
    most = integer(0, 3) if integer(0, 4) == 0 else integer(20, 220)
    gradients = None
    if integer(0, 2) == 0:
        names = ("x", "weights", "gate", "up", "down", "b_gate", "b_down", "shared_gate")
        gradients = tuple(name for name in names if integer(0, 1))
    return Case(
        tuple(0 if integer(0, 5) == 0 else integer(0, most) for _ in range(num_ranks)),
        integer(1, 10) if integer(0, 7) else integer(11, 32),
        num_ranks * integer(1, 12),
        ROUTINGS[integer(0, len(ROUTINGS) - 1)],
        direction,
        save,
        128 * integer(1, 4) if integer(0, 1) else None,
        64 * integer(0, 1),
        8 * integer(1, 40),
        8 * integer(1, 60),
        gradients,
        integer(1, 8),
        {"window_blocks": integer(1, 10), "group_waves": integer(1, 3), "group_m": integer(1, 4)},
        seed,
    )
