"""wgmma with operands of both majors and all swizzles, and setmaxnreg: exact in small integers."""

import itertools

import numpy as np

from tests.ptx_cases._runner import Case, Runner, bf16_bits, filled

K, MN = 0, 1
# N, major of A, major of B: csrc/launch/sm90_ptx_tests.cu
SHAPES = [
    *((n, K, K) for n in (8, 16, 32, 64, 96, 128, 192, 256)),
    *((64, MN, K), (128, K, MN), (64, MN, MN), (256, K, MN), (256, MN, MN)),
]
SWIZZLES = {1: "128B", 2: "64B", 3: "32B"}  # as csrc/ptx/wgmma_descriptor.h numbers them


def accumulators_to_matrix(registers: np.ndarray) -> np.ndarray:
    """[128 threads, N / 2] to [64, N]."""
    threads, count = registers.shape
    thread, i = np.meshgrid(np.arange(threads), np.arange(count), indexing="ij")
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (thread % 4) + i % 2
    matrix = np.full((64, 2 * count), np.nan)
    matrix[row, column] = registers
    return matrix


def check_wgmma(runner: Runner, shape: tuple[int, int, int], swizzles: tuple[int, int]) -> None:
    n, major_a, major_b = shape
    generator = np.random.default_rng(n)
    a_MK = generator.integers(-8, 9, (64, 64)).astype(np.float32)
    b_NK = generator.integers(-8, 9, (n, 64)).astype(np.float32)
    inputs = [
        bf16_bits(matrix if major == K else matrix.T)
        for matrix, major in ((a_MK, major_a), (b_NK, major_b))
    ]
    passes = 3
    out = filled(128, n // 2, dtype=np.float32)
    runner.run("wgmma", inputs, [*shape, *swizzles, passes], [out], sm90=True)
    np.testing.assert_array_equal(accumulators_to_matrix(out), passes * (a_MK @ b_NK.T))


def check_registers_move_between_warpgroups(runner: Runner) -> None:
    threads, held = 384, 184
    values = np.random.default_rng(0).integers(0, 2**32, threads + held).astype(np.uint32)
    out = filled(threads)
    runner.run("setmaxnreg", [values], [], [out], sm90=True)
    expected = values[:threads] + np.uint32(1)
    for thread in range(128, threads):
        total = 0
        for i in reversed(range(held)):
            total = (3 * total + int(values[thread + i])) % 2**32
        expected[thread] = total
    np.testing.assert_array_equal(out, expected)


def _wgmma_case(shape: tuple[int, int, int], swizzles: tuple[int, int]) -> Case:
    majors = "".join("K" if major == K else "M" for major in shape[1:])
    names = " ".join(SWIZZLES[swizzle] for swizzle in swizzles)
    return Case(
        f"wgmma N={shape[0]} {majors} {names}", check_wgmma, (shape, swizzles), needs_sm90=True
    )


CASES = (
    *(
        _wgmma_case(shape, swizzles)
        for shape in SHAPES
        for swizzles in itertools.product(SWIZZLES, repeat=2)
    ),
    Case("setmaxnreg", check_registers_move_between_warpgroups, needs_sm90=True),
)
