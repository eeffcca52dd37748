"""Wrappers of csrc/ptx between blocks: flags of both scopes, counters, the grid barrier."""

import numpy as np

from tests.ptx_cases._runner import Case, Runner, filled

# csrc/kernels/ptx_test_grid.cuh
FLAG_MODES = (
    "st_release_gpu",
    "red_release_gpu_add",
    "st_release_sys",
    "red_release_sys_add",
    "st_release_sys 64 bits",
    "red_release_sys_add 64 bits",
    "fence_acq_rel_gpu, st_relaxed_gpu",
    "fence_acq_rel_sys, st_relaxed_sys",
    "atom_acq_rel_gpu_add",
)


def check_a_flag_publishes_what_was_written_before(runner: Runner, mode: str) -> None:
    rounds = 300 if runner.is_device else 25
    out, area = filled(rounds, 64), np.zeros(128, np.uint32)
    runner.run("flag", [], [rounds, FLAG_MODES.index(mode)], [out, area])
    expected = np.arange(1, rounds + 1)[:, None] * 1000 + np.arange(64)
    np.testing.assert_array_equal(out, expected)


def check_tickets_are_given_out_once(runner: Runner) -> None:
    blocks = 500 if runner.is_device else 6
    threads = 256 * blocks
    out, counters = filled(threads), np.zeros(6, np.uint32)
    runner.run("ticket", [], [blocks], [out, counters])
    np.testing.assert_array_equal(np.sort(out), np.arange(1, threads + 1))
    total = threads * (threads - 1) // 2
    assert counters[0] == threads
    assert counters[2] == total % 2**32
    assert counters[4:].view(np.uint64)[0] == total << 20


def check_all_blocks_meet_at_the_grid_barrier(runner: Runner) -> None:
    """One word serves launches of any number of blocks, one after another."""
    most = runner.multiprocessors
    area = np.zeros(32 + most, np.uint32)
    rounds = 20 if runner.is_device else 4
    for blocks in (most, 1, min(7, most - 1), most, 2):
        out = filled(rounds, blocks)
        runner.run("grid_barrier", [], [rounds, blocks], [out, area])
        each = np.arange(1, rounds + 1) * (blocks * (blocks + 1) // 2)
        np.testing.assert_array_equal(out, np.repeat(each[:, None], blocks, axis=1))
        assert area[0] % 2**31 == 0


CASES = (
    *(
        Case(f"flags, {mode}", check_a_flag_publishes_what_was_written_before, (mode,))
        for mode in FLAG_MODES
    ),
    Case("tickets", check_tickets_are_given_out_once),
    Case("grid barrier", check_all_blocks_meet_at_the_grid_barrier),
)
