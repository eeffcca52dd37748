"""The CPU GEMM: errors against FP64, and the order of its additions bit for bit.

BF16 arrays are NumPy uint16 bit patterns. "emulated" is AVX-512's code path (tile, BF16 pairs,
packing) in plain C++, so that it is tested on processors without AVX-512.
"""

import itertools

import numpy as np
import pytest
from mok._C import kernels

from tests.cpu._kernel_arrays import (
    address_space,
    before_forbidden_page,
    bits,
    from_bf16,
    round_to_bf16,
    with_layout,
)

UNIT_ROUNDOFF = 2.0**-24
COMPUTE_TYPES = ("bf16", "fp32")
LAYOUTS = tuple(itertools.product(("k", "mn"), repeat=2))
SHAPES_MNK = (
    (1, 1, 1),
    (1, 64, 33),
    (5, 17, 9),
    (6, 16, 256),
    (13, 70, 131),
    (64, 8, 200),
    (140, 100, 517),
    (200, 130, 385),
)


@pytest.fixture(params=kernels.available())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "compute" in metafunc.fixturenames:
        metafunc.parametrize("compute", COMPUTE_TYPES)


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def as_factors(x: np.ndarray, compute: str) -> np.ndarray:
    return round_to_bf16(x) if compute == "bf16" else x


def numbers(x: np.ndarray) -> np.ndarray:
    return from_bf16(x) if x.dtype == np.uint16 else x


def product(isa: str, compute: str, a_MK: np.ndarray, b_NK: np.ndarray) -> np.ndarray:
    c_MN = np.full((a_MK.shape[0], b_NK.shape[0]), np.nan, np.float32)
    kernels.gemm(isa, compute, a_MK, b_NK, c_MN)
    return c_MN


@pytest.mark.parametrize(("layout_a", "layout_b"), LAYOUTS)
@pytest.mark.parametrize("mnk", SHAPES_MNK)
def test_error_is_that_of_one_chain(isa, compute, mnk, layout_a, layout_b) -> None:
    m, n, k = mnk
    a_MK, b_NK = as_factors(values(m, k), compute), as_factors(values(n, k, seed=1), compute)
    c_MN = product(isa, compute, with_layout(a_MK, layout_a), with_layout(b_NK, layout_b))
    a64, b64 = numbers(a_MK).astype(np.float64), numbers(b_NK).astype(np.float64)
    # k additions and, without an FMA, the rounding of a product: the bound of a recursive sum.
    gamma = (k + 1) * UNIT_ROUNDOFF / (1 - (k + 1) * UNIT_ROUNDOFF)
    assert (np.abs(c_MN - a64 @ b64.T) <= gamma * (np.abs(a64) @ np.abs(b64).T)).all()


@pytest.mark.parametrize("isa", ["portable", "emulated"])
@pytest.mark.parametrize("k", [1, 2, 127, 300, 389])
def test_one_ascending_chain_bit_for_bit(isa, compute, k) -> None:
    a_MK, b_NK = as_factors(values(7, k), compute), as_factors(values(19, k, seed=1), compute)
    a, b = numbers(a_MK), numbers(b_NK)
    order = np.arange(k)
    if isa == "emulated" and compute == "bf16":  # vdpbf16ps adds the later factor of a pair first
        order = np.arange(k + k % 2).reshape(-1, 2)[:, ::-1].ravel()
        order = order[order < k]
    expected = np.zeros((7, 19), np.float32)
    for index in order:
        expected += a[:, index, None] * b[None, :, index]
    assert (bits(product(isa, compute, a_MK, b_NK)) == bits(expected)).all()


def test_avx2_has_the_bits_of_portable(compute) -> None:
    if "avx2" not in kernels.available():
        pytest.skip("this processor has no avx2")
    if compute == "fp32":
        pytest.skip("FMAs round FP32 products once; only BF16 products are exact")
    for m, n, k in SHAPES_MNK:
        a_MK, b_NK = round_to_bf16(values(m, k)), round_to_bf16(values(n, k, seed=1))
        wide, plain = (product(name, compute, a_MK, b_NK) for name in ("avx2", "portable"))
        assert (bits(wide) == bits(plain)).all(), (m, n, k)


