"""A layer's forward pass on emulated ranks, and what the CPU executor's kernels make of it.

Arrays of BF16 are uint16 bit patterns. The reference knows nothing of tiles, rings or ranks: it
takes each expert's tokens through the executor's products and elementwise rows.
"""

import dataclasses

import numpy as np
import pytest

from mok import _C
from tests.ptx_cases import bf16_bits, bf16_values

# wgmma is emulated with one fused multiply-add after another, as this table multiplies.
ISA = "avx2"
needs_isa = pytest.mark.skipif(
    ISA not in _C.kernels.available(), reason=f"this processor has no {ISA}"
)
ACTIVATIONS = ("swiglu", "swiglu_limit", "gpt_oss")
SAVES = ("none", "gate_up", "all")
NAMES = ("gate", "up", "down")
BLOCK, HALF = 128, 64
UNTOUCHED = 0x7FB3  # a NaN that no kernel writes


@dataclasses.dataclass
class Layer:
    """One layer on R = len(tokens) ranks."""

    tokens: tuple[int, ...]
    num_experts: int = 4
    top_k: int = 2
    hidden: int = 72
    intermediate: int = 136
    shared: int = 0
    biases: bool = False
    activation: str = "swiglu"
    save: str = "none"
    ring_rows: int | None = None
    view: str = "separate"
    none_share: float = 0.1
    """Of the routes are -1."""
    skew: float = 0.0
    """Of the routes go to expert 0."""
    recompute: bool = False
    lose_pulls: bool = False
    """Nobody fetches x, so that waits for it expire."""
    num_blocks: int = 2
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def max_tokens(self) -> int:
        return max(*self.tokens, 1)

    @property
    def limit(self) -> float:
        return 0.0 if self.activation == "swiglu" else 1.5


class Data:
    """Random inputs of a layer."""

    def __init__(self, layer: Layer):
        self.layer = layer
        rng = np.random.default_rng(layer.seed)

        def normal(*shape, scale=1.0):
            return bf16_bits((scale * rng.standard_normal(shape)).astype(np.float32))

        E, H, I, J = layer.num_experts, layer.hidden, layer.intermediate, layer.shared
        self.x = [normal(tokens, H) for tokens in layer.tokens]
        self.ids = []
        for tokens in layer.tokens:
            ids = np.array([rng.permutation(E)[: layer.top_k] for _ in range(tokens)], np.int32)
            ids = ids.reshape(tokens, layer.top_k)
            ids[rng.random(ids.shape) < layer.skew] = 0
            ids[rng.random(ids.shape) < layer.none_share] = -1
            self.ids.append(ids)
        self.gate, self.up = normal(E, I, H, scale=H**-0.5), normal(E, I, H, scale=H**-0.5)
        self.down = normal(E, H, I, scale=I**-0.5)
        self.shared = None
        if J:
            self.shared = (normal(1, J, H), normal(1, J, H), normal(1, H, J, scale=J**-0.5))
        self.biases = (normal(E, I), normal(E, I), normal(E, H)) if layer.biases else None


def run_expert(layer: Layer, x, gate, up, down, biases=None):
    """x [n, H] -> g, u [n, width], y [n, H] of one expert, by the executor's kernels."""
    n, hidden = x.shape
    width = gate.shape[0]
    b_gate, b_up, b_down = (None, None, None) if biases is None else map(bf16_values, biases)

    def product(a, b, columns):
        c = np.zeros((n, columns), np.float32)
        _C.kernels.gemm(ISA, "bf16", a, np.ascontiguousarray(b), c)
        return c

    def rows_of(bias):
        return None if bias is None else np.tile(bias, n)

    if n == 0:
        return np.zeros((0, width), np.uint16), np.zeros((0, width), np.uint16), np.copy(x)
    g, u, h = _C.kernels.activation_forward(
        ISA,
        "bf16",
        layer.activation,
        layer.limit,
        product(x, gate, width).ravel(),
        product(x, up, width).ravel(),
        rows_of(b_gate),
        rows_of(b_up),
    )
    g, u, h = (value.reshape(n, width) for value in (g, u, h))
    y = _C.kernels.store(ISA, "bf16", product(h, down, hidden).ravel(), rows_of(b_down))
    return g, u, y.reshape(n, hidden)


