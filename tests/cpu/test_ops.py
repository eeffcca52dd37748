"""`torch.ops.mok.*` and `mok.moe` as operators: schemas, autograd, aliasing, wrong arguments."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

os.environ.setdefault("MOK_POISON", "1")  # the executor's scratch is NaN at the start of every call

import mok
from mok.shapes import GRADIENT_ORDER, gradient_bits
from tests._numerics import (
    BIASES,
    SHARED,
    WEIGHTS,
    assert_bitwise_equal,
    call,
    make_case,
    run,
    run_plain,
)
from tests._ops import CONTEXT, flat_arguments, moe_arguments

pytestmark = pytest.mark.quick

BF16, FP32 = torch.bfloat16, torch.float32
FULL = {"bias": True, "shared": 24, "shared_gate": True}
ALL_GRADIENTS = gradient_bits(set(GRADIENT_ORDER))
SAVE_POLICIES = ("all", "gate_up", "none")


OPCHECK_CASES = [
    ({**FULL}, "gate_up", BF16, GRADIENT_ORDER),
    ({**FULL, "activation": "gpt_oss"}, "all", FP32, ("x", "w_gate", "b_down", "shared_up")),
    ({}, "none", BF16, ("topk_weights", "w_down")),
]


@pytest.mark.parametrize(("extras", "save", "dtype", "requires_grad"), OPCHECK_CASES)
def test_opcheck(extras, save, dtype, requires_grad):
    case = make_case(9, 2, 4, 16, 24, **extras)
    options = {"save": save, "dtype": dtype, "gradients": gradient_bits(set(requires_grad))}
    forward = flat_arguments(case, requires_grad=requires_grad, **options)
    torch.library.opcheck(torch.ops.mok.moe_forward.default, forward)
    if not extras:
        torch.library.opcheck(torch.ops.mok.moe_recompute.default, forward)
    plain = flat_arguments(case, **options)
    saved = list(torch.ops.mok.moe_forward(*plain)[1:])
    backward = (case.dout_TH.to(dtype), *plain[:13], saved, *plain[13:])
    torch.library.opcheck(torch.ops.mok.moe_backward.default, backward)


def test_raw_ops_mutate_what_their_schema_says():
    case = make_case(9, 2, 4, 16, 24, **FULL)
    args = flat_arguments(case, gradients=ALL_GRADIENTS)
    utils = ("test_schema", "test_faketensor")
    results = [torch.empty_like(t) for t in torch.ops.mok.moe_forward(*args)]
    for op, rest in [
        (torch.ops.mok.moe_forward_out.default, (results[0], results[1:])),
        (torch.ops.mok.moe_recompute_out.default, (results[1:],)),
    ]:
        torch.library.opcheck(op, (*args, *rest), test_utils=utils[:1])


@pytest.mark.parametrize("save", SAVE_POLICIES)
def test_a_second_forward_leaves_the_first_ones_results_alone(save):
    first = flat_arguments(make_case(20, 3, 5, 16, 72, **FULL), save=save)
    second = flat_arguments(make_case(20, 3, 5, 16, 72, **FULL, seed=1), save=save)
    results = torch.ops.mok.moe_forward(*first)
    copies = [result.clone() for result in results]
    torch.ops.mok.moe_forward(*second)
    names = ("out", *CONTEXT)
    assert_bitwise_equal(
        dict(zip(names, results, strict=True)), dict(zip(names, copies, strict=True))
    )
    storages = {tensor.untyped_storage().data_ptr() for tensor in results if tensor.numel()}
    assert len(storages) == sum(tensor.numel() > 0 for tensor in results)


@pytest.mark.parametrize("save", SAVE_POLICIES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_then_two_backwards_in_any_order(save, order):
    cases = [make_case(20 + seed, 3, 5, 16, 72, **FULL, seed=seed) for seed in range(2)]
    expected = [run(mok.moe, case, BF16, save=save) for case in cases]
    leaves, outs = [], []
    for case in cases:
        dtypes = {"topk_weights_TK": FP32, "shared_weight_T": FP32}
        tensors = {n: t.to(dtypes.get(n, BF16), copy=True) for n, t in case.tensors.items()}
        leaves.append({name: tensor.requires_grad_() for name, tensor in tensors.items()})
        outs.append(call(mok.moe, leaves[-1], case.topk_ids_TK, save=save))
    for i in order:
        outs[i].backward(cases[i].dout_TH.to(BF16))
    for i in range(2):
        results = {"d" + name: leaf.grad for name, leaf in leaves[i].items()}
        assert_bitwise_equal({"out": outs[i].detach()} | results, expected[i])


class BackwardSpy(TorchDispatchMode):
    """What moe_backward was asked for and how many elements each of its results has."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func is torch.ops.mok.moe_backward.default:
            self.bits = args[-1]
            self.sizes = [result.numel() for result in results]
        return results


