"""The checker of the emulator: each kind of error has a planted bug, and is found with a message
that says who did what where, and what is missing.

Bugs of tensor copies and tensor cores are in test_tile_bugs.py.
"""

import numpy as np
import pytest

SEEDS = 10
FILES = "csrc/launch/emulator/planted/"

# Bug: the beginning of every report, and what the reports have to name.
BUGS = {
    # A ring of stages
    "kRefillsWithoutEmpty": ("barrier|order", "warp 0 (load) lane 0", "ring.h"),
    "kReadsWithoutFull": ("order", "warp 1 (compute)", "stage[0]", "bulk_load"),
    "kNoProxyFenceBeforeStore": ("proxy", "bulk_store", "staging", "fence_proxy_async_shared"),
    "kNoWarpSyncBeforeHandOver": ("order", "bulk_store", "staging", "warp 1 (compute) lane"),
    "kExpectsTooFewBytes": ("deadlock", "full[0]", "0 of 1 arrivals and -16 bytes are missing"),
    "kExpectsTooManyBytes": ("deadlock", "full[0]", "0 of 1 arrivals and 16 bytes are missing"),
    "kOverwritesStaging": ("order", "store_shared", "staging", "bulk_wait_read"),
    "kFlagsAfterReadOnly": ("order", "bulk_load", "out + 1024 of rank", "bulk_wait by that thread"),
    "kNoGlobalProxyFence": ("proxy", "out + 1024 of rank", "fence_proxy_async_global"),
    "kNoProxyFenceBeforeRefill": ("proxy", "bulk_load", "stage[0]", "fence_proxy_async_shared"),
    "kArrivesTwice": ("deadlock|order", "empty[1]|stage[1]"),
    "kNoInitFence": ("proxy", "full[0]", "fence_mbarrier_init_release_cluster"),
    "kNoBarrierAfterInit": ("order|barrier", "mbar_init"),
    "kLeavesUnreadStore": ("exited", "bulk_store at " + FILES + "ring.h", "bulk_wait_read"),
    "kLeavesUnawaitedLoad": (
        "exited",
        "phase 0 of result",
        "bulk_load at " + FILES + "ring.h",
        "by rank 0 block 0 warp 0 (load) lane 0|by rank 1 block 0 warp 0 (load) lane 0",
    ),
    "kLeavesHalfAPhase": ("exited", "phase 0 of result", "a load is waited for before the end"),
    "kWrongParity": ("deadlock|order", "full[1]|stage[1]"),
    "kOverwritesMbarrier": ("barrier", "store_shared", "mbarrier at result", "mbar_invalidate"),
    "kUsesNoMbarrier": ("barrier", "shared byte 56", "mbar_init"),
    "kUnalignedBulk": ("alignment", "504 bytes", "multiples of 16"),
    "kForgetsCommit": ("order", "staging", "bulk_wait_read"),
    # Ordinary memory
    "kSharedOutOfBounds": ("bounds", "[1024, 1028)", "[0, 1024)"),
    "kSharedMisaligned": ("alignment", "shared byte 4", "multiple of 8"),
    "kGlobalOutOfBounds": ("bounds", "0 bytes past the end of out"),
    "kGlobalMisaligned": ("alignment", "multiple of 16"),
    "kNullPointer": ("bounds", "a null pointer"),
    "kWritesConstant": ("usage", "in + 0 of rank", "constant"),
    "kNoBlockSync": ("order", "shared byte", "memory.h"),
    "kPlainAdd": ("order", "load_shared", "store_shared", "shared byte 256"),
    "kSameWordTwice": ("order", "store_global", "out + 1200 of rank"),
    "kTwoReductions": ("order", "bulk_reduce_add_f32", "the order of the two sums is free"),
    "kPollsPlainly": ("order", "words + 64 of rank"),
    # Warps
    "kSkipsShuffle": ("diverged", "shuffle", "reduce_add"),
    "kOtherInstruction": ("diverged", "ballot", "reduce_add"),
    "kLaneLeaves": ("diverged", "lane 4, exit", "store_matrix_x4"),
    "kNamedCount": ("barrier", "96", "64", "named barrier 1"),
    "kNamedAlone": ("deadlock", "named barrier 3: 32 of 64 threads are here"),
    "kNamedOnceMore": ("barrier|order|deadlock", "named barrier 1|store_shared"),
    "kReadsBeforeWarpSync": ("order", "load_shared", "store_matrix_x4 at"),
    "kRegistersExceeded": ("deadlock", "256 registers a thread; the block has 0 free"),
    "kRegistersWrongWay": ("usage", "40 registers", "an increase cannot lower"),
    # Two ranks
    "kReleasesAtGpuScope": ("order", "st_release_gpu", "flags + 0 of rank", "sys scope"),
    "kAcquiresAtGpuScope": ("order", "ld_acquire_gpu|st_release_sys", "sys scope"),
    "kRelaxedStore": ("order", "window + ", "store_global"),
    "kRelaxedLoad": ("order", "window + ", "store_global"),
    "kNoFlag": ("order", "window + ", "store_global"),
    "kPlainFlag": ("order", "flags + 0 of rank"),
    "kReadsPeerTooEarly": ("order", "window + ", "kernel has begun"),
    "kTouchesPrivate": ("bounds", "words + 0 of rank 0", "private to rank 0"),
    "kEndsBeforePeer": ("order", "the end of rank", "window + ", "the host"),
    "kWaitsForNothing": ("deadlock", "flags + 0 of rank 1: 1 expected, 0 seen"),
    "kTraps": ("deadlock", "flags + 8 of rank 0: 1 expected, 0 seen"),
    "kTrapsAtOnce": ("usage", "trap at", "flags + 8 of rank 0", "fence_acq_rel_sys"),
    # Clusters
    "kLeavesCluster": ("exited", "load_shared_cluster", "cluster barrier before the end"),
    "kPublishesWithPlainArrive": ("order", "letter", "mbar_arrive_cluster_release"),
    "kWaitsAtBlockScope": ("order", "letter", "mbar_wait_acquire_cluster"),
    "kNoClusterSync": ("order|barrier", "word[|late"),
    "kRelaxedClusterArrive": ("order", "word["),
    "kForgetsPeerRelease": ("deadlock", "freed", "1 of 2 arrivals"),
}

