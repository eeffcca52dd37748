"""What the contract promises to the bit on one rank: rounding points, determinism, invariance."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

os.environ.setdefault("MOK_POISON", "1")  # the executor's scratch is NaN at the start of every call

import mok
from mok.shapes import empty_recompute
from tests._exact import expected_bits, make_exact_case, without_negative_zeros
from tests._numerics import (
    BIASES,
    WEIGHTS,
    Case,
    assert_bitwise_equal,
    assert_close,
    make_case,
    run,
    run_contract,
)
from tests._ops import CONTEXT, op_arguments

BF16, FP32 = torch.bfloat16, torch.float32
FULL = {"bias": True, "shared": 24, "shared_gate": True}
SAVE_POLICIES = ("all", "gate_up", "none")
FORMS = [("swiglu", False), ("swiglu", True), ("gpt_oss", True)]
LIMITS = [("swiglu", None), ("swiglu", 0.8), ("gpt_oss", 0.5)]


def assert_is_the_contract(case: Case, weight_dtype=FP32, **options):
    results = run(mok.moe, case, BF16, weight_dtype=weight_dtype, **options)
    expected = expected_bits(case, weight_dtype)
    assert_bitwise_equal(without_negative_zeros(results), without_negative_zeros(expected))


@pytest.mark.quick
@pytest.mark.parametrize("wide", ["up", "dout"])
@pytest.mark.parametrize(("activation", "clamped"), FORMS)
@pytest.mark.parametrize("weight_dtype", [FP32, BF16])
@pytest.mark.parametrize("save", SAVE_POLICIES)
def test_exact_sums_give_the_contracts_bits(wide, activation, clamped, weight_dtype, save):
    case = make_exact_case(
        61, 3, 5, 72, 104, activation=activation, clamped=clamped, wide=wide, **FULL
    )
    assert_is_the_contract(case, weight_dtype, save=save)


@settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    tokens=st.sampled_from([0, 1, 2, 31, 45, 63, 64, 65]),
    top_k=st.integers(1, 5),
    num_experts=st.integers(5, 12),
    hidden=st.sampled_from([8, 16, 24, 72, 104]),
    intermediate=st.sampled_from([8, 16, 24, 72, 104]),
    shared=st.sampled_from([None, 8, 40, 72]),
    gated=st.booleans(),
    bias=st.booleans(),
    form=st.sampled_from(FORMS),
    wide=st.sampled_from(["up", "dout"]),
    weight_dtype=st.sampled_from([FP32, BF16]),
    save=st.sampled_from(SAVE_POLICIES),
    ring_rows=st.sampled_from([None, 128, 256]),
    seed=st.integers(0, 2**31),
)
def test_exact_sums_of_any_shape(
    tokens, top_k, num_experts, hidden, intermediate, shared, gated, bias, form, wide, weight_dtype,
    save, ring_rows, seed,
):  # fmt: skip
    case = make_exact_case(
        tokens,
        top_k,
        num_experts,
        hidden,
        intermediate,
        shared=shared,
        shared_gate=gated and shared is not None,
        bias=bias,
        activation=form[0],
        clamped=form[1],
        wide=wide,
        seed=seed,
    )
    assert_is_the_contract(case, weight_dtype, save=save, ring_rows=ring_rows)


@pytest.mark.quick
@pytest.mark.parametrize(("activation", "limit"), LIMITS)
@pytest.mark.parametrize("shape", [(45, 3, 5, 16, 72), (150, 2, 3, 200, 104), (20, 4, 8, 520, 264)])
def test_random_sums_differ_from_the_contract_by_their_order_only(activation, limit, shape):
    """3.2e-4 was the largest difference over 48 cases: a few flipped roundings, a tenth of what
    one rounding point more or less makes."""
    case = make_case(*shape, activation=activation, swiglu_limit=limit, **FULL)
    assert_close(run(mok.moe, case, BF16, weight_dtype=FP32), run_contract(case), 6e-4)


def case_of_many_rows(**options):
    """Segments of about 1100, 130, 20 and 0 rows, and one below a pad."""
    case = make_case(420, 3, 6, 16, 72, routing="uniform", **FULL, **options)
    choices = torch.tensor([0] * 40 + [1] * 4 + [2] + [4] * 2 + [-1])
    draws = torch.randint(len(choices), (420, 3), generator=torch.Generator().manual_seed(1))
    case.topk_ids_TK = choices[draws]
    return case


@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
def test_ring_size_and_saving_policy_do_not_change_a_bit(dtype, weight_dtype):
    case = case_of_many_rows()
    expected = run(mok.moe, case, dtype, weight_dtype=weight_dtype, ring_rows=10**6)
    assert not any(value.isnan().any() for value in expected.values())
    for ring_rows in (1, 128, 256, 384, 1024, 1152, None):
        for save in SAVE_POLICIES:
            results = run(
                mok.moe, case, dtype, weight_dtype=weight_dtype, ring_rows=ring_rows, save=save
            )
            assert_bitwise_equal(results, expected)


@pytest.mark.quick
def test_twenty_repeats_are_equal():
    case = make_case(70, 3, 7, 40, 72, **FULL)
    expected = run(mok.moe, case, BF16)
    for _ in range(20):
        other = make_case(33, 2, 3, 16, 24, seed=5)
        run(mok.moe, other, BF16)  # leaves other numbers in the scratch
        assert_bitwise_equal(run(mok.moe, case, BF16), expected)


def per_token(results: dict) -> dict:
    names = ("out", "dx_TH", "dtopk_weights_TK", "dshared_weight_T")
    return {name: results[name] for name in names}


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("activation", "limit"), LIMITS)
def test_a_token_alone_equals_the_token_in_a_batch(dtype, activation, limit):
    case = make_case(67, 3, 5, 40, 136, activation=activation, swiglu_limit=limit, **FULL)
    batch = per_token(run(mok.moe, case, dtype))
    for start, stop in [(0, 1), (13, 14), (66, 67), (0, 66), (5, 37)]:
        part = per_token(run(mok.moe, case.tokens(start, stop), dtype))
        assert_bitwise_equal(part, {name: value[start:stop] for name, value in batch.items()})


@pytest.mark.parametrize("tokens", [31, 32, 45, 63])
def test_padding_tokens_without_routes_change_nothing(tokens):
    """Their weights and their dout are NaN: nothing of them may be read into another's result."""
    case = make_case(64, 3, 5, 24, 72, bias=True)
    case.topk_ids_TK[tokens:] = -1
    case.tensors["topk_weights_TK"][tokens:] = torch.nan
    case.tensors["x_TH"][tokens:] = torch.nan
    case.dout_TH[tokens:] = torch.nan
    padded = run(mok.moe, case, BF16)
    for name in ("out", "dx_TH", "dtopk_weights_TK"):
        assert not padded[name][tokens:].any(), name
        padded[name] = padded[name][:tokens]
    assert_bitwise_equal(padded, run(mok.moe, case.tokens(0, tokens), BF16))