ARGUMENTS_OF = {"x": "x_TH", "topk_weights": "topk_weights_TK", "shared_weight": "shared_weight_T"}


@pytest.mark.parametrize(
    "trained",
    [
        *({name} for name in GRADIENT_ORDER),
        {"x", "topk_weights"},
        {"w_gate", "b_gate", "shared_down"},
        {"w_up", "w_down", "shared_weight"},
        set(GRADIENT_ORDER) - {"x", "w_up", "shared_gate"},
    ],
)
@pytest.mark.parametrize("save", SAVE_POLICIES)
def test_frozen_inputs_get_none_and_cost_nothing(trained, save):
    case = make_case(20, 3, 5, 16, 72, **FULL)
    everything = run(mok.moe, case, BF16, save=save)
    names = {ARGUMENTS_OF.get(name, name) for name in trained}
    spy = BackwardSpy()
    with spy:
        results = run(mok.moe, case, BF16, frozen=set(case.tensors) - names, save=save)
    assert spy.bits == gradient_bits(trained)
    for name, size in zip(GRADIENT_ORDER, spy.sizes, strict=True):
        assert (size > 0) == (name in trained), name
    assert_bitwise_equal(results, {name: everything[name] for name in results})


def test_no_grad_saves_nothing():
    case = make_case(12, 2, 3, 16, 24)
    leaves = {name: t.clone().requires_grad_() for name, t in case.tensors.items()}
    sizes = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            if func is torch.ops.mok.moe_forward.default:
                sizes.extend(result.numel() for result in results[1:])
            return results

    with Spy(), torch.no_grad():
        out = call(mok.moe, leaves, case.topk_ids_TK, save="all")
    assert sizes == [0] * 5
    assert not out.requires_grad