@pytest.mark.parametrize(("layout_a", "layout_b"), LAYOUTS)
def test_bits_do_not_depend_on_the_layout(isa, compute, layout_a, layout_b) -> None:
    a_MK, b_NK = as_factors(values(77, 401), compute), as_factors(values(90, 401, seed=1), compute)
    expected = product(isa, compute, a_MK, b_NK)
    c_MN = product(isa, compute, with_layout(a_MK, layout_a), with_layout(b_NK, layout_b))
    assert (bits(c_MN) == bits(expected)).all()


@pytest.mark.parametrize("layout", ["k", "mn"])
def test_an_element_depends_on_its_row_and_column_only(isa, compute, layout) -> None:
    a_MK, b_NK = (
        as_factors(values(211, 300), compute),
        as_factors(values(150, 300, seed=1), compute),
    )
    whole = product(isa, compute, a_MK, b_NK)
    for first, last in ((0, 1), (3, 4), (210, 211), (5, 12), (190, 211), (0, 133)):
        rows = product(isa, compute, with_layout(a_MK[first:last], layout), b_NK)
        assert (bits(rows) == bits(whole[first:last])).all(), (first, last)
    for first, last in ((0, 1), (149, 150), (64, 71), (7, 137)):
        columns = product(isa, compute, a_MK, with_layout(b_NK[first:last], layout))
        assert (bits(columns) == bits(whole[:, first:last])).all(), (first, last)


@pytest.mark.parametrize("layout", ["k", "mn"])
@pytest.mark.parametrize("splits", [(128,), (256,), (384, 512), (128, 256, 384, 512, 640)])
def test_continuation_has_the_bits_of_the_unsplit_product(isa, compute, splits, layout) -> None:
    k = 707
    a_MK, b_NK = as_factors(values(40, k), compute), as_factors(values(70, k, seed=1), compute)
    c_MN = np.full((40, 70), np.nan, np.float32)
    for first, last in itertools.pairwise((0, *splits, k)):
        a, b = (with_layout(x[:, first:last], layout) for x in (a_MK, b_NK))
        kernels.gemm(isa, compute, a, b, c_MN, accumulate=first > 0)
    assert (bits(c_MN) == bits(product(isa, compute, a_MK, b_NK))).all()


@pytest.mark.parametrize(("layout_a", "layout_b"), LAYOUTS)
@pytest.mark.parametrize("k", [1, 30, 95, 301])
def test_fp32_data_is_rounded_to_bf16_first(isa, k, layout_a, layout_b) -> None:
    a_MK, b_NK = values(23, k), values(37, k, seed=1)
    # Ties to even both ways and carries into the exponent; NaNs in rows of their own.
    special = np.array([0x3F808000, 0x3F818000, 0x3FFFFFFF, 0xBF7FFFFF], np.uint32).view(np.float32)
    a_MK.flat[: min(4, a_MK.size)] = special[: a_MK.size]
    b_NK.flat[: min(4, b_NK.size)] = special[: b_NK.size]
    a_MK[20, -1] = np.array(0x7F800001, np.uint32).view(np.float32)  # truncated it would be inf
    b_NK[30, 0] = np.array(0xFFFFFFFF, np.uint32).view(np.float32)  # rounding up would make it +0
    a_bf16, b_bf16 = round_to_bf16(a_MK), round_to_bf16(b_NK)
    expected = product(isa, "bf16", a_bf16, b_bf16)
    assert np.isnan(expected[20]).all()
    assert np.isnan(expected[:, 30]).all()
    for a, b in ((a_MK, b_NK), (a_bf16, b_NK), (a_MK, b_bf16)):
        c_MN = product(isa, "bf16", with_layout(a, layout_a), with_layout(b, layout_b))
        assert ((bits(c_MN) == bits(expected)) | (np.isnan(c_MN) & np.isnan(expected))).all()