def test_order_and_number_of_choices_do_not_change_a_route():
    """The same routes with no-routes among them: dW and dx of one route per token are the same."""
    case = make_case(50, 1, 4, 24, 40, bias=True)
    wide = case.tokens(0, 50)
    wide.topk_ids_TK = torch.full((50, 4), -1)
    wide.topk_ids_TK[:, 2:3] = case.topk_ids_TK
    weights_TK = torch.full((50, 4), torch.nan)
    weights_TK[:, 2:3] = case.tensors["topk_weights_TK"]
    wide.tensors = wide.tensors | {"topk_weights_TK": weights_TK}
    results = run(mok.moe, wide, BF16)
    results["dtopk_weights_TK"] = results["dtopk_weights_TK"][:, 2:3]
    assert_bitwise_equal(results, run(mok.moe, case, BF16))


@pytest.mark.quick
def test_fp32_parameters_are_cast_per_call():
    """Out and dx have the bits of the cast parameters; the gradients are those, not yet rounded."""
    case = make_case(40, 3, 5, 24, 40, **FULL)
    names = [name for name in case.tensors if name.startswith(("w_", "b_", "shared_"))]
    for name in names:
        if name != "shared_weight_T":
            case.tensors[name] = case.tensors[name] * 1.001
    masters = run(mok.moe, case, BF16, weight_dtype=FP32)
    cast = run(mok.moe, case, BF16, weight_dtype=BF16)
    rounded = {name: value.to(cast[name].dtype) for name, value in masters.items()}
    assert_bitwise_equal(rounded, cast)
    assert all((masters["d" + name] != cast["d" + name]).any() for name in WEIGHTS + BIASES)


