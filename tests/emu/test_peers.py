"""Barriers between ranks, and how a workspace ends, under seeded schedules."""

import numpy as np
import pytest

NEVER = 10**12  # nanoseconds of virtual time
SOON = 10**6
INPUTS, OUTPUTS = 1, 2
KERNEL = "mok's peer barrier"
TIMED_OUT, ABORTED = 1, 2  # FatalKind


def steps(count: int):
    """Each step: write its number to all, meet, read everyone's, meet."""
    operations = []
    for step in range(1, count + 1):
        operations += [("push", step), ("barrier", INPUTS), ("pull", 0), ("barrier", OUTPUTS)]
    return operations


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_steps_in_stream_order(emulator, num_ranks):
    for seed in range(50):
        options = emulator.RunOptions(seed=seed)
        outcomes, result = emulator.run_peers([steps(3)] * num_ranks, NEVER, options)
        for outcome in outcomes:
            expected = np.repeat(np.arange(1, 4)[:, None], num_ranks, axis=1)
            np.testing.assert_array_equal(outcome["seen"], expected)
            assert outcome["complete"] == 0
        assert result.warnings == []
        assert result.trapped == []


@pytest.mark.parametrize("policy", ["random", "run_until_blocked", "starved_warps", "late_rank"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rounds_inside_one_kernel(emulator, num_ranks, policy):
    for seed in range(13):
        options = emulator.RunOptions(seed=seed, policy=policy)
        outcomes, result = emulator.run_peers([[("rounds", 4)]] * num_ranks, NEVER, options)
        assert [(each["wrong"], each["passed"]) for each in outcomes] == [(0, 4)] * num_ranks
        assert result.trapped == []


def test_a_rank_that_does_not_come_is_named(emulator):
    streams = [[("barrier", INPUTS), ("barrier", OUTPUTS)]] * 3
    streams[1] = [("barrier", INPUTS)]
    for seed in range(20):
        options = emulator.RunOptions(seed=seed, time_outs=True)
        outcomes, result = emulator.run_peers(streams, SOON, options)
        assert KERNEL in result.trapped
        late = [each for rank, each in enumerate(outcomes) if rank != 1 and each["complete"]]
        assert late
        for each in late:
            assert (each["phase"], each["epoch"]) == (OUTPUTS, 2)
            own_time = each["told"] == 0
            assert each["epochs"][1] == 1 if own_time else each["told"] == TIMED_OUT
            assert each["wait_complete"] == 0 or each["wait_peer"] == 1


def test_without_time_outs_that_is_a_deadlock(emulator):
    streams = [[("barrier", INPUTS), ("barrier", OUTPUTS)], [("barrier", INPUTS)]]
    with pytest.raises(emulator.EmulatorError, match="deadlock") as caught:
        emulator.run_peers(streams, SOON, emulator.RunOptions())
    assert "peer_barrier.cuh" in str(caught.value)
    assert "of rank 0: 2 expected, 1 seen" in str(caught.value)


def test_a_rank_that_ends_tells_the_others(emulator):
    """Nothing traps and no time passes; barriers before the end still count."""
    streams = [[("barrier", INPUTS), ("barrier", OUTPUTS), ("barrier", INPUTS)]] * 3
    streams[2] = [("barrier", INPUTS), ("end", 0)]
    for seed in range(50):
        outcomes, result = emulator.run_peers(streams, NEVER, emulator.RunOptions(seed=seed))
        assert result.trapped == []
        for outcome in outcomes[:2]:
            assert (outcome["complete"], outcome["by"], outcome["told"]) == (1, 2, ABORTED)
            assert (outcome["phase"], outcome["epoch"]) == (OUTPUTS, 2)
            assert outcome["reason"] == emulator.END_REASON
        assert outcomes[2]["complete"] == 0


def test_an_unknown_operation_is_refused(emulator):
    with pytest.raises(ValueError, match="operation is 'jump'"):
        emulator.run_peers([[("jump", 0)]], NEVER, emulator.RunOptions())