@pytest.mark.parametrize("layout", ["k", "mn"])
@pytest.mark.parametrize("k", [9, 128, 193, 385])
def test_nan_stays_in_its_row_and_column(isa, compute, k, layout) -> None:
    a_MK, b_NK = values(17, k), values(77, k, seed=1)
    clean = product(isa, compute, as_factors(a_MK, compute), as_factors(b_NK, compute))
    a_MK[4, k - 1], a_MK[16, 0], b_NK[76, k // 2] = np.nan, np.inf, np.nan
    # Neighbours of the operands in memory are NaN too: k is not padded from what lies behind a row.
    a = surrounded_by_nan(as_factors(a_MK, compute), layout)
    b = surrounded_by_nan(as_factors(b_NK, compute), layout)
    c_MN = product(isa, compute, a, b)
    touched = np.zeros(c_MN.shape, bool)
    touched[[4, 16]] = touched[:, 76] = True
    assert not np.isfinite(c_MN[touched]).any()
    assert np.isnan(c_MN[4]).all()
    assert (bits(c_MN)[~touched] == bits(clean)[~touched]).all()


def surrounded_by_nan(x: np.ndarray, layout: str) -> np.ndarray:
    nan = 0x7FC0 if x.dtype == np.uint16 else np.nan
    frame = with_layout(np.full((x.shape[0] + 3, x.shape[1] + 3), nan, x.dtype), layout)
    frame[1:-2, 1:-2] = x
    return frame[1:-2, 1:-2]


@pytest.mark.parametrize("accumulate", [False, True])
def test_only_c_is_written(isa, compute, accumulate) -> None:
    m, n, k = 13, 70, 51
    a_MK, b_NK = as_factors(values(m, k), compute), as_factors(values(n, k, seed=1), compute)
    frame = np.full((m + 2, n + 9), 7.0, np.float32)
    kernels.gemm(isa, compute, a_MK, b_NK, frame[1:-1, 4 : 4 + n], accumulate=accumulate)
    outside = np.ones(frame.shape, bool)
    outside[1:-1, 4 : 4 + n] = False
    assert (frame[outside] == 7.0).all()
    expected = np.full((m, n), 7.0, np.float32)
    kernels.gemm(isa, compute, a_MK, b_NK, expected, accumulate=accumulate)
    assert (bits(frame[1:-1, 4 : 4 + n]) == bits(expected)).all()


@pytest.mark.parametrize("mnk", [(0, 5, 3), (5, 0, 3), (0, 0, 0), (9, 20, 0)])
def test_empty_sizes(isa, compute, mnk) -> None:
    m, n, k = mnk
    a_MK, b_NK = as_factors(values(m, k), compute), as_factors(values(n, k), compute)
    c_MN = np.full((m, n), 3.0, np.float32)
    kernels.gemm(isa, compute, a_MK, b_NK, c_MN, accumulate=True)
    assert (c_MN == 3.0).all()
    kernels.gemm(isa, compute, a_MK, b_NK, c_MN)
    assert (bits(c_MN) == 0).all()


@pytest.mark.parametrize(("layout_a", "layout_b"), LAYOUTS)
@pytest.mark.parametrize("mnk", [(1, 1, 1), (7, 19, 13), (6, 64, 96), (133, 65, 193)])
@pytest.mark.parametrize("data", ["bf16", "fp32"])
def test_nothing_is_touched_past_the_operands(isa, mnk, data, layout_a, layout_b) -> None:
    """Every operand ends at a page that faults: a read past one kills the process."""
    m, n, k = mnk
    a_MK, b_NK = as_factors(values(m, k), data), as_factors(values(n, k, seed=1), data)
    expected = product(isa, "bf16", a_MK, b_NK)
    a = before_forbidden_page(a_MK, layout_a)
    b = before_forbidden_page(b_NK, layout_b)
    c_MN = before_forbidden_page(np.zeros((m, n), np.float32), "k")
    kernels.gemm(isa, "bf16", a, b, c_MN)
    assert (bits(c_MN) == bits(expected)).all()


@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("layout", ["k", "mn"])
def test_offsets_have_64_bits(isa, which, layout) -> None:
    """Two slices of an operand lie 2^31 + 64 elements apart."""
    count, other = (2, 6) if layout == "k" else (6, 2)
    near = round_to_bf16(values(count, other))  # [index, k]
    stride = 2**31 + 64
    space = address_space(2 * stride + 64, np.uint16)
    far = np.lib.stride_tricks.as_strided(
        space, near.shape, (2 * stride, 2) if layout == "k" else (2, 2 * stride)
    )
    far[...] = near
    fixed = round_to_bf16(values(5, other, seed=1))
    if which == "a":
        got, expected = product(isa, "bf16", far, fixed), product(isa, "bf16", near, fixed)
    else:
        got, expected = product(isa, "bf16", fixed, far), product(isa, "bf16", fixed, near)
    assert (bits(got) == bits(expected)).all()
