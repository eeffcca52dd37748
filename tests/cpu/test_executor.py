"""The executor's numbers on one rank: three ways in BF16, FP64 autograd in FP32, shapes, views."""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

os.environ.setdefault("MOK_POISON", "1")  # the executor's scratch is NaN at the start of every call

import mok
from mok.reference import moe_reference
from tests._numerics import (
    BIASES,
    WEIGHTS,
    assert_bitwise_equal,
    assert_close,
    call,
    make_case,
    relative_error,
    run,
    run_contract,
    run_exact,
    run_plain,
    three_way,
)

pytestmark = pytest.mark.quick

BF16, FP32 = torch.bfloat16, torch.float32
FULL = {"bias": True, "shared": 24, "shared_gate": True}
SAVE_POLICIES = ("all", "gate_up", "none")
FORMS = [("swiglu", None), ("swiglu", 0.8), ("gpt_oss", None), ("gpt_oss", 0.5)]
WIDTHS = [8, 16, 24, 72, 104, 200]
NUMBERS_OF_TOKENS = [0, 1, 31, 45, 63, 64, 65, 257]


@settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(
    tokens=st.sampled_from(NUMBERS_OF_TOKENS),
    top_k=st.integers(1, 8),
    num_experts=st.integers(8, 12),
    hidden=st.sampled_from(WIDTHS),
    intermediate=st.sampled_from(WIDTHS),
    shared=st.sampled_from([None, 8, 40, 104]),
    gated=st.booleans(),
    bias=st.booleans(),
    form=st.sampled_from(FORMS),
    routing=st.sampled_from(["uniform", "mixed", "one"]),
    weight_dtype=st.sampled_from([BF16, FP32]),
    save=st.sampled_from(SAVE_POLICIES),
    ring_rows=st.sampled_from([None, 128, 384]),
    seed=st.integers(0, 2**31),
)
def test_any_call_three_ways_and_against_fp64(
    tokens, top_k, num_experts, hidden, intermediate, shared, gated, bias, form, routing,
    weight_dtype, save, ring_rows, seed,
):  # fmt: skip
    case = make_case(
        tokens,
        top_k,
        num_experts,
        hidden,
        intermediate,
        shared=shared,
        shared_gate=gated and shared is not None,
        bias=bias,
        activation=form[0],
        swiglu_limit=form[1],
        routing=routing,
        seed=seed,
    )
    options = {"save": save, "ring_rows": ring_rows}
    ours = run(mok.moe, case, BF16, weight_dtype=weight_dtype, **options)
    three_way(ours, run_plain(case), run_exact(case))
    assert_close(ours, run_contract(case), 4e-3 if weight_dtype == BF16 else 2e-3)
    in_fp32 = run(mok.moe, case, FP32, **options)
    assert_close(in_fp32, run(moe_reference, case, torch.float64, mask_dtype=FP32), 1e-5)


@pytest.mark.parametrize(("activation", "limit"), FORMS)
@pytest.mark.parametrize(
    "shape", [(0, 2, 3, 8, 8), (1, 1, 1, 8, 8), (45, 4, 4, 200, 72), (257, 2, 5, 24, 104)]
)
def test_every_form_three_ways(activation, limit, shape):
    case = make_case(*shape, activation=activation, swiglu_limit=limit, **FULL)
    three_way(run(mok.moe, case, BF16), run_plain(case), run_exact(case))


