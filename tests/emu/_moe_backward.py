"""A layer's backward pass on emulated ranks, and what the CPU executor's kernels make of it.

The reference takes each expert's rows, in the order (rank, slot), through the executor's products,
elementwise rows and gradient stores; tiles, rings, chunks and ranks are unknown to it.
"""

import dataclasses

import numpy as np

from mok import _C
from tests.emu._moe_forward import (
    ISA,
    NAMES,
    Data,
    Expected,
    Layer,
    assert_equal,
    bf16_bits,
    bf16_values,
    layer_numbers,
    rank_inputs,
    ring_rows,
    untouched,
    worst_case_rows,
)

GRADIENT_BITS = {"x": 1, "weights": 2, "shared_weight": 4}
GRADIENT_BITS |= {f"w_{name}": 8 << m for m, name in enumerate(NAMES)}
GRADIENT_BITS |= {f"b_{name}": 64 << m for m, name in enumerate(NAMES)}
GRADIENT_BITS |= {f"shared_w_{name}": 512 << m for m, name in enumerate(NAMES)}
BIAS_BLOCK = 128
UNTOUCHED_FLOAT = np.float32(np.nan)


@dataclasses.dataclass
class BackwardLayer(Layer):
    gradients: tuple[str, ...] = tuple(GRADIENT_BITS)
    """Those a layer without the part has are left out."""
    float32: tuple[str, ...] = ()
    """Gradients in FP32."""
    accumulate: bool = False
    shared_weighted: bool = True

    def wants(self, name: str) -> bool:
        if name.startswith("shared") and not self.shared:
            return False
        return name in self.gradients and (self.biases or not name.startswith("b_"))

    @property
    def mask(self) -> int:
        return sum(bit for name, bit in GRADIENT_BITS.items() if self.wants(name))


class BackwardData(Data):
    """Random inputs of a layer, and what lies in the gradients' memory before the pass."""

    def __init__(self, layer: BackwardLayer):
        super().__init__(layer)
        rng = np.random.default_rng([layer.seed, 1])

        def normal(*shape):
            return rng.standard_normal(shape).astype(np.float32)

        self.dout = [bf16_bits(normal(tokens, layer.hidden)) for tokens in layer.tokens]
        self.weights = [normal(tokens, layer.top_k) for tokens in layer.tokens]
        for weights in self.weights:
            weights[rng.random(weights.shape) < 0.1] = 0.0
        self.shared_weight = None
        if layer.shared and layer.shared_weighted:
            self.shared_weight = [normal(tokens) for tokens in layer.tokens]
        self.before = {}
        for name in GRADIENT_BITS:
            if name in ("x", "weights", "shared_weight") or not layer.wants(name):
                continue
            value = self.parameter(name)
            shape = (layer.num_ranks, *value.shape) if name.startswith("shared") else value.shape
            values = normal(*shape)
            self.before[name] = values if name in layer.float32 else bf16_bits(values)

    def parameter(self, name: str) -> np.ndarray:
        if name.startswith("shared"):
            return self.shared[NAMES.index(name.removeprefix("shared_w_"))]
        if name.startswith("b_"):
            return self.biases[NAMES.index(name.removeprefix("b_"))]
        return getattr(self, name.removeprefix("w_"))


def product(a, b) -> np.ndarray:
    """a [M, K] b [N, K]^T of BF16 bits, FP32 sums over ascending K."""
    c = np.zeros((len(a), len(b)), np.float32)
    _C.kernels.gemm(ISA, "bf16", a, b, c)
    return c


def column_sums(rows, weights) -> np.ndarray:
    total = np.zeros(rows.shape[1], np.float32)
    for begin in range(0, len(rows), BIAS_BLOCK):
        partial = np.zeros_like(total)
        for row in range(begin, min(begin + BIAS_BLOCK, len(rows))):
            weight = 1.0 if weights is None else float(weights[row])
            _C.kernels.axpy(ISA, "bf16", weight, rows[row], partial)
        total += partial
    return total


