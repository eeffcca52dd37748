"""The reference against itself: autograd, the written-out formulas, and loops a child can read."""

import pytest
import torch
from torch.nn.functional import silu

from mok.reference import RankInputs, contract_reference, gated_activation, moe_reference
from tests._numerics import (
    assert_close,
    make_case,
    relative_error,
    run,
    run_contract,
    run_exact,
    run_plain,
    three_way,
)

pytestmark = pytest.mark.quick

ACTIVATIONS = [("swiglu", None), ("swiglu", 0.8), ("gpt_oss", None), ("gpt_oss", 0.5)]
EXTRAS = [
    {},
    {"bias": True},
    {"shared": 24},
    {"bias": True, "shared": 16, "shared_gate": True},
]


@pytest.mark.parametrize(("activation", "limit"), ACTIVATIONS)
@pytest.mark.parametrize("extras", EXTRAS)
def test_formulas_equal_autograd_in_fp64(activation, limit, extras):
    case = make_case(19, 3, 5, 16, 72, activation=activation, swiglu_limit=limit, **extras)
    exact = run(moe_reference, case, torch.float64)
    assert_close(run_contract(case, rounding=False), exact, 1e-12)


@pytest.mark.parametrize("tokens", [0, 1, 2, 130])
def test_formulas_equal_autograd_for_any_number_of_tokens(tokens):
    case = make_case(tokens, 2, 3, 8, 8, bias=True, shared=8, shared_gate=True, seed=tokens)
    exact = run(moe_reference, case, torch.float64)
    assert_close(run_contract(case, rounding=False), exact, 1e-12)


def naive_moe(case):
    """A loop over tokens and choices with silu, in FP64."""
    t = {name: tensor.double() for name, tensor in case.tensors.items()}
    out_TH = torch.zeros_like(t["x_TH"])
    for token, x in enumerate(t["x_TH"]):
        for k, e in enumerate(case.topk_ids_TK[token].tolist()):
            if 0 <= e < len(t["w_gate"]):
                g = t["w_gate"][e] @ x + t["b_gate"][e]
                u = t["w_up"][e] @ x + t["b_up"][e]
                y = t["w_down"][e] @ (silu(g) * u) + t["b_down"][e]
                out_TH[token] += t["topk_weights_TK"][token, k] * y
        h = silu(t["shared_gate"] @ x) * (t["shared_up"] @ x)
        out_TH[token] += t["shared_weight_T"][token] * (t["shared_down"] @ h)
    return out_TH


def test_forward_equals_a_loop_over_tokens():
    case = make_case(23, 3, 4, 16, 24, bias=True, shared=8, shared_gate=True)
    out_TH = run(moe_reference, case, torch.float64)["out"]
    assert relative_error(out_TH, naive_moe(case)) < 1e-13


def test_activation_forms():
    g, u = 6 * torch.randn(2, 1000, dtype=torch.float64)
    assert relative_error(gated_activation(g, u), silu(g) * u) < 1e-15
    limited = silu(g.clamp(max=2.0)) * u.clamp(-2.0, 2.0)
    assert relative_error(gated_activation(g, u, swiglu_limit=2.0), limited) < 1e-15
    gate, up = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
    gpt_oss = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    assert relative_error(gated_activation(g, u, "gpt_oss"), gpt_oss) < 1e-15


def test_gradient_passes_at_the_limit_and_nan_propagates():
    g = torch.tensor([1.9, 2.0, 2.1, torch.nan], dtype=torch.float64, requires_grad=True)
    u = torch.tensor([-2.1, -2.0, 2.0, 2.1], dtype=torch.float64, requires_grad=True)
    p = gated_activation(g, u, swiglu_limit=2.0)
    p.nansum().backward()
    assert (g.grad[:3] != 0).tolist() == [True, True, False]
    assert (u.grad[:3] != 0).tolist() == [False, True, True]
    assert p.isnan().tolist() == [False, False, False, True]


@pytest.mark.parametrize("mask_dtype", [None, torch.bfloat16])
def test_masks_come_from_rounded_values_if_asked(mask_dtype):
    """g = 7.01 rounds to 7 in BF16: the layer sees a value at the limit, FP64 one above it."""
    g = torch.tensor([7.01, 7.1], dtype=torch.float64, requires_grad=True)
    u = torch.tensor([1.0, 1.0], dtype=torch.float64)
    p = gated_activation(g, u, "gpt_oss", mask_dtype=mask_dtype)
    p.sum().backward()
    assert (g.grad != 0).tolist() == [mask_dtype is not None, False]
    assert p[0] == p[1]  # the value is clamped either way
    # 0.8 is no BF16 number: 0.80078125 rounds to itself and lies above the limit.
    edge = torch.tensor([0.80078125], dtype=torch.float64, requires_grad=True)
    gated_activation(edge, u[:1], swiglu_limit=0.8, mask_dtype=mask_dtype).backward()
    assert edge.grad == 0

    case = make_case(40, 2, 3, 16, 32, activation="gpt_oss", swiglu_limit=0.8)
    exact = run_exact(case, mask_dtype=mask_dtype)
    contract = run_contract(case, rounding=False, mask_dtype=mask_dtype)
    assert_close(contract, exact, 1e-12)


