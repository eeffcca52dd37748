"""The grouped GEMM's own source in the emulator: bit for bit the CPU executor's product."""

import numpy as np
import pytest

from mok import _C
from tests.emu._moe_forward import BLOCK, HALF, ISA, assert_equal, needs_isa, untouched
from tests.ptx_cases import bf16_bits

pytestmark = needs_isa

CASES = {
    "one tile": ([128], 256, 64),
    "one K step": ([5, 64, 65], 24, 8),
    "ragged": ([0, 1, 127, 129, 0, 200, 0], 264, 136),
    "many K steps": ([70, 130], 72, 776),
}


class Case:
    def __init__(self, counts: list[int], columns: int, depth: int):
        rng = np.random.default_rng(0)
        self.counts = np.array(counts, np.int64)
        padded = -(-self.counts // BLOCK) * BLOCK
        self.begin = np.concatenate([[0], np.cumsum(padded)]).astype(np.int64)
        rows, experts = int(self.begin[-1]), len(counts)
        self.x = bf16_bits(rng.standard_normal((rows, depth)).astype(np.float32))
        self.weights = bf16_bits(rng.standard_normal((experts, columns, depth)).astype(np.float32))
        self.expected = untouched(rows, columns)
        for expert, count in enumerate(counts):
            begin, rows = self.begin[expert], -(-count // HALF) * HALF  # by halves of a block
            if rows == 0:
                continue
            acc = np.zeros((rows, columns), np.float32)
            _C.kernels.gemm(ISA, "bf16", self.x[begin : begin + rows], self.weights[expert], acc)
            stored = _C.kernels.store(ISA, "bf16", acc.ravel())
            self.expected[begin : begin + rows] = stored.reshape(rows, columns)

    def run(self, emulator, options):
        y = np.full_like(self.expected, untouched(1)[0])
        weights = (self.weights, 0, 1, self.weights.shape[1])
        result = emulator.grouped_gemm(self.x, weights, self.begin, self.counts, y, options)
        assert_equal("y", y, self.expected)
        return result


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request) -> Case:
    return Case(*CASES[request.param])


@pytest.mark.parametrize("seed", range(50))
def test_equals_the_executor(emulator, case, seed):
    case.run(emulator, emulator.RunOptions(seed=seed))
