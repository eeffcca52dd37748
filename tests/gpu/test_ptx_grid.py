"""Wrappers of csrc/ptx between blocks: flags of both scopes, counters, the grid barrier."""

import numpy as np
import pytest
import torch

from tests.gpu._ptx import filled, run, words

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


@pytest.mark.parametrize("mode", FLAG_MODES)
def test_a_flag_publishes_what_was_written_before(mode):
    rounds = 300
    out = filled(rounds, 64)
    area = torch.zeros(128, dtype=torch.int32, device="cuda")
    run("flag", [], [rounds, FLAG_MODES.index(mode)], [out, area])
    expected = np.arange(1, rounds + 1)[:, None] * 1000 + np.arange(64)
    np.testing.assert_array_equal(words(out), expected)


def test_tickets_are_given_out_once():
    blocks = 500
    threads = 256 * blocks
    out, counters = filled(threads), torch.zeros(6, dtype=torch.int32, device="cuda")
    run("ticket", [], [blocks], [out, counters])
    np.testing.assert_array_equal(np.sort(words(out)), np.arange(1, threads + 1))
    counts = words(counters)
    total = threads * (threads - 1) // 2
    assert counts[0] == threads
    assert counts[2] == total % 2**32
    assert counts[4:].view(np.uint64)[0] == total << 20


def test_all_blocks_meet_at_the_grid_barrier():
    """One word serves launches of any number of blocks, one after another."""
    most = torch.cuda.get_device_properties(0).multi_processor_count
    area = torch.zeros(32 + most, dtype=torch.int32, device="cuda")
    for blocks in (most, 1, 7, most, 2):
        rounds = 20
        out = filled(rounds, blocks)
        run("grid_barrier", [], [rounds, blocks], [out, area])
        each = np.arange(1, rounds + 1) * (blocks * (blocks + 1) // 2)
        np.testing.assert_array_equal(words(out), np.repeat(each[:, None], blocks, axis=1))
        assert words(area)[0] % 2**31 == 0
