"""Wrappers of csrc/ptx that copy: bulk, tensor and multicast copies, clusters."""

import re
from dataclasses import dataclass

import numpy as np
import pytest

from tests.ptx_cases._runner import Case, Runner, bf16_bits, bf16_values, filled

SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}  # as tensor maps number them
PLAIN, HINT, REDUCE = 0, 1, 2


def swizzled(lines: np.ndarray, swizzle: int) -> np.ndarray:
    """Raw bytes of a tile whose lines (rows of bytes, as wide as the swizzle) follow one another.

    16-byte piece p of line l goes to piece p xor (the low bits of the number of the 128 bytes that
    the line lies in); the tile starts at a multiple of 1024.
    """
    width = SWIZZLE_BYTES[swizzle]
    if width == 0:
        return lines.ravel()
    assert lines.shape[1] == width
    pieces = lines.reshape(-1, 16)
    index = np.arange(len(pieces))
    mask = width // 16 - 1
    target = index ^ ((index * 16 >> 7) & mask)
    raw = np.empty_like(pieces)
    raw[target] = pieces
    return raw.ravel()


def check_bulk_copies_and_reductions(runner: Runner, chunk: int, hint: bool) -> None:
    source = (np.arange(chunk // 4 * 5) % 1009).astype(np.float32)
    copy, total = filled(len(source), dtype=np.float32), source * 2
    runner.run("bulk", [source], [chunk, int(hint)], [copy, total])
    np.testing.assert_array_equal(copy, source + 1)
    np.testing.assert_array_equal(total, source * 4 + 2)


@dataclass(frozen=True)
class TensorCopy:
    """One box from `source` at `load_at` to `target` at `store_at`; all innermost first."""

    sizes: tuple[int, int, int]
    box: tuple[int, int, int]
    load_at: tuple[int, int, int]
    target_sizes: tuple[int, int, int]
    store_at: tuple[int, int, int]
    swizzle: int = 0
    is_bf16: bool = True
    dims: int = 2
    mode: int = PLAIN

    @property
    def numbers(self) -> list[int]:
        shapes = (self.sizes, self.box, self.load_at, self.target_sizes, self.store_at)
        numbers = [self.element_bytes, self.dims, self.swizzle, self.mode]
        return numbers + [extent for shape in shapes for extent in shape]

    @property
    def element_bytes(self) -> int:
        return 2 if self.is_bf16 else 4

    def encoded(self, values: np.ndarray) -> np.ndarray:
        values = values.astype(np.float32)
        return bf16_bits(values) if self.is_bf16 else values

    def decoded(self, array: np.ndarray) -> np.ndarray:
        return bf16_values(array) if self.is_bf16 else array


COPIES = {
    "128B": TensorCopy((256, 200, 1), (64, 64, 1), (64, 32, 0), (64, 64, 1), (0, 0, 0), 3),
    "64B": TensorCopy((256, 200, 1), (32, 64, 1), (64, 32, 0), (64, 64, 1), (32, 0, 0), 2),
    "32B": TensorCopy((256, 200, 1), (16, 256, 1), (64, 0, 0), (64, 256, 1), (16, 0, 0), 1),
    "no swizzle": TensorCopy((256, 200, 1), (40, 9, 1), (8, 32, 0), (64, 64, 1), (16, 0, 0), 0),
    "fp32 128B": TensorCopy(
        (96, 40, 1), (32, 40, 1), (32, 0, 0), (32, 40, 1), (0, 0, 0), 3, is_bf16=False
    ),
    "past the end": TensorCopy((72, 70, 1), (64, 64, 1), (64, 64, 0), (72, 70, 1), (64, 64, 0), 3),
    # Only loads may begin before 0.
    "before 0": TensorCopy((72, 70, 1), (64, 64, 1), (-16, -5, 0), (72, 70, 1), (8, 3, 0), 3),
    "load outside": TensorCopy((64, 64, 1), (64, 64, 1), (0, 64, 0), (64, 64, 1), (0, 0, 0), 3),
    "store outside": TensorCopy((64, 64, 1), (64, 64, 1), (0, 0, 0), (64, 64, 1), (64, 0, 0), 3),
    "hint": TensorCopy((256, 200, 1), (64, 8, 1), (8, 8, 0), (64, 64, 1), (0, 3, 0), 3, mode=HINT),
    "fp32 sum": TensorCopy(
        (64, 64, 1),
        (32, 64, 1),
        (8, 0, 0),
        (40, 60, 1),
        (12, 0, 0),
        3,
        is_bf16=False,
        mode=REDUCE,
    ),
    "bf16 sum": TensorCopy(
        (64, 64, 1), (64, 64, 1), (0, 0, 0), (64, 64, 1), (0, 1, 0), 3, mode=REDUCE
    ),
    "stack": TensorCopy((64, 20, 3), (64, 16, 1), (0, 12, 1), (64, 10, 3), (0, 4, 2), 3, dims=3),
    "stack 64B": TensorCopy((40, 9, 4), (32, 3, 2), (16, 8, 3), (40, 9, 4), (8, 0, 3), 2, dims=3),
}


def window(tensor: np.ndarray, at: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """The box at `at` (innermost first) of tensor [z, y, x], zeros outside."""
    result = np.zeros(box[::-1], tensor.dtype)
    for z, y, x in np.ndindex(result.shape):
        place = (z + at[2], y + at[1], x + at[0])
        if all(0 <= p < size for p, size in zip(place, tensor.shape, strict=True)):
            result[z, y, x] = tensor[place]
    return result


def check_tensor_copy(runner: Runner, case: TensorCopy) -> None:
    # Integers that BF16 holds exactly, sums of two as well.
    source = np.arange(np.prod(case.sizes)).reshape(case.sizes[::-1]) % 101 + 1.0
    before = np.arange(np.prod(case.target_sizes)).reshape(case.target_sizes[::-1]) % 17 - 40.0
    target = case.encoded(before)
    raw = filled(int(np.prod(case.box)) * case.element_bytes // 4)
    runner.run("tma", [case.encoded(source)], case.numbers, [raw, target])

    tile = window(source, case.load_at, case.box)
    lines = case.encoded(tile).view(np.uint8).reshape(-1, case.box[0] * case.element_bytes)
    np.testing.assert_array_equal(raw.view(np.uint8), swizzled(lines, case.swizzle))

    expected = before.copy()
    for z, y, x in np.ndindex(tile.shape):
        place = (z + case.store_at[2], y + case.store_at[1], x + case.store_at[0])
        if all(0 <= p < size for p, size in zip(place, expected.shape, strict=True)):
            added = expected[place] if case.mode == REDUCE else 0
            expected[place] = tile[z, y, x] + added
    np.testing.assert_array_equal(case.decoded(target), expected)


def check_sums_round_once(runner: Runner, is_bf16: bool) -> None:
    """To nearest, ties to even, subnormal numbers kept."""
    width = 64 if is_bf16 else 32
    case = TensorCopy(
        *((width, 64, 1), (width, 64, 1), (0, 0, 0)),
        *((width, 64, 1), (0, 0, 0), 3, is_bf16),
        mode=REDUCE,
    )
    generator = np.random.default_rng(4)
    source, before = (
        generator.standard_normal((64, width)) * 2.0 ** generator.integers(-9, 9, (64, width))
        for _ in range(2)
    )
    source[0, :4] = [1e-40, -1e-40, 1.5e-38, np.inf]
    before[0, :4] = [1.0, -1e-40, -1.4e-38, 1.0]
    addend, target = case.encoded(source), case.encoded(before)
    exact = case.decoded(addend).astype(np.float64) + case.decoded(target)
    expected = case.decoded(case.encoded(exact.astype(np.float32)))
    raw = filled(64 * width * case.element_bytes // 4)
    runner.run("tma", [addend], case.numbers, [raw, target])
    np.testing.assert_array_equal(case.decoded(target), expected)


def check_cluster(runner: Runner, clusters: int) -> None:
    blocks = 2 * clusters
    tiles = bf16_bits(np.random.default_rng(0).standard_normal((clusters, 64, 64)))
    out, copies = filled(blocks, 256), filled(blocks, 64, 64, dtype=np.uint16)
    runner.run("cluster", [tiles], [clusters], [out, copies])
    block = np.arange(blocks)
    peer = block ^ 1
    expected = np.concatenate(
        [
            peer[:, None] * 1000 + (np.arange(128) + 1) % 128,  # the neighbour's words
            7000 + peer[:, None],  # released to it at cluster scope
            peer[:, None] + np.arange(0, 40, 10),  # sent by st.async
            np.ones((blocks, 1), int),  # a plain arrival came
            block[:, None] % 2,
            np.full((blocks, 1), 2),
        ],
        axis=1,
    )
    np.testing.assert_array_equal(out[:, : expected.shape[1]], expected)
    np.testing.assert_array_equal(copies, tiles.repeat(2, axis=0))


def check_many_clusters(runner: Runner) -> None:
    check_cluster(runner, 40 if runner.is_device else 6)


def check_a_trapping_coordinate_is_refused(
    runner: Runner, load_at: tuple[int, ...], store_at: tuple[int, ...], message: str
) -> None:
    case = TensorCopy((64, 64, 1), (64, 64, 1), load_at, (64, 64, 1), store_at, 3)
    source, target = np.zeros((64, 64), np.uint16), np.zeros((64, 64), np.uint16)
    with pytest.raises(ValueError, match=re.escape(message)):
        runner.run("tma", [source], case.numbers, [filled(2048), target])


TRAPS = (
    ((0, 0, 0), (-8, 0, 0), "stores at -8, 0, 0: a store must not begin before 0"),
    ((0, 0, 0), (0, -1, 0), "stores at 0, -1, 0: a store must not begin before 0"),
    ((0, 0, 0), (4, 0, 0), "stores at 4, 0, 0: the first must be a multiple of 8 elements"),
    ((9, 0, 0), (0, 0, 0), "loads at 9, 0, 0: the first must be a multiple of 8 elements"),
)


def check_an_impossible_tensor_map_is_refused(
    runner: Runner, sizes: tuple[int, ...], box: tuple[int, ...], swizzle: int, message: str
) -> None:
    case = TensorCopy(sizes, box, (0, 0, 0), (64, 64, 1), (0, 0, 0), swizzle)
    arrays = np.zeros(np.prod(sizes), np.uint16), np.zeros((64, 64), np.uint16)
    raw = filled(int(np.prod(box)) // 2 + 1)
    with pytest.raises(ValueError, match=re.escape(f"tensor map: {message}")):
        runner.run("tma", [arrays[0]], case.numbers, [raw, arrays[1]])


MAPS = (
    ((60, 64, 1), (64, 64, 1), 3, "dimension 1 has a stride of 120 bytes; it must be a multiple"),
    ((64, 300, 1), (64, 257, 1), 3, "box[1] is 257; it must be 1 to 256 elements"),
    ((64, 64, 1), (12, 64, 1), 0, "box[0] is 12 elements of 2 bytes; a line of the box must be a"),
    ((64, 64, 1), (32, 64, 1), 3, "box[0] is 32 elements of 2 bytes; a line of the box must be as"),
    ((64, 0, 1), (64, 64, 1), 3, "dimension 1 has 0 elements; it must have 1 to 2^32"),
)

CASES = (
    *(
        Case(
            f"bulk of {chunk}{' with a hint' * hint}",
            check_bulk_copies_and_reductions,
            (chunk, hint),
        )
        for chunk in (16, 144, 4096, 65536)
        for hint in (False, True)
    ),
    *(
        Case(f"tensor copy, {name}", check_tensor_copy, (copy,), may_trap=True)
        for name, copy in COPIES.items()
    ),
    Case("bf16 sums round once", check_sums_round_once, (True,), may_trap=True),
    Case("fp32 sums round once", check_sums_round_once, (False,), may_trap=True),
    *(
        Case(f"clusters, {clusters}", check_cluster, (clusters,), may_trap=True)
        for clusters in (1, 3)
    ),
    Case("clusters, many", check_many_clusters, may_trap=True),
    *(
        Case(f"refused: {message}", check_a_trapping_coordinate_is_refused, (load, store, message))
        for load, store, message in TRAPS
    ),
    *(
        Case(f"refused map: {arguments[-1]}", check_an_impossible_tensor_map_is_refused, arguments)
        for arguments in MAPS
    ),
)
