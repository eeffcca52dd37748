"""The router's kernel in the emulator: the ids of the torch path, for all values and sizes."""

import math

import numpy as np
import pytest
import torch

from mok.router import top_k_lowest_first

SEEDS = 5
MOST = 32
SIZES = {
    # T, E, K
    "one expert": (3, 1, 1),
    "all experts": (4, 5, 5),
    "fewer than a warp": (9, 24, 8),
    "one warp": (2, 32, 32),
    "one more": (2, 33, 32),
    "a batch": (5, 128, 8),
    "a batch and one": (3, 129, 1),
    "two batches": (4, 256, 8),
    "many": (2, 1000, 10),
    "more tokens than warps": (70, 16, 2),
}


def spread(rng, shape):
    """All magnitudes, a few of them often."""
    values = rng.standard_normal(shape) * np.exp2(rng.integers(-140, 120, shape).astype(np.float64))
    return values.astype(np.float32)


def ties(rng, shape):
    return rng.integers(-1, 2, shape).astype(np.float32)


def zeros_and_infinities(rng, shape):
    return rng.choice(np.float32([0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45]), shape)


def nothing_but_minus_infinity(rng, shape):
    return np.full(shape, -math.inf, np.float32)


def some_nan(rng, shape):
    drawn = ties(rng, shape)
    drawn[rng.random(shape) < 0.2] = math.nan
    drawn[rng.random(shape) < 0.1] = -math.nan
    return drawn


def ascending(rng, shape):
    """Each expert beats all before it: the most work."""
    return np.broadcast_to(np.arange(shape[1], dtype=np.float32), shape).copy()


VALUES = (spread, ties, zeros_and_infinities, nothing_but_minus_infinity, some_nan, ascending)


def check(emulator, scores, bias, top_k, **options):
    ids = np.full((len(scores), top_k), -7, np.int64)
    result = emulator.router_top_k(scores, bias, ids, emulator.RunOptions(**options))
    biased = torch.from_numpy(scores)
    if bias is not None:
        biased = biased + torch.from_numpy(bias)
    np.testing.assert_array_equal(ids, top_k_lowest_first(biased, top_k).numpy())
    assert result.warnings == []


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("size", SIZES)
def test_ids_are_those_of_the_torch_path(emulator, size, values):
    tokens, experts, top_k = SIZES[size]
    rng = np.random.default_rng(1)
    scores = values(rng, (tokens, experts))
    bias = rng.integers(-1, 2, experts).astype(np.float32)
    check(emulator, scores, None, top_k)
    check(emulator, scores, bias, top_k)


def test_schedules(emulator):
    rng = np.random.default_rng(2)
    scores = ties(rng, (20, 40))
    for seed in range(SEEDS):
        check(emulator, scores, None, 6, seed=seed)


def test_no_tokens(emulator):
    check(emulator, np.zeros((0, 8), np.float32), None, 2)


@pytest.mark.parametrize(("experts", "top_k"), [(4, 5), (64, MOST + 1)])
def test_more_choices_than_it_has(emulator, experts, top_k):
    ids = np.zeros((1, top_k), np.int64)
    with pytest.raises(ValueError, match=f"top_k = {top_k}: must be at least 1 and at most"):
        emulator.router_top_k(np.zeros((1, experts), np.float32), None, ids, emulator.RunOptions())