@pytest.mark.parametrize(("top_k", "num_experts"), [(1, 192), (16, 192), (7, 7), (12, 12)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_many_experts_with_few_tokens(top_k, num_experts, dtype):
    case = make_case(6, top_k, num_experts, 16, 24, bias=True, routing="uniform")
    ours = run(mok.moe, case, dtype)
    idle = set(range(num_experts)) - set(case.topk_ids_TK.flatten().tolist())
    for name in WEIGHTS + BIASES:
        gradient = ours["d" + name]
        assert not gradient[sorted(idle)].any()
        assert all(gradient[expert].any() for expert in range(num_experts) if expert not in idle)
    if dtype == BF16:
        three_way(ours, run_plain(case), run_exact(case))
    else:
        assert_close(ours, run_exact(case, mask_dtype=FP32), 1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_wide_layers(dtype):
    """More than one column block of each product and more than one block of gradient rows."""
    case = make_case(12, 2, 2, 1032, 520, shared=264, bias=True)
    ours = run(mok.moe, case, dtype)
    if dtype == BF16:
        three_way(ours, run_plain(case), run_exact(case))
    else:
        assert_close(ours, run_exact(case, mask_dtype=FP32), 1e-5)


@pytest.mark.parametrize("no_route", [-1, 5, 6, 2**31 - 1, 2**32, 2**62, -(2**63)])
@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 0.0])
def test_a_weight_without_a_route_is_never_read(no_route, weight):
    case = make_case(30, 3, 5, 16, 24, shared=8, bias=True, routing="uniform")
    case.topk_ids_TK[::2, 1] = no_route
    case.topk_ids_TK[4] = no_route
    is_route_TK = (case.topk_ids_TK >= 0) & (case.topk_ids_TK < 5)
    case.tensors["topk_weights_TK"] = case.tensors["topk_weights_TK"].masked_fill(
        ~is_route_TK, weight
    )
    results = run(mok.moe, case, BF16)
    assert all(value.isfinite().all() for value in results.values())
    assert not results["dtopk_weights_TK"][~is_route_TK].any()
    three_way(results, run_plain(case), run_exact(case))


def test_zero_weights_still_have_gradients():
    case = make_case(30, 2, 5, 16, 24, bias=True, routing="uniform")
    case.tensors["topk_weights_TK"].zero_()
    results = run(mok.moe, case, FP32)
    assert not results["out"].any()
    assert not any(results["d" + name].any() for name in ("x_TH", *WEIGHTS, *BIASES))
    exact = run_exact(case, mask_dtype=FP32)
    assert relative_error(results["dtopk_weights_TK"], exact["dtopk_weights_TK"]) < 1e-5
    assert exact["dtopk_weights_TK"].any()


def test_no_routes_at_all():
    case = make_case(30, 2, 5, 16, 24, **FULL)
    case.topk_ids_TK.fill_(-1)
    results = run(mok.moe, case, BF16)
    shared_only = case.experts(0, 2)
    shared_only.topk_ids_TK = case.topk_ids_TK
    assert_bitwise_equal(
        {name: results[name] for name in ("out", "dx_TH")},
        {name: run(mok.moe, shared_only, BF16)[name] for name in ("out", "dx_TH")},
    )
    assert results["out"].any()
    assert not any(results["d" + name].any() for name in ("topk_weights_TK", *WEIGHTS, *BIASES))


@pytest.mark.parametrize("what", ["x_TH", "dout"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_token_stays_with_its_own_results(what, value):
    """NaN reaches the token's own results and its experts' gradients, nothing else."""
    case = make_case(40, 2, 6, 16, 24, shared=8, bias=True, routing="uniform")
    case.topk_ids_TK.clamp_(0, 3)
    case.topk_ids_TK[7] = torch.tensor([4, 5])
    clean = run(mok.moe, case, BF16)
    (case.dout_TH if what == "dout" else case.tensors["x_TH"])[7, 3] = value
    dirty = run(mok.moe, case, BF16)
    others = torch.arange(40) != 7
    for name in ("out", "dx_TH", "dtopk_weights_TK"):
        assert_bitwise_equal({name: dirty[name][others]}, {name: clean[name][others]})
    for name in WEIGHTS + BIASES:
        assert_bitwise_equal({name: dirty["d" + name][:4]}, {name: clean["d" + name][:4]})
    assert not dirty["dx_TH"][7].isfinite().all()
    assert not dirty["dw_gate"][4:].isfinite().all()


def packed_views(layout, gate, up):
    """One leaf [E, 2I, H] and the views of it that are gate and up."""
    if layout == "packed":
        leaf = torch.cat([gate, up], dim=1).requires_grad_()
        return leaf, leaf[:, : gate.shape[1]], leaf[:, gate.shape[1] :]
    leaf = torch.stack([gate, up], dim=2).flatten(1, 2).clone().requires_grad_()
    return leaf, leaf[:, 0::2], leaf[:, 1::2]


@pytest.mark.parametrize("layout", ["packed", "interleaved"])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_packed_and_interleaved_weights_without_copies(layout, dtype):
    case = make_case(45, 3, 5, 16, 72, bias=True)
    expected = run(mok.moe, case, dtype)
    tensors = {name: t.to(dtype) for name, t in case.tensors.items() if name != "topk_weights_TK"}
    tensors["topk_weights_TK"] = case.tensors["topk_weights_TK"]
    leaf, gate, up = packed_views(layout, tensors["w_gate"], tensors["w_up"])
    bias, b_gate, b_up = packed_views(
        layout, tensors["b_gate"][..., None], tensors["b_up"][..., None]
    )
    b_gate, b_up = b_gate[..., 0], b_up[..., 0]
    assert gate._base is leaf
    if layout == "interleaved":  # their last dimension is strided: a bias is small and copied
        b_gate, b_up = b_gate.contiguous(), b_up.contiguous()
    views = {"w_gate": gate, "w_up": up, "b_gate": b_gate, "b_up": b_up}
    with_copies = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.mok.moe_forward.default:
                pointers = {args[3].data_ptr(), args[4].data_ptr()}
                with_copies.append(pointers != {gate.data_ptr(), up.data_ptr()})
            return func(*args, **(kwargs or {}))

    with Spy():
        out = call(mok.moe, tensors | views, case.topk_ids_TK)
    out.backward(case.dout_TH.to(dtype))
    assert with_copies == [False]
    gradient = packed_views(layout, expected["dw_gate"], expected["dw_up"])[0]
    assert_bitwise_equal({"w": leaf.grad}, {"w": gradient.detach()})
    gradient = packed_views(layout, expected["db_gate"][..., None], expected["db_up"][..., None])[0]
    assert_bitwise_equal({"b": bias.grad}, {"b": gradient.detach()})


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_inputs_with_strides(dtype):
    """Columns of a wider matrix, one row expanded, weights whose experts are shared or padded."""
    case = make_case(33, 2, 4, 16, 24, **FULL, routing="uniform")
    wide_x = torch.full((33, 40), torch.nan)
    wide_x[:, 8:24] = case.tensors["x_TH"]
    wide_down = torch.full((4, 20, 40), torch.nan)
    wide_down[:, 2:18, 3:27] = case.tensors["w_down"]
    views = {
        "x_TH": wide_x.to(dtype)[:, 8:24],
        "w_down": wide_down.to(dtype)[:, 2:18, 3:27],
        "w_up": case.tensors["w_up"][:1].to(dtype).expand(4, 24, 16),
        "b_down": case.tensors["b_down"][:1].to(dtype).expand(4, 16),
    }
    plain = {
        name: tensor if name.endswith(("weights_TK", "weight_T")) else tensor.to(dtype)
        for name, tensor in case.tensors.items()
    }
    results = []
    for tensors in (
        plain | views,
        plain | {name: view.contiguous() for name, view in views.items()},
    ):
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
        out = call(mok.moe, leaves, case.topk_ids_TK)
        out.backward(case.dout_TH.to(dtype))
        results.append({"out": out.detach()} | {n: leaf.grad for n, leaf in leaves.items()})
    assert_bitwise_equal(*results)

    row = case.tensors["x_TH"][:1].to(dtype)
    expanded = call(mok.moe, plain | {"x_TH": row.expand(33, 16)}, case.topk_ids_TK)
    repeated = call(mok.moe, plain | {"x_TH": row.repeat(33, 1)}, case.topk_ids_TK)
    assert_bitwise_equal({"out": expanded}, {"out": repeated})


def test_x_in_the_symmetric_heap():
    case = make_case(33, 2, 4, 16, 24, **FULL)
    expected = run(mok.moe, case, BF16)
    name = mok.workspace.declare(None, max_tokens=64, hidden_size=16, top_k=2, dtype=BF16)
    x_TH = mok.symm_empty(33, 16, workspace=name)
    x_TH.copy_(case.tensors["x_TH"])
    plain = {
        n: t if n.endswith(("weights_TK", "weight_T")) else t.to(BF16)
        for n, t in case.tensors.items()
    }
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in plain.items()}
    leaves["x_TH"] = x_TH.requires_grad_()
    out = call(mok.moe, leaves, case.topk_ids_TK)
    out.backward(case.dout_TH.bfloat16())
    assert_bitwise_equal(
        {"out": out, "dx": x_TH.grad}, {"out": expected["out"], "dx": expected["dx_TH"]}
    )


def test_two_steps_on_dirty_memory():
    """Step 1 clean and step 2 NaN is how unwritten rows show up in training."""
    case = make_case(100, 3, 8, 24, 40, **FULL, routing="uniform")
    case.topk_ids_TK[:, 0] = 0
    parameters = {
        name: t.clone().requires_grad_() for name, t in case.tensors.items() if name in WEIGHTS
    }
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    losses = []
    for step in range(4):
        torch.empty(10**6).fill_(torch.nan)
        tensors = case.tensors | parameters
        out = call(mok.moe, tensors | {"x_TH": tensors["x_TH"] + 0.1 * step}, case.topk_ids_TK)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert all(parameter.grad.isfinite().all() for parameter in parameters.values())
    assert losses[-1] < losses[0]


def test_large_values_overflow_as_ieee_says():
    """A gate far below zero gives 0, not NaN; one far above gives the identity."""
    x_TH = torch.full((2, 8), 3e4).bfloat16()
    w = torch.zeros(1, 8, 8).bfloat16()
    w_gate, w_up = w.clone(), w.clone()
    w_gate[0, 0, 0], w_gate[0, 1, 0] = -1, 1
    w_up[0, :2, 0] = 1
    w_down = torch.ones(1, 8, 8).bfloat16()
    ids_TK = torch.zeros(2, 1, dtype=torch.int64)
    out = mok.moe(x_TH, ids_TK, torch.ones(2, 1), w_gate, w_up, w_down)
    x = x_TH[0, 0].float()
    assert_bitwise_equal({"out": out}, {"out": (x * x).bfloat16().expand(2, 8)})