@pytest.mark.parametrize("through", ["x_TH", "w_gate"])
def test_double_backward_is_refused_in_one_sentence(through):
    case = make_case(12, 2, 3, 16, 24)
    leaves = {name: t.clone().requires_grad_() for name, t in case.tensors.items()}
    out = call(mok.moe, leaves, case.topk_ids_TK)
    (grad,) = torch.autograd.grad(out.square().sum(), leaves[through], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once") as info:
        grad.sum().backward()
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("loss", [torch.sum, lambda out: (out.T.contiguous() * 1).sum()])
def test_a_gradient_of_any_strides(tokens, loss):
    """A sum expands one number to the shape of dout, a transpose strides its last dimension."""
    case = make_case(tokens, 2, 3, 16, 24, **FULL)
    case.dout_TH = torch.ones(tokens, 16)
    dtypes = {"topk_weights_TK": FP32, "shared_weight_T": FP32}
    leaves = {
        name: tensor.to(dtypes.get(name, BF16), copy=True).requires_grad_()
        for name, tensor in case.tensors.items()
    }
    out = call(mok.moe, leaves, case.topk_ids_TK)
    loss(out).backward()
    results = {"out": out.detach()} | {"d" + name: leaf.grad for name, leaf in leaves.items()}
    assert_bitwise_equal(results, run(mok.moe, case, BF16))


def test_several_threads_take_turns():
    cases = [make_case(30 + seed, 3, 5, 16, 24, **FULL, seed=seed) for seed in range(4)]
    expected = [run(mok.moe, case, BF16) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda case: [run(mok.moe, case, BF16) for _ in range(5)], cases)
        for repeats, first in zip(results, expected, strict=True):
            for again in repeats:
                assert_bitwise_equal(again, first)


def test_outputs_without_a_gradient_path_need_no_backward():
    case = make_case(12, 2, 3, 16, 24)
    leaves = {name: t.clone().requires_grad_() for name, t in case.tensors.items()}
    out = call(mok.moe, leaves, case.topk_ids_TK)
    (out.detach() + leaves["x_TH"]).sum().backward()
    assert leaves["w_gate"].grad is None


@pytest.mark.parametrize(("dtype", "buffer_dtype"), [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
@pytest.mark.parametrize("ring_rows", [128, 4096])
def test_gradients_accumulate_into_given_buffers(dtype, buffer_dtype, ring_rows):
    """main_grad: one FP32 add, rounded to the buffer's type; an idle expert's is left alone."""
    case = make_case(150, 3, 6, 16, 24, **FULL, routing="uniform")
    case.topk_ids_TK[case.topk_ids_TK == 4] = 0  # 4 is idle, 0 longer than a small ring
    exact = run(mok.moe, case, dtype, weight_dtype=FP32)
    options = {"gradients": ALL_GRADIENTS, "ring_rows": ring_rows, "dtype": dtype}
    args = flat_arguments(case, **options)
    saved = list(torch.ops.mok.moe_forward(*args)[1:])
    fresh = torch.ops.mok.moe_backward(case.dout_TH.to(dtype), *args[:13], saved, *args[13:])
    buffers = []
    for name, gradient in zip(GRADIENT_ORDER, fresh, strict=True):
        is_parameter = name in WEIGHTS + BIASES + SHARED
        buffers.append(
            torch.randn(gradient.shape).to(buffer_dtype if is_parameter else gradient.dtype)
        )
    before = [buffer.clone() for buffer in buffers]
    torch.ops.mok.moe_backward_out(
        case.dout_TH.to(dtype), *args[:13], saved, *args[13:], True, buffers
    )
    for name, old, new, gradient in zip(GRADIENT_ORDER, before, buffers, fresh, strict=True):
        if name in WEIGHTS + BIASES + SHARED:
            sums = old.float() + exact["d" + name]
            if name in WEIGHTS + BIASES:
                sums[4] = old[4]
            assert_bitwise_equal({name: new}, {name: sums.to(buffer_dtype)})
        else:
            assert_bitwise_equal({name: new}, {name: gradient})


def test_idle_experts_are_zeroed_when_gradients_overwrite():
    case = make_case(30, 2, 6, 16, 24, bias=True, routing="uniform")
    case.topk_ids_TK.clamp_(0, 3)
    args = flat_arguments(
        case, gradients=ALL_GRADIENTS & ~gradient_bits({"shared_weight", *SHARED})
    )
    saved = list(torch.ops.mok.moe_forward(*args)[1:])
    dout_TH = case.dout_TH.to(BF16)
    fresh = torch.ops.mok.moe_backward(dout_TH, *args[:13], saved, *args[13:])
    buffers = [torch.full_like(gradient, torch.nan) for gradient in fresh]
    torch.ops.mok.moe_backward_out(dout_TH, *args[:13], saved, *args[13:], False, buffers)
    for name, buffer, gradient in zip(GRADIENT_ORDER, buffers, fresh, strict=True):
        assert_bitwise_equal({name: buffer}, {name: gradient})
        if name in WEIGHTS + BIASES:
            assert not buffer[4:].any()


def test_weights_of_any_floating_type_and_any_strides():
    case = make_case(20, 3, 5, 16, 24, **FULL)
    weights_TK = case.tensors["topk_weights_TK"].bfloat16().requires_grad_()
    wide_TK = weights_TK.detach().double().T.contiguous().T.requires_grad_()
    shared_weight_T = case.tensors["shared_weight_T"].half()
    results = []
    for weights in (weights_TK, wide_TK):
        out = mok.moe(
            **moe_arguments(case, topk_weights_TK=weights, shared_weight_T=shared_weight_T)
        )
        out.sum().backward()
        results.append(out)
    assert_bitwise_equal({"out": results[0]}, {"out": results[1]})
    assert weights_TK.grad.dtype == BF16
    assert wide_TK.grad.dtype == torch.float64
    torch.testing.assert_close(weights_TK.grad, wide_TK.grad.bfloat16(), rtol=0, atol=0)


def test_int32_and_strided_ids():
    case = make_case(20, 3, 5, 16, 24)
    expected = call(mok.moe, case.tensors, case.topk_ids_TK)
    for ids_TK in (case.topk_ids_TK.int(), case.topk_ids_TK.repeat_interleave(2, 1)[:, ::2]):
        assert_bitwise_equal({"out": call(mok.moe, case.tensors, ids_TK)}, {"out": expected})


def test_the_same_forward_in_plain_pytorch_has_the_same_shapes_and_dtypes():
    case = make_case(20, 3, 5, 16, 24, **FULL)
    ours, plain = run(mok.moe, case, BF16), run_plain(case)
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {
        n: (t.shape, t.dtype) for n, t in plain.items()
    }
