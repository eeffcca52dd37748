"""Every synchronising call of the barriers between ranks and blocks, and of the checker's own test
kernels, is left out in turn: it is noticed, or listed with the reason why not."""

import numpy as np
import pytest

from tests.emu import test_planted_bugs as planted
from tests.emu._mutation import unnoticed
from tests.emu.test_peers import NEVER, steps
from tests.ptx_cases import filled

# (file, wrapper, part of the line): why no run can show that it is missing.
REDUNDANT = {
    (
        "csrc/launch/emulator/planted/cluster.h",
        "sync_warp",
        "ptx::sync_warp();",
    ): "the cluster's barrier, which follows, orders all lanes of its warps",
    (
        "csrc/launch/emulator/planted/cluster.h",
        "mbar_wait",
        "kFreed",
    ): "nothing is reused behind it: the kernel ends",
}


def assert_all_noticed(emulator, run, at_least: int, redundant=()) -> None:
    missed, count = unnoticed(emulator, run)
    assert count >= at_least
    unexplained = [
        str(site)
        for site in missed
        if not any(
            (site.file, site.wrapper) == (file, wrapper) and part in site.text
            for file, wrapper, part in redundant
        )
    ]
    assert not unexplained, "\n".join(unexplained)
    for file, wrapper, part in redundant:
        assert any(
            (site.file, site.wrapper) == (file, wrapper) and part in site.text for site in missed
        ), f"{wrapper} of {file} is noticed: take it off the list"


@pytest.mark.parametrize("kernel", planted.KERNELS)
def test_planted_kernels(emulator, kernel):
    def run(options):
        buffers = planted.Buffers()
        emulator.run_planted_bug(
            kernel, buffers.inputs, buffers.outputs, buffers.windows, buffers.limits, options
        )
        for rank in range(2):
            expected = planted.expected_outputs(kernel, buffers, rank)
            np.testing.assert_array_equal(buffers.outputs[rank], expected)

    assert_all_noticed(emulator, run, 5, [key for key in REDUNDANT if f"/{kernel}.h" in key[0]])


def test_peer_barrier(emulator):
    def run(options):
        streams = [[*steps(2), ("rounds", 3)]] * 2
        outcomes, _ = emulator.run_peers(streams, NEVER, options)
        for outcome in outcomes:
            np.testing.assert_array_equal(outcome["seen"], [[1, 1], [2, 2]])
            assert (outcome["wrong"], outcome["passed"]) == (0, 3)

    assert_all_noticed(emulator, run, 4)


def test_grid_barrier(emulator):
    rounds, blocks = 3, 4

    def run(options):
        out, area, limits = filled(rounds, blocks), np.zeros(64, np.uint32), np.zeros(64, np.uint32)
        emulator.ptx_test("grid_barrier", [], [rounds, blocks], [out, area, limits], options)
        sums = np.arange(1, rounds + 1) * (blocks * (blocks + 1) // 2)
        np.testing.assert_array_equal(out, np.repeat(sums[:, None], blocks, axis=1))

    assert_all_noticed(emulator, run, 4)
