"""`mok.moe` follows the written-out contract: every rounding point is where docs/numerics.md says.

The executor and `contract_reference` add in different orders, so now and then a value is rounded
the other way; a rounding point that is missing, moved or doubled costs several times more.
"""

import pytest
import torch

import mok
from mok.reference import moe_reference
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

ROUNDING_FLIPS = 7e-4
ACTIVATIONS = [("swiglu", None), ("swiglu", 0.8), ("gpt_oss", None), ("gpt_oss", 0.5)]
EXTRAS = [{}, {"bias": True, "shared": 72, "shared_gate": True}, {"shared": 64}]
SHAPES = [(64, 2, 4, 64, 128), (150, 3, 5, 32, 136), (33, 8, 8, 16, 256)]


@pytest.mark.parametrize(("activation", "limit"), ACTIVATIONS)
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_has_the_contracts_rounding_points(activation, limit, extras, shape):
    case = make_case(*shape, activation=activation, swiglu_limit=limit, seed=4, **extras)
    contract = run_contract(case)
    # FP32 parameters get the accumulators of the weight gradients as they are.
    ours = run(mok.moe, case, torch.bfloat16, weight_dtype=torch.float32)
    assert_close(ours, contract, ROUNDING_FLIPS)
    three_way(run(mok.moe, case, torch.bfloat16), run_plain(case), run_exact(case))


def test_a_moved_rounding_point_would_be_seen():
    """h' = rn(w rn(p)) instead of rn(w p): the smallest step off the contract."""
    case = make_case(*SHAPES[0], routing="uniform")
    contract = run_contract(case)["dw_down"]
    x_TH, ids_TK = case.tensors["x_TH"], case.topk_ids_TK
    w_TK, dout_TH = case.tensors["topk_weights_TK"], case.dout_TH
    moved = torch.zeros_like(contract)
    for e in range(len(moved)):
        tokens, choices = (ids_TK == e).nonzero(as_tuple=True)
        g = (x_TH[tokens] @ case.tensors["w_gate"][e].T).bfloat16().float()
        u = (x_TH[tokens] @ case.tensors["w_up"][e].T).bfloat16().float()
        h = (torch.nn.functional.silu(g) * u).bfloat16().float()
        scaled_h = (w_TK[tokens, choices, None] * h).bfloat16().float()
        moved[e] = dout_TH[tokens].T @ scaled_h
    assert relative_error(moved, contract) > 2 * ROUNDING_FLIPS


@pytest.mark.parametrize(("activation", "limit"), ACTIVATIONS)
@pytest.mark.parametrize("extras", EXTRAS)
def test_fp32_is_close_to_fp64_autograd(activation, limit, extras):
    case = make_case(*SHAPES[1], activation=activation, swiglu_limit=limit, **extras)
    exact = run(moe_reference, case, torch.float64)
    assert_close(run(mok.moe, case, torch.float32), exact, 2e-6)