class Expected:
    """Every output of every rank; what no kernel writes is UNTOUCHED."""

    def __init__(self, data: Data):
        layer = self.layer = data.layer
        self.data = data
        slots = layer.max_tokens * layer.top_k
        shape = (layer.num_ranks, slots)
        self.home = np.full((*shape, layer.hidden), UNTOUCHED, np.uint16)
        self.gate = np.zeros((*shape, layer.intermediate), np.uint16)  # of a route, by its slot
        self.up = np.zeros_like(self.gate)
        for expert in range(layer.num_experts):
            places = [
                (rank, *place)
                for rank, ids in enumerate(data.ids)
                for place in np.argwhere(ids == expert).tolist()
            ]
            if not places:
                continue
            rank, token, choice = np.array(places).T
            x = np.stack([data.x[r][t] for r, t in zip(rank, token, strict=True)])
            biases = None if data.biases is None else [b[expert] for b in data.biases]
            g, u, y = run_expert(
                layer, x, data.gate[expert], data.up[expert], data.down[expert], biases
            )
            slot = token * layer.top_k + choice
            self.gate[rank, slot], self.up[rank, slot] = g, u
            if not layer.recompute:
                self.home[rank, slot] = y
        self.shared = [
            run_expert(layer, x, *(w[0] for w in data.shared)) if layer.shared else None
            for x in data.x
        ]

    def saved(self, rank: int, save_rows: int) -> dict[str, np.ndarray]:
        """x, gate and up of the first chunk: padding of stored rows is zero."""
        layer, data = self.layer, self.data
        plan = _C.build_plan(data.ids, rank, layer.num_experts)
        bounds = _C.chunk_bounds(plan["segment_begin"], ring_rows(layer))
        end = int(bounds[1]) if len(bounds) > 1 else 0
        peer, slot = plan["row_peer"][:end], plan["row_slot"][:end]
        valid = peer >= 0
        halves = valid.reshape(-1, HALF).any(1).repeat(HALF)  # stored half by half
        result = {}
        for name, width in (("gate", layer.intermediate), ("up", layer.intermediate)):
            rows = np.full((save_rows, width), UNTOUCHED, np.uint16)
            rows[:end][halves] = 0
            rows[:end][valid] = getattr(self, name)[peer[valid], slot[valid]]
            result[name] = rows
        rows = np.full((save_rows, layer.hidden), UNTOUCHED, np.uint16)
        rows[:end] = 0
        for row in np.flatnonzero(valid):
            rows[row] = data.x[peer[row]][slot[row] // layer.top_k]
        result["x"] = rows
        return result


def ring_rows(layer: Layer) -> int:
    if layer.ring_rows is not None:
        return layer.ring_rows
    return _C.default_ring_rows(
        layer.num_ranks, layer.num_experts, layer.top_k, layer.max_tokens, BLOCK
    )


def untouched(*shape: int) -> np.ndarray:
    return np.full(shape, UNTOUCHED, np.uint16)


def weight_arguments(layer: Layer, gate, up, down, prefix: str = "") -> dict[str, tuple]:
    """w_*: (array, first row, row step, rows) of the three matrices as the layer's view of them."""
    rows, hidden = gate.shape[1], down.shape[1]
    if layer.view == "packed":
        both = np.concatenate([gate, up], axis=1)
        views = [(both, 0, 1, rows), (both, rows, 1, rows)]
    elif layer.view == "interleaved":
        both = np.stack([gate, up], axis=2).reshape(len(gate), 2 * rows, hidden)
        views = [(both, 0, 2, rows), (both, 1, 2, rows)]
    else:
        views = [(gate, 0, 1, rows), (up, 0, 1, rows)]
    return {
        f"{prefix}w_{name}": (np.ascontiguousarray(array), *rest)
        for name, (array, *rest) in zip(NAMES, [*views, (down, 0, 1, hidden)], strict=True)
    }


def rank_inputs(data: Data, r: int) -> dict:
    """What a rank brings to either pass, and where its rows come home."""
    layer = data.layer
    own = slice(r * layer.local_experts, (r + 1) * layer.local_experts)
    rank = {"x": data.x[r], "ids": data.ids[r]}
    rank |= weight_arguments(layer, data.gate[own], data.up[own], data.down[own])
    if data.biases is not None:
        for name, bias in zip(NAMES, data.biases, strict=True):
            rank[f"b_{name}"] = np.ascontiguousarray(bias[own])
    rank["home_rows"] = untouched(layer.max_tokens * layer.top_k, layer.hidden)
    if layer.shared:
        rank |= weight_arguments(layer, *data.shared, prefix="shared_")
        rank["shared_rows"] = untouched(layer.tokens[r], layer.hidden)
    return rank


def layer_numbers(layer: Layer) -> dict:
    return {
        "num_experts": layer.num_experts,
        "top_k": layer.top_k,
        "max_tokens": layer.max_tokens,
        "hidden": layer.hidden,
        "intermediate": layer.intermediate,
        "shared_intermediate": layer.shared,
        "ring_rows": ring_rows(layer),
        "save": SAVES.index(layer.save),
        "activation": ACTIVATIONS.index(layer.activation),
        "limit": layer.limit,
        "num_blocks": layer.num_blocks,
        "lose_pulls": layer.lose_pulls,
    }


def make_rank(data: Data, r: int) -> dict:
    layer, tokens = data.layer, data.layer.tokens[r]
    rank = rank_inputs(data, r) | {"limits": np.zeros(80, np.uint32)}
    if layer.save != "none":
        save_rows = min(ring_rows(layer), worst_case_rows(layer))
        rank["saved_gate"] = untouched(save_rows, layer.intermediate)
        rank["saved_up"] = untouched(save_rows, layer.intermediate)
        if layer.save == "all":
            rank["saved_x"] = untouched(save_rows, layer.hidden)
        if layer.shared:
            rank["saved_shared_gate"] = untouched(tokens, layer.shared)
            rank["saved_shared_up"] = untouched(tokens, layer.shared)
    return rank


def worst_case_rows(layer: Layer) -> int:
    return _C.worst_case_rows(
        layer.num_ranks, layer.num_experts, layer.top_k, layer.max_tokens, BLOCK
    )


def run(
    emulator, data: Data, options, has_ended: int = 0, trace: tuple[int, int] | None = None
) -> tuple[list[dict], object]:
    """One pass on all ranks: the ranks with their outputs filled, and the emulator's result.

    `trace`: entries for tasks and for batches of pulls, to record the time line.
    """
    layer = data.layer
    ranks = [make_rank(data, r) for r in range(layer.num_ranks)]
    for rank in ranks:
        rank["limits"][0] = has_ended
        if trace is not None:
            rank["trace"] = np.full((1 + sum(trace), 64), 0xFF, np.uint8)
            rank["trace_tasks"] = trace[0]
    numbers = layer_numbers(layer) | {"recompute": layer.recompute}
    return ranks, emulator.moe_forward(numbers, ranks, options)


def assert_equal(what: str, found: np.ndarray, wanted: np.ndarray) -> None:
    differing = np.argwhere(found != wanted)
    if len(differing):
        at = tuple(differing[0].tolist())
        raise AssertionError(
            f"{what}: {len(differing)} of {found.size} differ, the first at {at}: "
            f"{found[at]:#06x}, not {wanted[at]:#06x}"
        )


def check(emulator, expected: Expected, options):
    """Runs the kernels and compares every bit of every output; returns the emulator's result."""
    layer = expected.layer
    ranks, result = run(emulator, expected.data, options)
    assert not result.trapped
    for r, rank in enumerate(ranks):
        assert_equal(f"rank {r}: home rows", rank["home_rows"], expected.home[r])
        if layer.shared and layer.tokens[r]:
            gate, up, y = expected.shared[r]
            if not layer.recompute:
                assert_equal(f"rank {r}: shared rows", rank["shared_rows"], y)
            if layer.save != "none":
                assert_equal(f"rank {r}: shared gate", rank["saved_shared_gate"], gate)
                assert_equal(f"rank {r}: shared up", rank["saved_shared_up"], up)
        if layer.save != "none":
            saved = expected.saved(r, len(rank["saved_gate"]))
            assert_equal(f"rank {r}: gate", rank["saved_gate"], saved["gate"])
            assert_equal(f"rank {r}: up", rank["saved_up"], saved["up"])
        if layer.save == "all":
            assert_equal(f"rank {r}: x", rank["saved_x"], saved["x"])
    return result
