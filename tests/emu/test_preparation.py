"""The preparation of a call in the emulator: its source gives the host's plan, table and pull
units, under seeded schedules, for one, two and three ranks."""

import numpy as np
import pytest

from tests.preparation_cases import FIXED, Case, compare, random_case


def check(emulator, case: Case, seed: int, calls: int = 1, policy: str = "by_seed") -> None:
    ids = case.ids()
    draw = np.random.default_rng([seed, 17])
    x = [draw.integers(-9999, 9999, (count, case.hidden), dtype=np.int16) for count in case.tokens]
    # Few threads, in blocks of several shapes; one block makes the table itself, and those with
    # many warps may take a call as a small one, which publishes as well if x need not be copied.
    blocks, warps = [(1, 4), (2, 3), (3, 16), (4, 1), (1, 16), (8, 2)][seed % 6]
    emulator.set_num_multiprocessors(8)
    results = emulator.prepare(
        case.settings(),
        case.max_tokens,
        ids,
        x,
        calls,
        blocks,
        warps,
        emulator.RunOptions(seed=seed, policy=policy),
        x_in_heap=seed % 4 > 1,
    )
    for rank, result in enumerate(results):
        compare(result, case.expected(ids, rank), f"rank {rank} of {case}")
        for source, rows in enumerate(result["inputs"]):
            np.testing.assert_array_equal(rows, x[source], err_msg=f"x of rank {source}")


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_against_the_host(emulator, name, seed):
    check(emulator, FIXED[name], seed)


@pytest.mark.parametrize("seed", range(24))
def test_random_calls(emulator, seed):
    check(emulator, random_case(1000 + seed), seed)


@pytest.mark.parametrize("name", ["three ragged ranks", "duplicates and -1"])
@pytest.mark.parametrize("seed", range(8))
def test_calls_one_after_the_other(emulator, name, seed):
    check(emulator, FIXED[name], seed, calls=3)


@pytest.mark.parametrize("policy", ["random", "run_until_blocked", "starved_warps", "late_rank"])
@pytest.mark.parametrize("name", ["two ranks", "duplicates, cut", "forward saves x"])
@pytest.mark.parametrize("seed", [2, 4])
def test_under_every_policy(emulator, name, policy, seed):
    check(emulator, FIXED[name], seed, policy=policy)


@pytest.mark.parametrize(("blocks", "warps"), [(4, 2), (1, 4), (3, 16)])
def test_kernels_of_an_ended_workspace_leave(emulator, blocks, warps):
    """One rank alone here: a peer would wait for a rank that has ended without telling it."""
    case = Case((40,), 4, 8)
    x = [np.zeros((40, case.hidden), np.int16)]
    emulator.set_num_multiprocessors(8)
    for seed in range(8):
        options = emulator.RunOptions(seed=seed)
        arguments = (case.settings(), case.max_tokens, case.ids(), x, 2, blocks, warps)
        emulator.prepare(*arguments, options, ended_rank=0)
        result = emulator.last_result()
        assert result.trapped == []
        assert result.warnings == []


@pytest.mark.parametrize(("blocks", "warps"), [(4, 2), (1, 4), (3, 16), (1, 16)])
@pytest.mark.parametrize("x_in_heap", [False, True])
def test_an_ended_rank_leaves_alone_what_it_has_published(emulator, blocks, warps, x_in_heap):
    """A peer that is late may still read the call before, whose ids it has counted already. This
    one waits in vain: it has not been told."""
    case = Case((40, 30), 4, 8)
    x = [np.ones((count, case.hidden), np.int16) for count in case.tokens]
    emulator.set_num_multiprocessors(8)
    for seed in range(8):
        options = emulator.RunOptions(seed=seed, time_outs=True)
        arguments = (case.settings(), case.max_tokens, case.ids(), x, 1, blocks, warps)
        [left] = emulator.prepare(*arguments, options, x_in_heap=x_in_heap, ended_rank=1)
        assert emulator.last_result().trapped
        assert not left["header"].any()
        assert (left["ids"] == -1).all()
        assert (left["x"] == (1 if x_in_heap else -1)).all()


def test_a_block_whose_time_is_up_waits_for_its_record(emulator):
    """The blocks of a small call that wait for the one that meets the peers, of whom one has ended
    without a word."""
    case = Case((20, 15), 4, 8, save="all")
    x = [np.ones((count, case.hidden), np.int16) for count in case.tokens]
    emulator.set_num_multiprocessors(8)
    trapped = []
    for seed in range(20):
        options = emulator.RunOptions(seed=seed, time_outs=True)
        arguments = (case.settings(), case.max_tokens, case.ids(), x, 1, 3, 4, options)
        emulator.prepare(*arguments, x_in_heap=True, ended_rank=1)
        trapped += emulator.last_result().trapped
    assert "mok's preparation kernel" in trapped
