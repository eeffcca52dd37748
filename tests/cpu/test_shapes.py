"""The shape functions of the ops: real, fake and meta results have the shapes they give."""

import itertools

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import mok
from mok.shapes import (
    GRADIENT_ORDER,
    PAD,
    SETTING_NAMES,
    TENSOR_NAMES,
    LayerSettings,
    LayerTensors,
    context_shapes,
    default_ring_rows,
    gradient_bits,
    worst_case_rows,
)
from tests._numerics import make_case
from tests._ops import flat_arguments, op_arguments

pytestmark = pytest.mark.quick

EXTRAS = [{}, {"bias": True}, {"shared": 24}, {"bias": True, "shared": 8, "shared_gate": True}]
SAVE_POLICIES = ("all", "gate_up", "none")


def described(tensors):
    return [(tuple(tensor.shape), tensor.dtype, tensor.stride()) for tensor in tensors]


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("save", SAVE_POLICIES)
@pytest.mark.parametrize("tokens", [0, 1, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_fake_and_meta_results_are_alike(extras, save, tokens, dtype):
    case = make_case(tokens, 3, 5, 16, 24, **extras)
    present = [name for name in GRADIENT_ORDER if name in ("x", "topk_weights", "w_gate", "w_down")]
    gradients = gradient_bits({*present, *(["b_up"] if extras.get("bias") else [])})
    args = flat_arguments(case, save=save, ring_rows=128, dtype=dtype, gradients=gradients)
    dout_TH = case.dout_TH.to(dtype)

    def everything(dout_TH, *args):
        forward = torch.ops.mok.moe_forward(*args)
        recomputed = torch.ops.mok.moe_recompute(*args)
        saved = list(forward[1:])
        backward = torch.ops.mok.moe_backward(dout_TH, *args[:13], saved, *args[13:])
        return described([*forward, *recomputed, *backward])

    real = everything(dout_TH, *args)
    meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
    assert everything(dout_TH.to("meta"), *meta) == real
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        assert everything(mode.from_tensor(dout_TH), *fake) == real


@pytest.mark.parametrize("extras", EXTRAS)
def test_the_context_has_the_planned_shapes(extras):
    case = make_case(50, 3, 5, 16, 24, **extras)
    for save, ring_rows in itertools.product(SAVE_POLICIES, (128, 384, 10**6 * PAD)):
        tensors, layer = op_arguments(case, save=save, ring_rows=ring_rows)
        rows = min(ring_rows, mok._C.worst_case_rows(1, 5, 3, 50)) if save != "none" else 0
        shared = extras.get("shared", 0)
        tokens = 50 if save != "none" and shared else 0
        expected = [(rows if save == "all" else 0, 16), (rows, 24), (rows, 24)]
        expected += [(tokens, shared)] * 2
        assert context_shapes(tensors, layer) == expected


def test_gradients_have_their_tensors_shapes_and_dtypes():
    case = make_case(9, 2, 4, 16, 24, bias=True, shared=8, shared_gate=True)
    tensors, _ = op_arguments(case, save="none", ring_rows=128)
    for wanted in [set(), *({name} for name in GRADIENT_ORDER), set(GRADIENT_ORDER)]:
        args = flat_arguments(case, save="none", ring_rows=128, gradients=gradient_bits(wanted))
        context = list(torch.ops.mok.moe_forward(*args)[1:])
        results = torch.ops.mok.moe_backward(
            case.dout_TH.bfloat16(), *args[:13], context, *args[13:]
        )
        for name, result in zip(GRADIENT_ORDER, results, strict=True):
            tensor = getattr(tensors, name)
            assert result.shape == (tensor.shape if name in wanted else (0,))
            assert result.dtype == tensor.dtype
            assert result.is_contiguous()


def test_a_symbolic_number_of_tokens_stays_symbolic():
    """No guard on T: one graph for all numbers of tokens but 0 and 1."""
    environment = ShapeEnv()
    symbol = environment.create_symbol(40, ConstantSource("T"), dynamic_dim=DimDynamic.DYNAMIC)
    num_tokens = environment.create_symintnode(symbol, hint=40)
    rows = worst_case_rows(1, 8, 2, num_tokens)
    ring = default_ring_rows(1, 8, 2, num_tokens)
    assert isinstance(rows, torch.SymInt)
    assert isinstance(ring, torch.SymInt)
    assert not environment.guards
    assert int(rows) == mok._C.worst_case_rows(1, 8, 2, 40)
    assert int(ring) == mok._C.default_ring_rows(1, 8, 2, 40)


def test_the_names_are_the_schemas():
    schema = torch.ops.mok.moe_forward.default._schema
    assert tuple(argument.name for argument in schema.arguments) == TENSOR_NAMES + SETTING_NAMES
    assert set(GRADIENT_ORDER) == set(TENSOR_NAMES) - {"topk_ids"}
    assert [gradient_bits({name}) for name in GRADIENT_ORDER] == [1 << bit for bit in range(12)]
    tensors = LayerTensors(*range(13))
    assert tensors.in_order() == tuple(range(13))
    settings = LayerSettings(*range(8))
    assert settings.in_order() == tuple(range(8))
    assert PAD == mok._C.DEFAULT_PAD
