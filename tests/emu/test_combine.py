"""The combine epilogue in the emulator: bit for bit the CPU executor's weighted sum."""

import numpy as np
import pytest

from mok import _C
from tests.ptx_cases import bf16_bits

SEEDS = 50
CASES = {
    # T, K, H, shared rows, their weights, weights, type
    "one choice": (3, 1, 8, False, False, True, "bf16"),
    "shared": (5, 2, 264, True, False, True, "bf16"),
    "shared gate": (4, 3, 520, True, True, True, "bf16"),
    "no weights": (6, 2, 72, True, False, False, "bf16"),
    "more choices than a batch": (2, 19, 40, False, False, True, "bf16"),
    "float32": (7, 4, 136, True, True, True, "fp32"),
}


class Case:
    def __init__(self, tokens, top_k, hidden, shared, gate, weighted, compute):
        rng = np.random.default_rng(0)

        def values(*shape):
            drawn = rng.standard_normal(shape).astype(np.float32)
            return bf16_bits(drawn) if compute == "bf16" else drawn

        nan = np.uint16(0x7FC0) if compute == "bf16" else np.float32("nan")
        self.rows = values(tokens * top_k, hidden)
        self.ids = rng.integers(0, 8, tokens * top_k).astype(np.int32)
        self.ids[rng.random(self.ids.size) < 0.25] = -1
        # What is no route may hold anything.
        self.rows[self.ids < 0] = nan
        self.weights = None
        if weighted:
            self.weights = rng.random(self.ids.size).astype(np.float32)
            self.weights[self.ids < 0] = np.nan
        self.shared = values(tokens, hidden) if shared else None
        self.gate = rng.random(tokens).astype(np.float32) if gate else None
        self.out = np.full((tokens, hidden), nan, self.rows.dtype)
        self.expected = np.empty_like(self.out)
        for token in range(tokens):
            rows, weights = [], []
            if shared:
                rows.append(self.shared[token])
                weights.append(self.gate[token] if gate else 1.0)
            for slot in range(token * top_k, (token + 1) * top_k):
                if self.ids[slot] >= 0:
                    rows.append(self.rows[slot])
                    weights.append(self.weights[slot] if weighted else 1.0)
            self.expected[token] = _C.kernels.weighted_sum(
                "avx2", compute, rows, np.array(weights, np.float32), hidden
            )

    def run(self, emulator, options):
        out = self.out.copy()
        result = emulator.weighted_sum(
            self.rows, self.shared, self.gate, self.ids, self.weights, out, options
        )
        np.testing.assert_array_equal(out.view(f"u{out.itemsize}"), self.bits(self.expected))
        assert result.warnings == []
        return result

    @staticmethod
    def bits(array):
        return array.view(f"u{array.itemsize}")


@pytest.mark.skipif("avx2" not in _C.kernels.available(), reason="this processor has no avx2")
@pytest.mark.parametrize("name", CASES)
def test_equals_the_executor(emulator, name):
    case = Case(*CASES[name])
    for seed in range(SEEDS):
        case.run(emulator, emulator.RunOptions(seed=seed))
