"""Wrappers of csrc/ptx inside one block: what each instruction gives, computed here without it."""

import numpy as np
import pytest
import torch

from tests.ptx_cases._runner import Case, Runner, bf16_bits, bf16_values, filled

LANES = 32


def check_lanes_votes_and_shuffles(runner: Runner) -> None:
    threads = 96
    value = np.random.default_rng(0).integers(0, 1000, threads).astype(np.uint32)
    value[40:] = 6  # so that some warps have a 5 and some have none
    value[3] = 5
    out = filled(14, threads)
    runner.run("warp", [value], [], [out])
    lane = np.arange(threads) % LANES
    by_warp = value.reshape(-1, LANES)

    def each(function) -> np.ndarray:
        """One value per warp, the same in all its lanes."""
        return np.repeat([function(warp) for warp in by_warp], LANES)

    def from_lane(source: np.ndarray) -> np.ndarray:
        return np.take_along_axis(by_warp, source.reshape(-1, LANES), axis=1).ravel()

    bit = np.uint64(1) << np.arange(LANES, dtype=np.uint64)
    same = by_warp[:, :, None] % 4 == by_warp[:, None, :] % 4
    expected = {
        "lane": lane,
        "warp": np.arange(threads) // LANES,
        "lanes_before": (np.uint64(1) << lane.astype(np.uint64)) - np.uint64(1),
        "elected": np.ones(threads),
        "ballot": each(lambda warp: int((bit * (warp % 2)).sum())),
        "all": each(lambda warp: (warp != 5).all()),
        "any": each(lambda warp: (warp == 5).any()),
        "shuffle": from_lane((lane + 5) % LANES),
        "shuffle_up": from_lane(np.where(lane < 3, lane, lane - 3)),
        "shuffle_xor": from_lane(lane ^ 9),
        "match": (same * bit).sum(axis=2).ravel(),
        "reduce": each(np.sum),
        "scan": np.cumsum(by_warp, axis=1).ravel(),
        "popcount": [int(each).bit_count() for each in value],
    }
    for (name, row), actual in zip(expected.items(), out, strict=True):
        np.testing.assert_array_equal(actual, np.asarray(row).astype(np.uint32), err_msg=name)


def check_shared_memory_of_every_width(runner: Runner) -> None:
    threads = 64
    out = filled(11, threads)
    runner.run("shared", [], [], [out])
    neighbour = (np.arange(threads) + 1) % threads
    expected = np.stack(
        [
            *(neighbour + 1000 * i for i in range(4)),
            np.full(threads, 0xABCD),
            neighbour,
            neighbour,
            60000 + neighbour,
            np.full(threads, threads * (threads - 1) // 2),
            np.ones(threads, int),
            np.zeros(threads, int),
        ]
    )
    np.testing.assert_array_equal(out, expected)


def check_named_barriers(runner: Runner) -> None:
    rounds = 50
    out = filled(rounds, LANES)
    runner.run("named_barrier", [], [rounds], [out])
    lane = np.arange(LANES)
    expected = np.arange(rounds)[:, None] * 2000 + 2 * lane + LANES
    np.testing.assert_array_equal(out, expected)


def check_a_ring_of_mbarriers(runner: Runner, rounds: int) -> None:
    out, fresh = filled(rounds, 128), filled(2)
    runner.run("mbarrier", [], [rounds], [out, fresh])
    expected = np.arange(rounds)[:, None] * 1000 + np.arange(128)
    np.testing.assert_array_equal(out, expected)
    assert fresh.tolist() == [0, 1], "a fresh barrier: phase 0 open, the one before complete"


def check_waiting_for_either_of_two_barriers(runner: Runner) -> None:
    out = filled(2)
    runner.run("mbarrier_any", [], [40], [out])
    assert out.tolist() == [40, 40]


def check_a_wait_that_expires_takes_the_others_along(runner: Runner) -> None:
    limit_ns = 3_000_000
    out, flag = filled(2, 4), np.zeros(1, np.uint32)
    record = runner.run_unchecked("deadline", [], [limit_ns], [out, flag])
    for in_time, expired, again, microseconds in out.tolist():
        assert (in_time, expired, again) == (0, 1, 0)
        assert 2000 < microseconds < 500_000
    assert record.expired == 1
    assert record.complete == 1
    assert (record.place, record.rank, record.peer, record.block) == (7, 5, 3, 0)
    assert record.thread in (0, LANES)
    assert (record.expected, record.seen) == ((0, 0) if record.thread == 0 else (41, 0))
    assert limit_ns < record.waited_ns < 500_000_000


def check_the_clocks_of_a_multiprocessor(runner: Runner) -> None:
    out, rounds = filled(3), 200_000 if runner.is_device else 300
    runner.run("clock", [], [rounds], [out])
    nanoseconds, cycles, value = (int(each) for each in out)
    assert value == rounds
    if runner.is_device:
        assert 5 * rounds < cycles < 200 * rounds
        assert 0.2 < cycles / nanoseconds < 3, "cycles per nanosecond"
    else:
        assert 0 < cycles <= nanoseconds, "both are the virtual time, the cycles read inside"


def check_matrices(runner: Runner, transposed: bool) -> None:
    generator = np.random.default_rng(1)
    # matrix [4, 8, 8] of 16-bit elements; lane l holds row l / 4, columns 2 (l % 4) and the next.
    stored = generator.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    loaded = generator.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)

    def in_registers(matrices: np.ndarray) -> np.ndarray:
        """[lane, matrix] words."""
        view = matrices.transpose(0, 2, 1) if transposed else matrices
        return np.ascontiguousarray(view).view(np.uint32).reshape(4, LANES).T

    out, registers = filled(128), filled(LANES, 4)
    inputs = [in_registers(stored), loaded.view(np.uint32)]
    runner.run("matrix", inputs, [int(transposed)], [out, registers])
    np.testing.assert_array_equal(out, stored.view(np.uint32).ravel())
    np.testing.assert_array_equal(registers, in_registers(loaded))


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, -3.4e38, 1.00390625, 1.01171875, np.inf, -np.inf]