@pytest.mark.quick
@pytest.mark.parametrize("ring_rows", [128, 256, 2048])
@pytest.mark.parametrize("save", SAVE_POLICIES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_recompute_gives_what_forward_saved(save, ring_rows, dtype):
    case = case_of_many_rows(activation="gpt_oss")
    tensors, options = op_arguments(case, save=save, ring_rows=ring_rows, dtype=dtype)
    arguments = (*tensors.in_order(), *options.in_order())
    saved = torch.ops.mok.moe_forward(*arguments)[1:]
    again = torch.ops.mok.moe_recompute(*arguments)
    assert [t.shape for t in saved] == [t.shape for t in empty_recompute(tensors, options)]
    assert_bitwise_equal(
        dict(zip(CONTEXT, saved, strict=True)), dict(zip(CONTEXT, again, strict=True))
    )


@pytest.mark.quick
@pytest.mark.parametrize("ring_rows", [128, 256, 1280, 4096])
def test_the_saved_context_is_the_first_chunk_and_zeros(ring_rows):
    case = case_of_many_rows()
    tensors, options = op_arguments(case, save="all", ring_rows=ring_rows)
    _, x_rows, gate, up, shared_gate, shared_up = torch.ops.mok.moe_forward(
        *tensors.in_order(), *options.in_order()
    )
    plan = mok._C.build_plan([case.topk_ids_TK.numpy()], 0, 6)
    end = mok._C.chunk_bounds(plan["segment_begin"].tolist(), ring_rows)[1]
    assert (
        len(x_rows) == len(gate) == len(up) == min(ring_rows, mok._C.worst_case_rows(1, 6, 3, 420))
    )
    slots = torch.from_numpy(plan["row_slot"][:end]).long()
    is_row = torch.zeros(len(x_rows), dtype=torch.bool)
    is_row[:end] = slots >= 0
    for rows in (x_rows, gate, up):
        assert not rows[~is_row].any()
    assert_bitwise_equal({"x": x_rows[is_row]}, {"x": tensors.x[slots[slots >= 0] // 3]})
    assert (gate[is_row] != 0).any(1).all()
    assert shared_gate.shape == shared_up.shape == (420, 24)
    assert not shared_gate.isnan().any()


DIGEST = """
import hashlib, sys
import torch
import mok
from tests._exact import expected_bits, make_exact_case, without_negative_zeros
from tests._numerics import assert_bitwise_equal, make_case, run

FULL = {"bias": True, "shared": 24, "shared_gate": True}
exact = make_exact_case(61, 3, 5, 72, 104, wide="dout", **FULL)
small, large = make_case(33, 3, 7, 40, 72, **FULL), make_case(9, 2, 3, 520, 264, **FULL)
one = make_case(300, 2, 3, 24, 40, routing="one", **FULL)
for threads in (1, 2):
    torch.set_num_threads(threads)
    results = run(mok.moe, exact, torch.bfloat16)
    expected = expected_bits(exact, torch.bfloat16)
    assert_bitwise_equal(without_negative_zeros(results), without_negative_zeros(expected))
    digest = hashlib.sha256()
    for case in (small, large, one):
        for dtype in (torch.bfloat16, torch.float32):
            for value in run(mok.moe, case, dtype, ring_rows=256).values():
                digest.update(value.contiguous().view(torch.uint8).numpy())
    print(digest.hexdigest())
"""


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_threads_do_not_change_a_bit_whatever_the_instruction_set(isa):
    if isa not in mok._C.kernels.available():
        pytest.skip(f"this processor has no {isa}")
    root = Path(__file__).parents[2]
    environment = os.environ | {"MOK_CPU_ISA": isa, "PYTHONPATH": str(root)}
    environment.pop("OMP_NUM_THREADS")
    process = subprocess.run(
        [sys.executable, "-c", DIGEST],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert len(set(process.stdout.split())) == 1, process.stdout