class ExpertBackward:
    """One expert's gradients from its rows: x, dout [n, H], g, u [n, width], w [n]."""

    def __init__(self, layer, x, dout, g, u, w, matrices, b_down=None):
        gate, up, down = matrices
        a = product(dout, down.T)
        self.dg, self.du, self.hidden = np.empty_like(g), np.empty_like(g), np.empty_like(g)
        self.dw = np.zeros(len(x), np.float32)
        for row in range(len(x)):
            dg, du, hidden, partials = _C.kernels.activation_backward(
                ISA, "bf16", layer.activation, layer.limit, g[row], u[row], a[row], float(w[row])
            )
            self.dg[row], self.du[row], self.hidden[row] = dg, du, hidden
            for partial in partials:
                self.dw[row] += partial
            if b_down is not None:
                self.dw[row] += np.float32(
                    _C.kernels.dot(ISA, "bf16", dout[row], bf16_values(b_down))
                )
        sums = product(self.dg, gate.T)
        _C.kernels.gemm(ISA, "bf16", self.du, up.T, sums, accumulate=True)
        self.dx = _C.kernels.store(ISA, "bf16", sums.ravel()).reshape(sums.shape)
        self.sums = {
            "w_gate": lambda: product(self.dg.T, x.T),
            "w_up": lambda: product(self.du.T, x.T),
            "w_down": lambda: product(dout.T, self.hidden.T),
            "b_gate": lambda: column_sums(self.dg, None),
            "b_up": lambda: column_sums(self.du, None),
            "b_down": lambda: column_sums(dout, w),
        }

    def store(self, name: str, out: np.ndarray, accumulate: bool) -> np.ndarray:
        rows = out.reshape(-1).copy()
        sums = np.ascontiguousarray(self.sums[name]()).reshape(-1)
        _C.kernels.store_gradient(ISA, sums, rows, accumulate)
        return rows.reshape(out.shape)


class ExpectedBackward:
    """Every output of every rank; what no kernel writes is untouched."""

    def __init__(self, data: BackwardData):
        layer = self.layer = data.layer
        self.data = data
        self.forward = Expected(data)
        slots = layer.max_tokens * layer.top_k
        self.home = np.full((layer.num_ranks, slots, layer.hidden), untouched(1)[0], np.uint16)
        self.dw = np.full((layer.num_ranks, slots), UNTOUCHED_FLOAT)
        self.gradients = {name: value.copy() for name, value in data.before.items()}
        if not layer.accumulate:
            for value in self.gradients.values():
                value[:] = 0
        for expert in range(layer.num_experts):
            self.add_expert(expert)
        self.shared_dx, self.shared_dw = [], []
        for rank in range(layer.num_ranks if layer.shared else 0):
            self.add_shared(rank)

    def add_expert(self, expert: int) -> None:
        layer, data = self.layer, self.data
        places = [
            (rank, *place)
            for rank, ids in enumerate(data.ids)
            for place in np.argwhere(ids == expert).tolist()
        ]
        if not places:
            return
        rank, token, choice = np.array(places).T
        slot = token * layer.top_k + choice

        def pick(arrays):
            return np.stack([arrays[r][t] for r, t in zip(rank, token, strict=True)])

        result = ExpertBackward(
            layer,
            pick(data.x),
            pick(data.dout),
            self.forward.gate[rank, slot],
            self.forward.up[rank, slot],
            np.array([data.weights[r][t, c] for r, t, c in places], np.float32),
            (data.gate[expert], data.up[expert], data.down[expert]),
            None if data.biases is None else data.biases[2][expert],
        )
        if layer.wants("x"):
            self.home[rank, slot] = result.dx
        if layer.wants("weights"):
            self.dw[rank, slot] = result.dw
        for name, value in self.gradients.items():
            if not name.startswith("shared"):
                value[expert] = result.store(name, data.before[name][expert], layer.accumulate)

    def add_shared(self, rank: int) -> None:
        layer, data = self.layer, self.data
        gate, up, _ = self.forward.shared[rank]
        weight = np.ones(layer.tokens[rank], np.float32)
        if data.shared_weight is not None:
            weight = data.shared_weight[rank]
        if layer.tokens[rank] == 0:
            self.shared_dx.append(None)
            self.shared_dw.append(None)
            return
        matrices = [matrix[0] for matrix in data.shared]
        result = ExpertBackward(layer, data.x[rank], data.dout[rank], gate, up, weight, matrices)
        self.shared_dx.append(result.dx)
        self.shared_dw.append(result.dw)
        for name, value in self.gradients.items():
            if name.startswith("shared"):
                value[rank, 0] = result.store(
                    name.removeprefix("shared_"), data.before[name][rank, 0], layer.accumulate
                )