def check_conversions(runner: Runner) -> None:
    generator = np.random.default_rng(2)
    a = np.concatenate([SPECIAL, generator.standard_normal(1000) * 8]).astype(np.float32)
    b = np.concatenate([SPECIAL[::-1], generator.standard_normal(1000) * 8]).astype(np.float32)
    out = filled(8, len(a), dtype=np.float32)
    runner.run("convert", [a, b], [len(a)], [out])
    packed = out[0].view(np.uint32)
    np.testing.assert_array_equal(packed & 0xFFFF, bf16_bits(a))
    np.testing.assert_array_equal(packed >> 16, bf16_bits(b))
    np.testing.assert_array_equal(out[1], bf16_values(bf16_bits(a)))
    np.testing.assert_array_equal(out[2], bf16_values(bf16_bits(b)))
    with np.errstate(all="ignore"):
        exact = np.exp2(a.astype(np.float64)).astype(np.float32)
        np.testing.assert_allclose(out[3], np.where(exact < 2**-126, 0, exact), rtol=2.5e-7)
        normal = (np.abs(b) >= 2**-126) & (np.abs(b) < 2.0**126)
        np.testing.assert_allclose(out[4][normal], 1 / b[normal].astype(np.float64), rtol=1.3e-7)
        fused = torch.from_numpy(a.astype(np.float64) * b + a).float().numpy()
    finite = np.isfinite(fused)
    # In FP64 the product is exact and the sum almost: a double rounding is rare but possible.
    differing = out[5][finite] != fused[finite]
    assert differing.mean() < 0.01
    np.testing.assert_allclose(out[5][finite], fused[finite], rtol=2.0**-23)


def check_sigmoid(runner: Runner) -> None:
    generator = np.random.default_rng(3)
    spread = generator.standard_normal(2000) * np.repeat([1e-3, 1, 8, 40], 500)
    a = np.concatenate([SPECIAL, [88.0, -88.0, 200.0, -200.0, np.nan], spread]).astype(np.float32)
    out = filled(8, len(a), dtype=np.float32)
    runner.run("convert", [a, a], [len(a)], [out])
    value, complement = out[6], out[7]
    nan = np.isnan(a)
    assert np.isnan(value[nan]).all()
    assert np.isnan(complement[nan]).all()
    x = a[~nan].astype(np.float64)
    with np.errstate(over="ignore"):
        exact, exact_complement = 1 / (1 + np.exp(-x)), 1 / (1 + np.exp(x))
    # Below 2^-126 the device gives zero.
    tiny = 2.0**-126
    np.testing.assert_allclose(value[~nan], exact, rtol=1e-6, atol=tiny)
    np.testing.assert_allclose(complement[~nan], exact_complement, rtol=1e-6, atol=tiny)


def check_an_unknown_test_and_short_buffers_are_refused(runner: Runner) -> None:
    with pytest.raises(ValueError, match="there is no test named 'nothing'"):
        runner.run("nothing", [], [], [filled(1)])
    with pytest.raises(ValueError, match=r"outputs\[0\] has 4 bytes, needs 12800"):
        runner.run("mbarrier", [], [25], [filled(1)])


CASES = (
    Case("lanes, votes and shuffles", check_lanes_votes_and_shuffles),
    Case("shared memory of every width", check_shared_memory_of_every_width),
    Case("named barriers", check_named_barriers),
    *(
        Case(f"a ring of mbarriers, {rounds} rounds", check_a_ring_of_mbarriers, (rounds,))
        for rounds in (1, 2, 3, 4, 7, 100)
    ),
    Case("waiting for either of two barriers", check_waiting_for_either_of_two_barriers),
    Case("a wait that expires", check_a_wait_that_expires_takes_the_others_along),
    Case("clocks", check_the_clocks_of_a_multiprocessor),
    Case("matrices", check_matrices, (False,)),
    Case("matrices, transposed", check_matrices, (True,)),
    Case("conversions", check_conversions),
    Case("sigmoid", check_sigmoid),
    Case("refused arguments", check_an_unknown_test_and_short_buffers_are_refused),
)