@pytest.mark.parametrize(("activation", "limit"), ACTIVATIONS)
@pytest.mark.parametrize("seed", range(3))
def test_rounding_points_cost_little_more_than_plain_bf16(activation, limit, seed):
    extras = {"bias": True, "shared": 64, "shared_gate": True}
    case = make_case(
        200, 3, 5, 64, 128, activation=activation, swiglu_limit=limit, seed=seed, **extras
    )
    exact, plain, rounded = run_exact(case), run_plain(case), run_contract(case)
    three_way(rounded, plain, exact, factor=1.3)
    # Not vacuous: everything is rounded somewhere, but db_down, an FP32 sum of exact numbers.
    for name, value in rounded.items():
        lowest = 0 if name == "db_down" else 1e-4
        assert lowest < relative_error(value, exact[name]) < 0.01, name


def test_rounding_points_are_where_the_contract_says():
    case = make_case(50, 2, 3, 16, 72, bias=True)
    tensors = case.tensors
    inputs = RankInputs(tensors["x_TH"], case.topk_ids_TK, tensors["topk_weights_TK"], case.dout_TH)
    results = contract_reference(
        [inputs],
        *(tensors[name] for name in ("w_gate", "w_up", "w_down")),
        **{name: tensors[name] for name in ("b_gate", "b_up", "b_down")},
    )

    def is_bf16(value):
        return torch.equal(value, value.bfloat16().float())

    rows = results.experts[0]
    rounded = ("g", "u", "h", "y", "dg", "du", "dx")
    assert {name: is_bf16(getattr(rows, name)) for name in rounded} == dict.fromkeys(rounded, True)
    unrounded = ("p", "a", "dw")
    assert not any(is_bf16(getattr(rows, name)) for name in unrounded)
    assert torch.equal(rows.h, rows.p.bfloat16().float())
    assert is_bf16(results.ranks[0].out_TH)
    assert is_bf16(results.ranks[0].dx_TH)
    gradients = vars(results.gradients).values()
    assert not any(is_bf16(gradient) for gradient in gradients)


def test_contract_of_several_ranks_equals_one_rank_with_all_tokens():
    case = make_case(30, 2, 4, 16, 24, shared=8, bias=True)
    whole = run_contract(case, rounding=False)
    bounds = [(0, 7), (7, 7), (7, 30)]
    parts = [case.tokens(*bound) for bound in bounds]
    inputs = [
        RankInputs(p.tensors["x_TH"], p.topk_ids_TK, p.tensors["topk_weights_TK"], p.dout_TH)
        for p in parts
    ]
    t = case.tensors
    results = contract_reference(
        inputs,
        t["w_gate"],
        t["w_up"],
        t["w_down"],
        b_gate=t["b_gate"],
        b_up=t["b_up"],
        b_down=t["b_down"],
        shared=(t["shared_gate"], t["shared_up"], t["shared_down"]),
        rounding=False,
    )
    combined = {
        "out": torch.cat([rank.out_TH for rank in results.ranks]),
        "dx_TH": torch.cat([rank.dx_TH for rank in results.ranks]),
        "dtopk_weights_TK": torch.cat([rank.dtopk_weights_TK for rank in results.ranks]),
        "dw_gate": results.gradients.gate,
        "db_down": results.gradients.b_down,
        "dshared_up": sum(rank.dshared.up for rank in results.ranks),
    }
    assert_close(combined, {name: whole[name] for name in combined}, 1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_routes_have_no_influence(dtype):
    """The NaN weights of no-routes reach nothing, and their gradient is 0."""
    case = make_case(12, 3, 4, 8, 16, bias=True)
    ids_TK = case.topk_ids_TK
    no_route_TK = (ids_TK < 0) | (ids_TK >= 4)
    assert no_route_TK.any()
    assert case.tensors["topk_weights_TK"][no_route_TK].isnan().all()
    results = run(moe_reference, case, dtype)
    assert all(value.isfinite().all() for value in results.values())
    assert (results["dtopk_weights_TK"][no_route_TK] == 0).all()
    assert (results["dtopk_weights_TK"][~no_route_TK] != 0).all()


def test_idle_experts_get_zeros():
    case = make_case(9, 2, 4, 8, 16, bias=True, routing="one")
    for name, value in run(moe_reference, case, torch.bfloat16).items():
        if name.startswith(("dw_", "db_")):
            assert [bool((part != 0).any()) for part in value] == [True, False, False, False], name


def test_fp32_is_close_to_fp64():
    case = make_case(33, 2, 4, 32, 48, bias=True, shared=16, shared_gate=True)
    exact = run(moe_reference, case, torch.float64)
    assert_close(run(moe_reference, case, torch.float32), exact, 1e-6)


def test_wrong_arguments_are_named():
    case = make_case(4, 2, 4, 8, 8)
    with pytest.raises(ValueError, match="num_experts is 5, but w_gate has 4 experts"):
        run(moe_reference, case, torch.float32, num_experts=5)
    case.settings["activation"] = "relu"
    with pytest.raises(ValueError, match="activation is 'relu'"):
        run(moe_reference, case, torch.float32)
    with pytest.raises(ValueError, match="swiglu_limit is 0"):
        gated_activation(torch.ones(2), torch.ones(2), swiglu_limit=0.0)
