"""wgmma with operands of both majors and all swizzles, and setmaxnreg: exact in small integers."""

import itertools

import numpy as np
import pytest
import torch

from tests.gpu._ptx import filled, run, to_gpu, words

pytestmark = pytest.mark.usefixtures("needs_sm90")

K, MN = 0, 1
# N, major of A, major of B: csrc/launch/sm90_ptx_tests.cu
SHAPES = [
    *((n, K, K) for n in (8, 16, 32, 64, 96, 128, 192, 256)),
    *((64, MN, K), (128, K, MN), (64, MN, MN), (256, K, MN), (256, MN, MN)),
]
B128, B64, B32 = 1, 2, 3  # as csrc/ptx/wgmma_descriptor.h numbers them


def accumulators_to_matrix(registers: np.ndarray) -> np.ndarray:
    """[128 threads, N / 2] to [64, N]."""
    threads, count = registers.shape
    thread, i = np.meshgrid(np.arange(threads), np.arange(count), indexing="ij")
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (thread % 4) + i % 2
    matrix = np.full((64, 2 * count), np.nan)
    matrix[row, column] = registers
    return matrix


@pytest.mark.parametrize("swizzles", [*itertools.product((B128, B64, B32), repeat=2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_wgmma(shape, swizzles):
    n, major_a, major_b = shape
    generator = torch.Generator().manual_seed(n)
    a_MK = torch.randint(-8, 9, (64, 64), generator=generator).double()
    b_NK = torch.randint(-8, 9, (n, 64), generator=generator).double()

    def operand(matrix: torch.Tensor, major: int) -> torch.Tensor:
        return (matrix if major == K else matrix.T).contiguous().bfloat16().cuda()

    passes = 3
    out = filled(128, n // 2, dtype=torch.float32)
    inputs = [operand(a_MK, major_a), operand(b_NK, major_b)]
    run("wgmma", inputs, [*shape, *swizzles, passes], [out], op="_sm90_ptx_test")
    expected = passes * (a_MK @ b_NK.T).numpy()
    np.testing.assert_array_equal(accumulators_to_matrix(out.cpu().numpy()), expected)


def test_registers_move_between_warpgroups():
    threads, held = 384, 184
    values = np.random.default_rng(0).integers(0, 2**32, threads + held).astype(np.uint32)
    out = filled(threads)
    run("setmaxnreg", [to_gpu(values)], [], [out], op="_sm90_ptx_test")
    expected = values[:threads] + np.uint32(1)
    for thread in range(128, threads):
        total = 0
        for i in reversed(range(held)):
            total = (3 * total + int(values[thread + i])) % 2**32
        expected[thread] = total
    np.testing.assert_array_equal(words(out), expected)
