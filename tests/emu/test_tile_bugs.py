"""Bugs in tensor copies and tensor-core products are found, and said in words."""

import numpy as np
import pytest

from mok import _C
from tests.ptx_cases import bf16_bits

SEEDS = 5
# What the report begins with, and something that it says.
FOUND = {
    "load not awaited": ("order", "tile [ab]"),
    "bytes missing": ("barrier|deadlock", "full barrier"),
    "tile misaligned": ("alignment", "128"),
    "load between pieces": (
        "alignment",
        "begins at 4, 0: the first must be a multiple of 8 elements",
    ),
    "wrong rank": ("usage", "has a tensor map of 2 dimensions"),
    "map not made": ("usage", "has a tensor map that make_tensor_map did not make"),
    "multicast to nobody": ("usage", "names no block"),
    "step past line": ("usage", "descriptor of A: its 32 bytes of K run past the end of a line"),
    "base offset": ("usage", "descriptor of B: it has a base offset"),
    "stride past end": ("bounds", "reads shared bytes"),
    "lanes differ": ("diverged", "wgmma"),
    "written by threads": ("proxy", "tile a"),
    "no wgmma fence": ("usage", "wgmma_fence"),
    "no wgmma wait": ("exited", "has not waited for its wgmmas"),
    "accumulator touched": ("usage", "accumulators"),
    "refilled too early": ("order", "tile a"),
    "matrix misaligned": ("alignment", "store_matrix_x4"),
    "matrix past end": ("bounds|usage|barrier", "store_matrix_x4"),
    "no proxy fence": ("proxy", "staging"),
    "no barrier before store": ("order", "staging"),
    "store before zero": ("bounds", "begins at 0, -1: only a load may begin before 0"),
    "sum of bytes": ("usage", "adds to a tensor of bytes"),
    "staging reused too early": ("order", "staging"),
}


@pytest.fixture(scope="module")
def operands() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return tuple(bf16_bits(generator.standard_normal((64, 64)).astype(np.float32)) for _ in "ab")


def test_without_a_bug(emulator, operands):
    a, b = operands
    isa = "avx2" if "avx2" in _C.kernels.available() else "portable"
    product = np.zeros((64, 64), np.float32)
    _C.kernels.gemm(isa, "fp32", a, b, product)
    for seed in range(20):
        d = np.full((64, 64), 0xFFFF, np.uint16)
        emulator.run_tile("none", a, b, d, emulator.RunOptions(seed=seed))
        np.testing.assert_array_equal(d, bf16_bits(product))


def test_every_bug_has_its_report(emulator):
    assert set(emulator.tile_bugs()) == {"none", *FOUND}


@pytest.mark.parametrize("bug", FOUND)
def test_every_schedule_finds(emulator, operands, bug):
    kind, words = FOUND[bug]
    for seed in range(SEEDS):
        d = np.full((64, 64), 0xFFFF, np.uint16)
        with pytest.raises(emulator.EmulatorError, match=rf"(?s)^({kind}): .*{words}"):
            emulator.run_tile(bug, *operands, d, emulator.RunOptions(seed=seed))
