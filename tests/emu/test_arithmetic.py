"""The emulator's arithmetic without the machine: operands, products, boxes, the sigmoid."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mok
from tests.ptx_cases import bf16_bits, bf16_values
from tests.ptx_cases.copies import swizzled

WIDTHS = {1: 128, 2: 64, 3: 32}  # by wgmma's code of a swizzle
MAP_SWIZZLES = {16: 0, 32: 1, 64: 2, 128: 3}
B_ADDRESS = 0x10000


def executor_isa() -> str:
    """The CPU executor's table whose products are chains of FMAs over ascending k."""
    if "avx2" not in mok._C.kernels.available():
        pytest.skip(
            "this processor has no AVX2, whose table of the executor has the emulator's bits"
        )
    return "avx2"


def descriptor(address: int, leading: int, stride: int, code: int) -> int:
    return address >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | code << 62


def place(
    shared: np.ndarray, address: int, bits_MK: np.ndarray, code: int, mn_major: bool
) -> list[int]:
    """Lays a BF16 operand out in panels of swizzled lines; the descriptors of its k16 steps."""
    width = WIDTHS[code]
    lines = np.ascontiguousarray(bits_MK.T if mn_major else bits_MK).view(np.uint8)
    panel_bytes = len(lines) * width
    for i in range(lines.shape[1] // width):
        panel = np.ascontiguousarray(lines[:, i * width : (i + 1) * width])
        begin = address + i * panel_bytes
        shared[begin : begin + panel_bytes] = swizzled(panel, MAP_SWIZZLES[width])
    steps = range(bits_MK.shape[1] // 16)
    if mn_major:
        return [descriptor(address + s * 16 * width, panel_bytes, 8 * width, code) for s in steps]
    places = [(32 * s // width) * panel_bytes + 32 * s % width for s in steps]
    return [descriptor(address + at, 0, 8 * width, code) for at in places]


def warp_rows(emulator, isa, a_MK, b_NK, codes, mn_major, warp=0) -> np.ndarray:
    """What one warp's wgmmas over all of K give, from BF16 bits."""
    shared = np.full(0x20000, 0xFF, np.uint8)
    a = place(shared, 0x400, a_MK, codes[0], mn_major[0])
    b = place(shared, B_ADDRESS, b_NK, codes[1], mn_major[1])
    d = np.full((16, len(b_NK)), np.nan, np.float32)
    for step in range(len(a)):
        emulator.wgmma(
            isa, shared, a[step], b[step], ("bf16", "bf16"), mn_major, warp, d, accumulate=step > 0
        )
    return d


def executor_product(a_MK: np.ndarray, b_NK: np.ndarray) -> np.ndarray:
    c_MN = np.zeros((len(a_MK), len(b_NK)), np.float32)
    mok._C.kernels.gemm(executor_isa(), "fp32", a_MK, b_NK, c_MN)
    return c_MN


def random_bits(generator, *shape: int) -> np.ndarray:
    """BF16 over many magnitudes, so that the order of a sum shows in its bits."""
    values = generator.standard_normal(shape) * 2.0 ** generator.integers(-12, 12, shape)
    return bf16_bits(values)


@pytest.mark.parametrize("n", [*range(8, 257, 8)])
def test_products_have_the_executors_bits(emulator, n):
    generator = np.random.default_rng(n)
    a_MK, b_NK = random_bits(generator, 64, 64), random_bits(generator, n, 64)
    expected = executor_product(a_MK, b_NK)
    swizzles = itertools.product(WIDTHS, WIDTHS)
    for codes, mn_major in itertools.product(swizzles, itertools.product([False, True], repeat=2)):
        if mn_major[1] and 2 * n % WIDTHS[codes[1]] != 0:
            continue  # not a whole number of panels
        for isa in emulator.isas() if codes == (1, 1) else emulator.isas()[:1]:
            warp = n // 8 % 4
            d = warp_rows(emulator, isa, a_MK, b_NK, codes, mn_major, warp)
            np.testing.assert_array_equal(d, expected[16 * warp : 16 * warp + 16])


def test_all_instruction_sets_have_the_same_bits(emulator):
    """Also where products are subnormal or overflow, and for every bit pattern of BF16."""
    generator = np.random.default_rng(0)
    anything = generator.integers(0, 2**16, (264, 64)).astype(np.uint16)
    subnormal = anything & 0x9FFF  # below 2^-64
    for bits_MK, overflows in ((anything, True), (subnormal, False)):
        results = [
            warp_rows(emulator, isa, bits_MK[:64], bits_MK[64:256], (1, 1), (False, False))
            for isa in emulator.isas()
        ]
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0])
        assert np.isfinite(results[0]).all() != overflows
        assert (results[0] != 0).any()


@pytest.mark.parametrize(
    ("element", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_8_bit_floats(emulator, element, dtype):
    """Every value of one sort times every value of E5M2, K-major, one k32 step."""
    bits = np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(bits).view(dtype).float().numpy()
    other = torch.from_numpy(bits).view(torch.float8_e5m2).float().numpy()
    shared = np.zeros(0x20000, np.uint8)

    def place_bytes(address: int, column: np.ndarray) -> int:
        """[len, 32] in 32-byte lines of which only k = 0 is not 0."""
        at = address + 32 * np.arange(len(column))
        shared[at ^ (at >> 7 & 1) << 4] = column
        return descriptor(address, 0, 256, 3)

    b = place_bytes(B_ADDRESS, bits)
    for first in range(0, 256, 64):
        a = place_bytes(0x400, bits[first : first + 64])
        for warp in range(4):
            d = np.zeros((16, 256), np.float32)
            emulator.wgmma(
                emulator.isas()[0],
                shared,
                a,
                b,
                (element, "e5m2"),
                (False, False),
                warp,
                d,
                accumulate=False,
            )
            rows = values[first + 16 * warp : first + 16 * warp + 16]
            with np.errstate(invalid="ignore"):
                expected = rows[:, None] * other[None, :]
            np.testing.assert_array_equal(d, expected)


def test_operands_without_a_swizzle(emulator):
    """8x8 core matrices of 128 bytes; MN-major exchanges the two offsets."""
    generator = np.random.default_rng(5)
    a_MK, b_NK = random_bits(generator, 64, 16), random_bits(generator, 24, 16)
    shared = np.zeros(0x8000, np.uint8)

    def core_matrices(bits: np.ndarray, mn_major: bool) -> np.ndarray:
        """[k group, row group, 8 lines of 16 bytes]."""
        blocks = bits.reshape(len(bits) // 8, 8, 2, 8).transpose(2, 0, 1, 3)
        return np.ascontiguousarray(blocks.transpose(0, 1, 3, 2) if mn_major else blocks)

    for mn_major in itertools.product([False, True], repeat=2):
        descriptors = []
        for address, bits, major in ((0x400, a_MK, mn_major[0]), (0x4000, b_NK, mn_major[1])):
            raw = core_matrices(bits, major).view(np.uint8).ravel()
            shared[address : address + raw.size] = raw
            between_k, between_rows = 16 * len(bits), 128
            leading, stride = between_k, between_rows
            descriptors.append(descriptor(address, leading, stride, 0))
        d = np.zeros((16, 24), np.float32)
        emulator.wgmma(
            emulator.isas()[0],
            shared,
            *descriptors,
            ("bf16", "bf16"),
            mn_major,
            2,
            d,
            accumulate=False,
        )
        np.testing.assert_array_equal(d, executor_product(a_MK, b_NK)[32:48])


@pytest.mark.parametrize(
    ("bits", "mn_major", "fault"),
    [
        (descriptor(0x8000, 0, 1024, 1), False, None),
        (descriptor(0x8060, 0, 1024, 1), False, None),
        (descriptor(0x8070, 0, 1024, 1), False, "past the end of a line"),
        (descriptor(0x8010, 0, 256, 3), False, "past the end of a line"),
        (descriptor(0x8800, 8192, 1024, 1), True, None),
        (descriptor(0x8020, 8192, 1024, 1), True, "inside an MN-major line"),
        (descriptor(0x8000, 0, 1024, 1) | 1 << 49, False, "base offset"),
        (descriptor(0x8000, 0, 1024, 1) | 1 << 46, False, "reserved bits"),
    ],
)
def test_descriptors_that_cannot_be_meant(emulator, bits, mn_major, fault):
    found = emulator.descriptor_fault(bits, mn_major)
    assert found is None if fault is None else fault in found


@st.composite
def boxes(draw):
    """(sizes, box, corner, swizzle) in NumPy's order of dimensions, BF16 elements."""
    rank = draw(st.integers(1, 5))
    swizzle = draw(st.sampled_from([0, 1, 2, 3]))
    inner_box = 8 << swizzle if swizzle else 8 * draw(st.integers(1, 4))
    inner = draw(st.integers(1, 12)) * 8
    sizes = [draw(st.integers(1, 5)) for _ in range(rank - 1)] + [inner]
    box = [draw(st.integers(1, 4)) for _ in range(rank - 1)] + [inner_box]
    corner = [draw(st.integers(-3, 6)) for _ in range(rank - 1)]
    corner.append(8 * draw(st.integers(-5, 13)))
    return sizes, box, corner, swizzle


def inside(sizes, box, corner) -> tuple[list[slice], list[slice]]:
    """What of the box lies inside the tensor: slices of the tensor and of the box."""
    begin = [min(max(0, at), size) for at, size in zip(corner, sizes, strict=True)]
    end = [
        max(low, min(size, at + extent))
        for low, at, extent, size in zip(begin, corner, box, sizes, strict=True)
    ]
    tensor = [slice(low, high) for low, high in zip(begin, end, strict=True)]
    tile = [
        slice(low - at, max(high - at, low - at))
        for low, high, at in zip(begin, end, corner, strict=True)
    ]
    if any(part.start == part.stop for part in tensor):
        return [slice(0, 0)] * len(sizes), [slice(0, 0)] * len(sizes)
    return tensor, tile


@settings(max_examples=200, deadline=None)
@given(case=boxes())
def test_boxes_of_every_rank(emulator, case):
    sizes, box, corner, swizzle = case
    tensor = aligned(np.arange(1, np.prod(sizes) + 1, dtype=np.uint16).reshape(sizes))
    of_tensor, of_tile = inside(sizes, box, corner)
    tile = np.zeros(box, np.uint16)
    tile[tuple(of_tile)] = tensor[tuple(of_tensor)]
    lines = tile.reshape(-1, box[-1]).view(np.uint8)
    raw = emulator.load_box(tensor, box, corner, swizzle)
    np.testing.assert_array_equal(raw, swizzled(lines, swizzle))

    target = aligned(np.full(sizes, 7, np.uint16))
    numbers = np.arange(1000, 1000 + np.prod(box), dtype=np.uint16).reshape(box)
    raw = swizzled(numbers.reshape(-1, box[-1]).view(np.uint8), swizzle)
    emulator.store_box(raw, target, box, corner, swizzle)
    expected = np.full(sizes, 7, np.uint16)
    expected[tuple(of_tensor)] = numbers[tuple(of_tile)]
    np.testing.assert_array_equal(target, expected)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 16 bytes."""
    memory = np.empty(array.nbytes + 16, np.uint8)
    begin = -memory.ctypes.data % 16
    view = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def test_lines_that_end_inside_16_bytes(emulator):
    """A tensor whose rows are padded: what lies past its size is zero, and stays."""
    padded = aligned(np.arange(1, 3 * 16 + 1, dtype=np.uint16).reshape(3, 16))
    tensor = padded[:, :13]
    tile = emulator.load_box(tensor, [4, 16], [0, 0], 1).view(np.uint16).reshape(4, 16)
    expected = np.zeros((4, 16), np.uint16)
    expected[:3, :13] = tensor
    np.testing.assert_array_equal(tile, expected)
    before = padded.copy()
    emulator.store_box(np.full(128, 0xEE, np.uint8), tensor, [4, 16], [0, 0], 1)
    np.testing.assert_array_equal(tensor, np.full((3, 13), 0xEEEE))
    np.testing.assert_array_equal(padded[:, 13:], before[:, 13:])


def test_sums_round_once_and_keep_subnormals(emulator):
    generator = np.random.default_rng(6)
    target, addend = (generator.standard_normal((8, 16)).astype(np.float32) for _ in range(2))
    target[0, :4] = [1e-40, -1e-40, 1.5e-38, np.inf]
    addend[0, :4] = [1.0, -1e-40, -1.4e-38, 1.0]
    expected = target + addend
    floats = aligned(target)
    emulator.store_box(addend.view(np.uint8).ravel(), floats, [8, 16], [0, 0], 0, add=True)
    np.testing.assert_array_equal(floats.view(np.uint32), expected.view(np.uint32))

    bits = aligned(bf16_bits(target))
    other = bf16_bits(addend)
    expected = bf16_bits(bf16_values(bits) + bf16_values(other))
    emulator.store_box(other.view(np.uint8).ravel(), bits, [8, 16], [0, 0], 0, add=True)
    np.testing.assert_array_equal(bits, expected)


def test_the_sigmoid_has_the_executors_bits(emulator):
    """Through the activation and its derivative, whose other factors are exact or the same."""
    generator = np.random.default_rng(7)
    x = np.concatenate(
        [
            generator.standard_normal(4096) * 4,
            generator.uniform(-110, 110, 4096),
            np.logspace(-40, 2, 512),
            [0.0, -0.0, np.inf, -np.inf, np.nan],
        ]
    ).astype(np.float32)
    one = np.ones_like(x)
    value, complement = emulator.sigmoid(x)
    kernels, isa = mok._C.kernels, executor_isa()
    with np.errstate(invalid="ignore"):
        gated = x * value
        slope = value * complement
    h = kernels.activation(isa, "fp32", "swiglu", 0.0, x, one)
    np.testing.assert_array_equal(h, gated)
    dg, *_ = kernels.activation_backward(isa, "fp32", "swiglu", 0.0, x, one, one, 1.0)
    # u madd(slope, g, value): one rounding, as FP64 gives where nothing cancels.
    with np.errstate(invalid="ignore"):
        expected = (slope.astype(np.float64) * x + value).astype(np.float32)
    plain = np.isfinite(x) & (np.abs(x) < 60)
    np.testing.assert_allclose(dg[plain], expected[plain], rtol=2.0**-23)
    assert (dg[plain] == expected[plain]).mean() > 0.999
    assert np.isnan(value[np.isnan(x)]).all()
