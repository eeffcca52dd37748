"""The elementwise CPU kernels against FP64, and their bits against each other."""

import os
import subprocess
import sys

import numpy as np
import pytest
from mok._C import kernels

from tests.cpu._kernel_arrays import (
    before_forbidden_page,
    bits,
    from_bf16,
    round_to_bf16,
)

ULP = 2.0**-23
TINY = 8 * 2.0**-149
ALPHA = 1.702
LENGTHS = (0, 1, 3, 4, 7, 8, 15, 16, 17, 33, 64, 65, 72, 130)
ACTIVATIONS = (("swiglu", 0.0), ("swiglu_limit", 1.5), ("gpt_oss", 7.0))


@pytest.fixture(params=kernels.available())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["bf16", "fp32"])
def compute(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=ACTIVATIONS, ids=lambda activation: activation[0])
def activation(request: pytest.FixtureRequest) -> tuple[str, float]:
    return request.param


def normal(n: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng([seed, n]).standard_normal(n, np.float32)


def stored(x: np.ndarray, compute: str) -> np.ndarray:
    return round_to_bf16(x) if compute == "bf16" else x


def numbers(x: np.ndarray) -> np.ndarray:
    return from_bf16(x) if x.dtype == np.uint16 else x


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    nan = np.isnan(numbers(x)) & np.isnan(numbers(y))
    return x.dtype == y.dtype and bool(((bits(x) == bits(y)) | nan).all())


def sweep() -> tuple[np.ndarray, np.ndarray]:
    """(g, u): the range of FP32 in g, both signs, with u of ordinary size; then ordinary pairs."""
    g = np.concatenate([np.geomspace(1e-40, 3e38, 6000), np.linspace(0, 130, 6000)])
    g = np.concatenate([g, -g, 8 * np.random.default_rng(1).standard_normal(9000)])
    u = 3 * np.random.default_rng(2).standard_normal(g.size)
    return g.astype(np.float32), u.astype(np.float32)


def formulas(kind: str, limit: float, g: np.ndarray, u: np.ndarray) -> dict[str, np.ndarray]:
    """p and its derivatives in FP64 with the contract's masks, and the size of their terms."""
    g, u = g.astype(np.float64), u.astype(np.float64)
    g_passes, u_passes = 1.0, 1.0
    if kind != "swiglu":
        g_passes, u_passes = np.where(g <= limit, 1.0, 0.0), np.where(abs(u) <= limit, 1.0, 0.0)
        g, u = np.where(g > limit, limit, g), np.where(u > limit, limit, u)
        u = np.where(u < -limit, -limit, u)
    x = g
    if kind == "gpt_oss":
        x, u = ALPHA * g, u + 1.0
    with np.errstate(all="ignore"):
        decay = np.exp(-np.abs(x))
        sigmoid = np.where(x < 0, decay, 1.0) / (1.0 + decay)
        complement = np.where(x < 0, 1.0, decay) / (1.0 + decay)
        return {
            "x": x,
            "u": u,
            "p": g * sigmoid * u,
            "dp_dg": u * sigmoid * (1.0 + x * complement) * g_passes,
            "dp_dg_terms": abs(u) * sigmoid * (1.0 + abs(x) * complement),
            "dp_du": g * sigmoid * u_passes,
        }


SIGMOID_ULPS = 2.8  # csrc/cpu/activation_impl.h; 1 - sigmoid likewise


def within(value: np.ndarray, exact: dict, name: str, ulps: float, alpha_ulps: float) -> np.ndarray:
    """Within `ulps`, and `alpha_ulps` |x| where alpha g is rounded before it enters exp.

    Below 2^-126 a sigmoid is a multiple of 2^-149, which the other factors magnify. Results above
    FP32's range may be infinite.
    """
    x, u = np.minimum(np.abs(exact["x"]), 200.0), np.abs(exact["u"])
    terms = np.abs(exact[name + "_terms" if name + "_terms" in exact else name])
    bound = (ulps + alpha_ulps * x) * ULP * terms + TINY * (1.0 + np.abs(exact["x"])) * (1.0 + u)
    with np.errstate(all="ignore"):
        near = np.abs(value - exact[name]) <= bound
        return near | (np.isinf(value) & (np.abs(exact[name]) > 3.4e38))


def test_activation_and_derivatives_against_fp64(isa, activation) -> None:
    kind, limit = activation
    g, u = sweep()
    exact = formulas(kind, limit, g, u)
    alpha_ulps = 1.0 if kind == "gpt_oss" else 0.0
    one = np.ones_like(g)
    dp_dg, dp_du, p, _ = kernels.activation_backward(isa, "fp32", kind, limit, g, u, one, 1.0)
    assert same_bits(p, kernels.activation(isa, "fp32", kind, limit, g, u))
    # Half an ulp for each further rounding: u + 1 and two products; one product less.
    assert within(p, exact, "p", SIGMOID_ULPS + 1.5, alpha_ulps).all()
    assert within(dp_du, exact, "dp_du", SIGMOID_ULPS + 1.0, alpha_ulps).all()
    # sigmoid and its complement in one term, and at most five roundings.
    assert within(dp_dg, exact, "dp_dg", 2 * SIGMOID_ULPS + 2.5, 2 * alpha_ulps).all()


@pytest.mark.parametrize("kind_limit", ACTIVATIONS[1:], ids=lambda x: x[0])
def test_gradient_passes_at_the_boundary(isa, kind_limit) -> None:
    kind, limit = kind_limit
    above = np.nextafter(np.float32(limit), np.float32(np.inf))
    g = np.array([limit, above, -100 * limit, 1.0, 1.0, 1.0, 1.0], np.float32)
    u = np.array([0.5, 0.5, 0.5, limit, above, -limit, -above], np.float32)
    one = np.ones_like(g)
    dg, du, _, _ = kernels.activation_backward(isa, "fp32", kind, limit, g, u, one, 1.0)
    assert (dg[[0, 3, 4, 5, 6]] != 0).all()
    assert dg[1] == 0
    assert (du != 0)[[0, 1, 3, 5]].all()
    assert (du[[4, 6]] == 0).all()


def test_nan_and_inf_as_in_the_formula(isa, activation) -> None:
    kind, limit = activation
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0, -3e38], np.float32)
    g, u = (x.ravel() for x in np.meshgrid(special, special))
    exact = formulas(kind, limit, g, u)
    one = np.ones_like(g)
    dg, du, p, _ = kernels.activation_backward(isa, "fp32", kind, limit, g, u, one, 1.0)
    for value, name in ((dg, "dp_dg"), (du, "dp_du"), (p, "p")):
        with np.errstate(over="ignore"):
            expected = exact[name].astype(np.float32)
        assert (np.isnan(value) == np.isnan(expected)).all(), name
        assert (np.isinf(value) == np.isinf(expected)).all(), name
    nan_in = np.isnan(g) | np.isnan(u)
    assert np.isnan(p[nan_in]).all()
    assert np.isnan(dg[nan_in]).all()
    assert np.isnan(du[np.isnan(g)]).all()


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_forward_recompute_and_backward_share_their_bits(
    isa, compute, activation, n, with_bias
) -> None:
    kind, limit = activation
    g_acc, u_acc, a = normal(n, 0, 3.0), normal(n, 1, 3.0), normal(n, 2)
    b_g, b_u = (normal(n, 3), normal(n, 4)) if with_bias else (None, None)
    g, u, h = kernels.activation_forward(isa, compute, kind, limit, g_acc, u_acc, b_g, b_u)
    assert same_bits(g, stored(g_acc + b_g if with_bias else g_acc, compute))
    assert same_bits(u, stored(u_acc + b_u if with_bias else u_acc, compute))
    assert same_bits(h, kernels.activation(isa, compute, kind, limit, g, u))

    # The BF16 kernels round the FP32 ones' results once: p, w p, (w a) dp/dg, (w a) dp/du.
    g32, u32, w = numbers(g), numbers(u), np.float32(0.3)
    p = kernels.activation(isa, "fp32", kind, limit, g32, u32)
    dp_dg, dp_du, _, _ = kernels.activation_backward(
        isa, "fp32", kind, limit, g32, u32, np.ones(n, np.float32), 1.0
    )
    dg, du, hw, _ = kernels.activation_backward(isa, compute, kind, limit, g, u, a, w)
    assert same_bits(h, stored(p, compute))
    assert same_bits(hw, stored(w * p, compute))
    assert same_bits(dg, stored((w * a) * dp_dg, compute))
    assert same_bits(du, stored((w * a) * dp_du, compute))