def make_rank(expected: ExpectedBackward, r: int) -> dict:
    layer, data = expected.layer, expected.data
    own = slice(r * layer.local_experts, (r + 1) * layer.local_experts)
    rank = rank_inputs(data, r) | {"dout": data.dout[r], "weights": data.weights[r]}
    rank["home_weight_grads"] = np.full(layer.max_tokens * layer.top_k, UNTOUCHED_FLOAT)
    if layer.save != "none":
        save_rows = min(ring_rows(layer), worst_case_rows(layer))
        saved = expected.forward.saved(r, save_rows)
        rank["saved_gate"], rank["saved_up"] = saved["gate"], saved["up"]
        if layer.save == "all":
            rank["saved_x"] = saved["x"]
    if layer.shared:
        rank["shared_weight_grads"] = np.full(layer.tokens[r], UNTOUCHED_FLOAT)
        if data.shared_weight is not None:
            rank["shared_weight"] = data.shared_weight[r]
        if layer.save != "none":
            rank["saved_shared_gate"], rank["saved_shared_up"], _ = expected.forward.shared[r]
    for name, before in data.before.items():
        value = before[r] if name.startswith("shared") else before[own]
        rank[name.replace("w_", "dw_").replace("b_", "db_")] = value.copy()
    return rank


def backward_numbers(layer: BackwardLayer) -> dict:
    return layer_numbers(layer) | {"gradients": layer.mask, "accumulate": layer.accumulate}


def assert_bits(what: str, found: np.ndarray, wanted: np.ndarray) -> None:
    if found.dtype == np.float32:
        found, wanted = found.view(np.uint32), wanted.view(np.uint32)
    assert_equal(what, found, wanted)


def check(emulator, expected: ExpectedBackward, options) -> object:
    """Runs the kernels and compares every bit of every output; returns the run's result."""
    layer = expected.layer
    ranks = [make_rank(expected, r) for r in range(layer.num_ranks)]
    result = emulator.moe_backward(backward_numbers(layer), ranks, options)
    for r, rank in enumerate(ranks):
        own = slice(r * layer.local_experts, (r + 1) * layer.local_experts)
        assert_bits(f"rank {r}: dx rows", rank["home_rows"], expected.home[r])
        assert_bits(f"rank {r}: router gradients", rank["home_weight_grads"], expected.dw[r])
        for name, value in expected.gradients.items():
            found = rank[name.replace("w_", "dw_").replace("b_", "db_")]
            wanted = value[r] if name.startswith("shared") else value[own]
            assert_bits(f"rank {r}: gradient of {name}", found, wanted)
        if layer.shared and layer.tokens[r]:
            if layer.wants("x"):
                assert_bits(f"rank {r}: shared dx", rank["shared_rows"], expected.shared_dx[r])
            if layer.wants("shared_weight"):
                found = rank["shared_weight_grads"]
                assert_bits(f"rank {r}: gate's gradient", found, expected.shared_dw[r])
    return result
