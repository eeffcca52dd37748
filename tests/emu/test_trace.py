"""The time line that traced megakernels record, in the emulator's virtual time."""

import dataclasses

import numpy as np
import pytest

from mok._traced_call import num_batches, read_call
from tests.emu import _moe_backward
from tests.emu._moe_backward import BackwardData, BackwardLayer, ExpectedBackward
from tests.emu._moe_forward import SAVES, Data, Expected, Layer, assert_equal, run

FORWARD = Layer((150, 90), num_experts=4, hidden=72, intermediate=136, shared=40, num_blocks=3)
BACKWARD = BackwardLayer(
    (70, 60), num_experts=2, top_k=1, hidden=72, intermediate=136, save="none", num_blocks=3
)
ROOM = (400, 400)
UNWRITTEN = 0xFF


def describe(layer: Layer, kind: int, rank: int, tasks: int) -> dict:
    """As _C.CallTrace does."""
    return {
        "kind": kind,
        "num_tokens": layer.tokens[rank],
        "hidden": layer.hidden,
        "intermediate": layer.intermediate,
        "shared_intermediate": layer.shared,
        "num_experts": layer.num_experts,
        "top_k": layer.top_k,
        "save": SAVES.index(layer.save),
        "rank": rank,
        "num_ranks": layer.num_ranks,
        "num_ctas": layer.num_blocks,
        "num_tasks": tasks,
    }


def routes_here(layer: Layer, data: Data, rank: int) -> int:
    first = rank * layer.local_experts
    return sum(
        int(((ids >= first) & (ids < first + layer.local_experts)).sum()) for ids in data.ids
    )


def counts(entries: np.ndarray) -> tuple[int, int]:
    """Tasks and pull elements of the call, from its stamps."""
    return tuple(entries[0].view(np.int64)[5:7].tolist())


def flops_of(call, kind: str) -> float:
    return sum(entry.flops for entry in call.timeline if entry.kind == kind)


def check_time_line(call, entries: np.ndarray, after: dict[str, str]) -> None:
    """All tasks and pulls are there, once each, no CTA at two tiles at a time, and each kind of
    `after` starts a row block when all tiles of the other kind have ended there."""
    num_tasks, num_pulls = counts(entries)
    tiles = [entry for entry in call.timeline if not entry.is_communication]
    pulls = [entry for entry in call.timeline if entry.is_communication]
    assert (call.lost_tasks, call.lost_pulls) == (0, 0)
    assert len(tiles) == num_tasks
    places = [(tile.kind, tile.row_block, tile.column, tile.flops) for tile in tiles]
    if call.direction == "forward":
        assert len(set(places)) == len(places)
    assert sum(pull.column for pull in pulls) == num_pulls > 0
    assert len(pulls) == num_batches(num_pulls, call.num_ctas)
    last_end: dict[int, float] = {}
    for tile in sorted(tiles, key=lambda entry: entry.start):
        assert 0 < last_end.get(tile.cta, 1e-9) <= tile.start < tile.end
        last_end[tile.cta] = tile.end
        assert tile.cycles > 0
    for late, early in after.items():
        ends: dict[int, float] = {}
        for tile in tiles:
            if tile.kind == early:
                ends[tile.row_block] = max(ends.get(tile.row_block, 0.0), tile.end)
        starts = [tile for tile in tiles if tile.kind == late]
        assert starts
        assert ends
        assert all(tile.start > ends[tile.row_block] for tile in starts)