# Nothing but the data tells.
SILENT = ("kReadsUnwrittenShared", "kReadsUninitialisedLocal")
KERNELS = ("ring", "memory", "lanes", "ranks", "cluster")


class Buffers:
    def __init__(self):
        self.inputs = [np.arange(1024, dtype=np.float32) + rank for rank in range(2)]
        self.outputs = [np.zeros(4096, np.float32) for _ in range(2)]
        self.windows = [np.full(1024, 10.0 * rank, np.float32) for rank in range(2)]
        self.limits = [np.zeros(64, np.uint32) for _ in range(2)]

    def run(self, emulator, bug: str, **options):
        return emulator.run_planted_bug(
            bug,
            self.inputs,
            self.outputs,
            self.windows,
            self.limits,
            emulator.RunOptions(**options),
        )


def expected_outputs(kernel: str, buffers: Buffers, rank: int) -> np.ndarray:
    out = np.zeros(4096, np.float32)
    if kernel == "ring":
        out[:768] = 2 * buffers.inputs[rank][:768]
        out[1024:1152] = out[256:384]
    elif kernel == "memory":
        thread = np.arange(64)
        values = thread.sum() + 63 - thread
        out[:256] = np.tile(values, 4)
        out[512:576] = 2
    elif kernel == "lanes":
        warp = np.arange(256) // 32
        values = 32 * warp + 5 + 32
        values = values + np.where(warp == 3, values & 1, 0)
        out[:256] = np.where(warp == 1, values - 32, values)
        thread = np.arange(256)
        stays = (thread % 32 != 9) & (warp != 5) & (warp != 7)
        out[512:768] = np.where(stays, thread ^ 64, 0)
    elif kernel == "ranks":
        out[:32] = 10.0 * rank + (1 - rank)
    else:
        for block in range(2):
            out[64 * block : 64 * block + 32] = 100 * (1 - block) + np.arange(32)
            out[64 * block + 32] = 7000 + 1 - block
    return out


def matches(report: str, alternatives: str) -> bool:
    return any(part in report for part in alternatives.split("|"))


def test_every_planted_bug_is_tested(emulator):
    assert sorted(emulator.planted_bugs()) == sorted([*KERNELS, *BUGS, *SILENT, "kNotCooperative"])