@pytest.mark.parametrize("n", [1, 8, 63, 64, 65, 136, 200])
def test_dw_partials_are_sums_over_64_columns(isa, compute, activation, n) -> None:
    kind, limit = activation
    g, u, a = stored(normal(n, 0, 2.0), compute), stored(normal(n, 1), compute), normal(n, 2)
    partials = kernels.activation_backward(isa, compute, kind, limit, g, u, a, 0.7)[3]
    p = kernels.activation(isa, "fp32", kind, limit, numbers(g), numbers(u)).astype(np.float64)
    starts = np.arange(0, n, 64)
    exact, terms = np.add.reduceat(p * a, starts), np.add.reduceat(np.abs(p * a), starts)
    assert partials.shape == exact.shape
    assert (np.abs(partials - exact) <= 65 * 2.0**-24 * terms).all()
    for start in starts:  # a block has the same bits on its own
        span = slice(start, n)
        alone = kernels.activation_backward(
            isa, compute, kind, limit, g[span], u[span], a[span], 1.0
        )
        assert same_bits(alone[3], partials[start // 64 :])


@pytest.mark.parametrize("n", LENGTHS)
def test_store_and_store_gradient(isa, compute, n) -> None:
    acc, bias, old = normal(n), normal(n, 1), stored(normal(n, 2), compute)
    acc[: n // 4] = -0.0
    if n > 8:
        acc[8] = np.nan
    assert same_bits(kernels.store(isa, compute, acc), stored(acc, compute))
    assert same_bits(kernels.store(isa, compute, acc, bias), stored(acc + bias, compute))
    out = before_forbidden_page(old)
    kernels.store_gradient(isa, before_forbidden_page(acc), out)
    assert same_bits(out, stored(acc, compute))
    out[...] = old
    kernels.store_gradient(isa, acc, out, accumulate=True)
    assert same_bits(out, stored(numbers(old) + acc, compute))


def exact_in_fp64(n: int, seed: int) -> np.ndarray:
    """Magnitudes in [0.5, 2): a product of two and a sum of eight such products fit 53 bits."""
    rng = np.random.default_rng([seed, n])
    return (rng.uniform(0.5, 2.0, n) * rng.choice([-1, 1], n)).astype(np.float32)


def fma(w: np.float32, x: np.ndarray, acc: np.ndarray) -> np.ndarray:
    return (np.float64(w) * x.astype(np.float64) + acc.astype(np.float64)).astype(np.float32)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5])
@pytest.mark.parametrize("weighted", [False, True])
def test_weighted_sum_is_a_chain_of_fmas(isa, compute, n, num_rows, weighted) -> None:
    # One element past an aligned start: rows are gathered from anywhere.
    rows = [stored(exact_in_fp64(n + 1, r), compute)[1:] for r in range(num_rows)]
    weights = exact_in_fp64(num_rows, 99) if weighted else np.ones(num_rows, np.float32)
    expected = np.zeros(n, np.float32)
    for weight, row in zip(weights, rows, strict=True):
        expected = fma(weight, numbers(row), expected)
    got = kernels.weighted_sum(isa, compute, rows, weights if weighted else None, n)
    assert same_bits(got, stored(expected, compute))


def test_weighted_sum_starts_at_plus_zero(isa, compute) -> None:
    minus_zero = stored(np.full(9, -0.0, np.float32), compute)
    assert (bits(kernels.weighted_sum(isa, compute, [minus_zero], None, 9)) == 0).all()


@pytest.mark.parametrize("n", LENGTHS)
def test_axpy_is_one_fma(isa, compute, n) -> None:
    row, w = stored(exact_in_fp64(n, 1), compute), exact_in_fp64(1, 2)[0]
    start = exact_in_fp64(n, 3)
    acc = before_forbidden_page(start)
    kernels.axpy(isa, compute, w, before_forbidden_page(row), acc)
    assert same_bits(acc, fma(w, numbers(row), start))


@pytest.mark.parametrize("n", [*LENGTHS, 1000])
def test_dot(isa, compute, n) -> None:
    row, b = stored(normal(n), compute), normal(n, 1)
    terms = numbers(row).astype(np.float64) * b
    value = kernels.dot(isa, compute, before_forbidden_page(row), before_forbidden_page(b))
    assert abs(value - terms.sum()) <= (n + 1) * 2.0**-24 * np.abs(terms).sum()
    shifted = np.concatenate([row[:1], row])[1:]
    assert kernels.dot(isa, compute, shifted, b) == value


@pytest.mark.parametrize("n", [1, 13, 72])
def test_rows_end_at_a_page_without_access(isa, compute, activation, n) -> None:
    kind, limit = activation
    g_acc, u_acc, a, bias = (before_forbidden_page(normal(n, seed)) for seed in range(4))
    g, u, h = kernels.activation_forward(isa, compute, kind, limit, g_acc, u_acc, bias, bias)
    g, u = before_forbidden_page(g), before_forbidden_page(u)
    assert same_bits(h, kernels.activation(isa, compute, kind, limit, g, u))
    hw = kernels.activation_backward(isa, compute, kind, limit, g, u, a, 1.0)[2]
    assert same_bits(h, hw)
    assert same_bits(kernels.weighted_sum(isa, compute, [g], None, n), np.array(g))
    assert same_bits(kernels.store(isa, compute, g_acc, bias), np.array(g))


@pytest.mark.parametrize("name", ["avx2", "avx512"])
def test_these_tests_ran_on(name) -> None:
    if name not in kernels.available():
        pytest.skip(f"this processor has no {name}: its kernels were not run")
    one = np.ones(3, np.float32)
    assert kernels.dot(name, "fp32", one, one) == 3.0


def selected(name: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"MOK_CPU_ISA": name, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "from mok._C import kernels; print(kernels.selected())"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_environment_overrides_the_instruction_set() -> None:
    assert selected("portable").stdout.split() == ["portable"]
    assert selected("").stdout.split() == [kernels.selected()]
    wrong = selected("mmx")
    assert wrong.returncode != 0
    assert "MOK_CPU_ISA is 'mmx'" in wrong.stderr
    assert "portable" in wrong.stderr


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match=r"'mmx'.*portable"):
        kernels.dot("mmx", "fp32", np.zeros(1, np.float32), np.zeros(1, np.float32))
