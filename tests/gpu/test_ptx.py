"""Wrappers of csrc/ptx inside one block: what each instruction gives, computed here without it."""

import numpy as np
import pytest
import torch

from tests.gpu._ptx import filled, run, run_unchecked, to_gpu, words

LANES = 32


def test_lanes_votes_and_shuffles():
    threads = 96
    value = np.random.default_rng(0).integers(0, 1000, threads).astype(np.uint32)
    value[40:] = 6  # so that some warps have a 5 and some have none
    value[3] = 5
    out = filled(14, threads)
    run("warp", [to_gpu(value)], [], [out])
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
    for (name, row), actual in zip(expected.items(), words(out), strict=True):
        np.testing.assert_array_equal(actual, np.asarray(row).astype(np.uint32), err_msg=name)


def test_shared_memory_of_every_width():
    threads = 64
    out = filled(11, threads)
    run("shared", [], [], [out])
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
    np.testing.assert_array_equal(words(out), expected)


def test_named_barriers_hand_data_over():
    rounds = 50
    out = filled(rounds, LANES)
    run("named_barrier", [], [rounds], [out])
    lane = np.arange(LANES)
    expected = np.arange(rounds)[:, None] * 2000 + 2 * lane + LANES
    np.testing.assert_array_equal(words(out), expected)


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 7, 100])
def test_a_ring_of_mbarriers(rounds):
    out, fresh = filled(rounds, 128), filled(2)
    run("mbarrier", [], [rounds], [out, fresh])
    expected = np.arange(rounds)[:, None] * 1000 + np.arange(128)
    np.testing.assert_array_equal(words(out), expected)
    assert fresh.tolist() == [0, 1], "a fresh barrier: phase 0 open, the one before complete"


def test_waiting_for_either_of_two_barriers():
    out = filled(2)
    run("mbarrier_any", [], [40], [out])
    assert out.tolist() == [40, 40]


def test_a_wait_that_expires_says_so_and_takes_the_others_along():
    limit_ns = 3_000_000
    out, flag = filled(2, 4), torch.zeros(1, dtype=torch.int32, device="cuda")
    record = run_unchecked("deadline", [], [limit_ns], [out, flag])
    for in_time, expired, again, microseconds in out.tolist():
        assert (in_time, expired, again) == (0, 1, 0)
        assert 2000 < microseconds < 500_000
    assert record.expired == 1
    assert record.complete == 1
    assert (record.place, record.rank, record.peer, record.block) == (7, 5, 3, 0)
    assert record.thread in (0, LANES)
    assert (record.expected, record.seen) == ((0, 0) if record.thread == 0 else (41, 0))
    assert limit_ns < record.waited_ns < 500_000_000


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_between_registers_and_shared_memory(transposed):
    generator = np.random.default_rng(1)
    # matrix [4, 8, 8] of 16-bit elements; lane l holds row l / 4, columns 2 (l % 4) and the next.
    stored = generator.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    loaded = generator.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)

    def in_registers(matrices: np.ndarray) -> np.ndarray:
        """[lane, matrix] words."""
        view = matrices.transpose(0, 2, 1) if transposed else matrices
        return np.ascontiguousarray(view).view(np.uint32).reshape(4, LANES).T

    out, registers = filled(128), filled(LANES, 4)
    inputs = [to_gpu(np.ascontiguousarray(in_registers(stored))), to_gpu(loaded.view(np.uint32))]
    run("matrix", inputs, [int(transposed)], [out, registers])
    np.testing.assert_array_equal(words(out), stored.view(np.uint32).ravel())
    np.testing.assert_array_equal(words(registers), in_registers(loaded))


def test_conversions():
    special = [0.0, -0.0, 1.0, -1.0, 1e-40, 3e38, -3.4e38, 1.00390625, 1.01171875, np.inf, -np.inf]
    generator = np.random.default_rng(2)
    a = np.concatenate([special, generator.standard_normal(1000) * 8]).astype(np.float32)
    b = np.concatenate([special[::-1], generator.standard_normal(1000) * 8]).astype(np.float32)
    out = filled(6, len(a), dtype=torch.float32)
    run("convert", [to_gpu(a), to_gpu(b)], [len(a)], [out])
    result = out.cpu().numpy()
    low, high = (torch.from_numpy(x).bfloat16().view(torch.int16).numpy() for x in (a, b))
    packed = result[0].view(np.uint32)
    np.testing.assert_array_equal(packed & 0xFFFF, low.view(np.uint16))
    np.testing.assert_array_equal(packed >> 16, high.view(np.uint16))
    np.testing.assert_array_equal(result[1], torch.from_numpy(a).bfloat16().float().numpy())
    np.testing.assert_array_equal(result[2], torch.from_numpy(b).bfloat16().float().numpy())
    with np.errstate(all="ignore"):
        exact = np.exp2(a.astype(np.float64)).astype(np.float32)
        np.testing.assert_allclose(result[3], np.where(exact < 2**-126, 0, exact), rtol=2.5e-7)
        normal = (np.abs(b) >= 2**-126) & (np.abs(b) < 2.0**126)
        np.testing.assert_allclose(result[4][normal], 1 / b[normal].astype(np.float64), rtol=1.3e-7)
        fused = torch.from_numpy(a.astype(np.float64) * b + a).float().numpy()
    finite = np.isfinite(fused)
    # In FP64 the product is exact and the sum almost: a double rounding is rare but possible.
    differing = result[5][finite] != fused[finite]
    assert differing.mean() < 0.01
    np.testing.assert_allclose(result[5][finite], fused[finite], rtol=2.0**-23)


def test_an_unknown_test_and_short_buffers_are_refused():
    with pytest.raises(ValueError, match="there is no test named 'nothing'"):
        run("nothing", [], [], [filled(1)])
    with pytest.raises(ValueError, match=r"outputs\[0\] has 4 bytes, needs 12800"):
        run("mbarrier", [], [25], [filled(1)])