@pytest.mark.parametrize(
    "policy",
    ["by_seed", "random", "run_until_blocked", "starved_warps", "held_copies", "late_rank"],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_right_kernels_pass(emulator, kernel, policy):
    for seed in range(3 if policy != "by_seed" else 50):
        buffers = Buffers()
        result = buffers.run(emulator, kernel, seed=seed, policy=policy)
        assert result.warnings == []
        assert result.trapped == []
        for rank in range(2):
            np.testing.assert_array_equal(
                buffers.outputs[rank], expected_outputs(kernel, buffers, rank)
            )


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found_in_every_schedule(emulator, bug):
    kinds, *words = BUGS[bug]
    for seed in range(SEEDS):
        with pytest.raises(emulator.EmulatorError) as caught:
            Buffers().run(emulator, bug, seed=seed)
        report = str(caught.value)
        assert report.split(":")[0] in kinds.split("|"), report
        for word in words:
            assert matches(report, word), report
        assert f"[seed {seed}, step " in report
        assert "rank " in report


@pytest.mark.parametrize("bug", SILENT)
def test_undefined_values_are_wrong_numbers(emulator, bug):
    buffers = Buffers()
    buffers.run(emulator, bug)
    assert not np.array_equal(buffers.outputs[0], expected_outputs("memory", buffers, 0))


def test_a_grid_that_is_not_cooperative_may_start_block_by_block(emulator):
    reports = []
    for seed in range(20):
        try:
            Buffers().run(emulator, "kNotCooperative", seed=seed)
        except emulator.EmulatorError as error:
            reports.append(str(error))
    assert 0 < len(reports) < 20
    for report in reports:
        assert report.startswith("deadlock")
        assert "is not cooperative: 1 of its 2 blocks" in report


def test_a_seed_repeats_its_run(emulator):
    def run(seed):
        with pytest.raises(emulator.EmulatorError) as caught:
            Buffers().run(emulator, "kRefillsWithoutEmpty", seed=seed)
        return str(caught.value)

    assert run(3) == run(3)
    assert len({run(seed) for seed in range(8)}) > 1
    first, second = (Buffers().run(emulator, "ring", seed=5, keep_log=True) for _ in range(2))
    assert first.log == second.log
    assert len(first.log) > 100
    assert first.stats.steps == second.stats.steps


def test_time_outs_run_the_kernels_own_way_out(emulator):
    """Rank 0 forgets a flag: rank 1's wait expires, leaves its record and traps; rank 0 follows."""
    for seed in range(SEEDS):
        buffers = Buffers()
        result = buffers.run(emulator, "kWaitsForNothing", seed=seed, time_outs=True)
        assert "ranks" in result.trapped
        complete, place, rank, peer, block, thread = buffers.limits[1][32:38]
        expected, seen, waited_ns = buffers.limits[1][38:44].view(np.uint64)
        assert (complete, place, rank, peer, block, thread) == (1, 5, 1, 0, 0, 0)
        assert (expected, seen) == (1, 0)
        assert waited_ns > 1_000_000
        assert buffers.limits[1][0] == 1


def test_a_trap_ends_one_rank(emulator):
    result = Buffers().run(emulator, "kTraps", time_outs=True)
    assert result.trapped.count("ranks") >= 1


def test_a_run_without_an_end_is_stopped(emulator):
    with pytest.raises(emulator.EmulatorError, match="step limit: 500 steps without an end"):
        Buffers().run(emulator, "ring", max_steps=500)


def test_the_log_of_a_failed_run_is_kept(emulator):
    with pytest.raises(emulator.EmulatorError):
        Buffers().run(emulator, "kFlagsAfterReadOnly", keep_log=True)
    log = "\n".join(emulator.last_result().log)
    for words in (
        "rank 0: ring begins",
        "has read its source",
        "phase 0 of full[0]",
        "bulk_store at",
    ):
        assert words in log


def test_names_that_do_not_exist_are_refused(emulator):
    with pytest.raises(ValueError, match="which is not planted"):
        Buffers().run(emulator, "no such bug")
    with pytest.raises(ValueError, match="policy is 'lucky'"):
        Buffers().run(emulator, "ring", policy="lucky")