@pytest.mark.parametrize("seed", range(3))
def test_forward(emulator, seed):
    data = Data(FORWARD)
    expected = Expected(data)
    ranks, result = run(emulator, data, emulator.RunOptions(seed=seed), trace=ROOM)
    assert not result.trapped
    for r, rank in enumerate(ranks):
        assert_equal(f"rank {r}: home rows", rank["home_rows"], expected.home[r])
        call = read_call(describe(FORWARD, 1, r, ROOM[0]), rank["trace"])
        check_time_line(call, rank["trace"], {"down": "gate_up", "shared_down": "shared_gate_up"})
        product = 2 * FORWARD.hidden * FORWARD.intermediate * routes_here(FORWARD, data, r)
        assert flops_of(call, "gate_up") == 2 * product
        assert flops_of(call, "down") == product
        shared = 2 * FORWARD.hidden * FORWARD.shared * FORWARD.tokens[r]
        assert flops_of(call, "shared_gate_up") == 2 * shared
        assert {"kernel"} == set(call.phases)
        assert max(tile.end for tile in call.timeline) <= call.phases["kernel"]
        waited = {tile.waited_for for tile in call.timeline}
        assert waited <= {None, "x", "gate_up", "hidden_read"}
        shares = call.shares
        assert 0 < shares.gemm < 1
        parts = (shares.communication, shares.waiting, shares.tail, shares.other)
        assert sum(parts) + shares.gemm == pytest.approx(1)
        rates = {rate.kind: rate for rate in call.rates}
        # An emulated cycle is an emulated nanosecond.
        assert rates["gate_up"].mhz == pytest.approx(1000, rel=0.5)
        assert rates["gate_up"].padding > 0
        assert "gate_up" in str(call)


def test_a_full_memory_says_what_it_lost(emulator):
    data = Data(FORWARD)
    room = (3, 2)
    ranks, _ = run(emulator, data, emulator.RunOptions(seed=1), trace=room)
    for r, rank in enumerate(ranks):
        num_tasks, num_pulls = counts(rank["trace"])
        call = read_call(describe(FORWARD, 1, r, room[0]), rank["trace"])
        assert len([tile for tile in call.timeline if not tile.is_communication]) == 3
        assert len([tile for tile in call.timeline if tile.is_communication]) == 2
        assert call.lost_tasks == num_tasks - 3
        assert call.lost_pulls == num_batches(num_pulls, FORWARD.num_blocks) - 2
        assert f"LOST: {call.lost_tasks} tasks" in str(call)


def test_a_workspace_that_has_ended_records_nothing(emulator):
    data = Data(FORWARD)
    ranks, _ = run(emulator, data, emulator.RunOptions(seed=1), has_ended=1, trace=ROOM)
    for r, rank in enumerate(ranks):
        assert (rank["trace"][1:] == UNWRITTEN).all()
        call = read_call(describe(FORWARD, 1, r, ROOM[0]), rank["trace"])
        assert (call.timeline, call.lost_tasks, call.shares) == ([], 0, None)
        assert "no task was recorded" in str(call)


@pytest.mark.parametrize("save", ["none", "gate_up"])
def test_backward(emulator, save):
    layer = dataclasses.replace(BACKWARD, save=save)
    data = BackwardData(layer)
    expected = ExpectedBackward(data)
    ranks = [_moe_backward.make_rank(expected, r) for r in range(layer.num_ranks)]
    for rank in ranks:
        rank["trace"] = np.full((1 + sum(ROOM), 64), UNWRITTEN, np.uint8)
        rank["trace_tasks"] = ROOM[0]
    options = emulator.RunOptions(seed=2)
    result = emulator.moe_backward(_moe_backward.backward_numbers(layer), ranks, options)
    assert not result.trapped
    for r, rank in enumerate(ranks):
        assert_equal(f"rank {r}: dx rows", rank["home_rows"], expected.home[r])
        call = read_call(describe(layer, 2, r, ROOM[0]), rank["trace"])
        assert call.direction == "backward"
        check_time_line(call, rank["trace"], {"dx": "dhidden"})
        product = 2 * layer.hidden * layer.intermediate * routes_here(layer, data, r)
        assert flops_of(call, "gate_up") == (2 * product if save == "none" else 0)
        assert flops_of(call, "dhidden") == product
        assert flops_of(call, "dx") == 2 * product
        for name in ("wgrad_gate", "wgrad_up", "wgrad_down"):
            # Rows are summed over in steps of 64.
            assert product <= flops_of(call, name) < product * 2
