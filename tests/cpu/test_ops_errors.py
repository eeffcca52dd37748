"""Wrong arguments of `mok.moe` and of the raw ops: named in one sentence, never a crash."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("MOK_POISON", "1")  # the executor's scratch is NaN at the start of every call

import mok
from mok.shapes import GRADIENT_ORDER, SETTING_NAMES, gradient_bits
from tests._numerics import call, make_case
from tests._ops import flat_arguments, moe_arguments

pytestmark = pytest.mark.quick

FULL = {"bias": True, "shared": 24, "shared_gate": True}
ALL_GRADIENTS = gradient_bits(set(GRADIENT_ORDER))
SAVE_POLICIES = ("all", "gate_up", "none")

CASE = make_case(10, 2, 4, 16, 24, **FULL)
A = moe_arguments(CASE)
gate, up, down = A["shared"]
WRONG = [
    ({"x_TH": A["x_TH"].half()}, TypeError, r"x is torch.float16"),
    ({"x_TH": A["x_TH"].double()}, TypeError, r"x is torch.float64"),
    ({"x_TH": A["x_TH"].long()}, TypeError, r"x is torch.int64"),
    ({"x_TH": A["x_TH"][0]}, ValueError, r"x has shape \(16,\): it must be \[T, H\]"),
    ({"x_TH": A["x_TH"][None]}, ValueError, r"x has shape \(1, 10, 16\)"),
    ({"x_TH": torch.tensor(1.0)}, ValueError, r"x has shape \(\)"),
    ({"x_TH": A["x_TH"].T.contiguous().T}, ValueError, "x must have a contiguous last"),
    ({"x_TH": A["x_TH"][:, :8]}, ValueError, r"x has H = 8 columns and w_gate 16"),
    ({"x_TH": A["x_TH"][:9]}, ValueError, r"topk_ids has shape \(10, 2\).*\(9, 2\)"),
    ({"x_TH": A["x_TH"].to("meta")}, ValueError, "on cpu and x on meta"),
    ({"topk_ids_TK": A["topk_ids_TK"].short()}, TypeError, "topk_ids is torch.int16"),
    ({"topk_ids_TK": A["topk_ids_TK"].float()}, TypeError, "topk_ids is torch.float32"),
    ({"topk_ids_TK": A["topk_ids_TK"].bool()}, TypeError, "topk_ids is torch.bool"),
    ({"topk_ids_TK": A["topk_ids_TK"][0]}, ValueError, r"topk_ids has shape \(2,\)"),
    ({"topk_ids_TK": A["topk_ids_TK"][:, :0]}, ValueError, "K = 0 choices"),
    ({"topk_ids_TK": A["topk_ids_TK"].repeat(1, 3)}, ValueError, "K = 6 choices.*experts"),
    ({"topk_ids_TK": A["topk_ids_TK"].to("meta")}, ValueError, "topk_ids is on meta"),
    ({"topk_weights_TK": A["topk_weights_TK"][:, :1]}, ValueError, "topk_weights has shape"),
    ({"topk_weights_TK": A["topk_weights_TK"].int()}, TypeError, "topk_weights is torch.int32"),
    ({"topk_weights_TK": A["topk_weights_TK"] + 0j}, TypeError, "topk_weights is torch.complex64"),
    ({"w_gate": A["w_gate"].half()}, TypeError, "w_gate is torch.float16"),
    ({"w_gate": A["w_gate"].bfloat16()}, TypeError, "w_gate is torch.bfloat16 and x torch.float32"),
    ({"w_gate": A["w_gate"][0]}, ValueError, r"w_gate has shape \(24, 16\)"),
    ({"w_gate": torch.tensor(0.0)}, ValueError, r"w_gate has shape \(\)"),
    ({"w_gate": A["w_gate"].mT.contiguous().mT}, ValueError, "w_gate has stride 24 in its last"),
    ({"w_gate": A["w_gate"][:0]}, ValueError, "w_gate has 0 experts"),
    ({"w_gate": A["w_gate"][:3]}, ValueError, r"w_up has shape \(4, 24, 16\).*\(3, 24, 16\)"),
    ({"w_up": A["w_up"][:, :16]}, ValueError, r"w_up has shape \(4, 16, 16\).*\(4, 24, 16\)"),
    ({"w_down": A["w_down"].mT}, ValueError, r"w_down has shape \(4, 24, 16\).*\(4, 16, 24\)"),
    ({"b_gate": A["b_gate"][:3]}, ValueError, r"b_gate has shape \(3, 24\)"),
    ({"b_up": A["b_up"].T}, ValueError, r"b_up has shape \(24, 4\)"),
    ({"b_down": A["b_down"].T.contiguous().T}, ValueError, "b_down has stride 4"),
    ({"b_down": A["b_down"].int()}, TypeError, "b_down is torch.int32"),
    ({"shared": (gate, up)}, ValueError, "shared has 2 tensors"),
    ({"shared": (gate, up, None)}, ValueError, "needs all of gate, up and down"),
    ({"shared": (gate, up, down.T)}, ValueError, r"shared_down has shape \(24, 16\)"),
    ({"shared": (gate[:20], up[:20], down[:, :20])}, ValueError, "width J is 20.*multiple of 8"),
    ({"shared": None}, ValueError, "shared_weight_T was passed without a shared expert"),
    ({"shared_weight_T": A["shared_weight_T"][:, None]}, ValueError, "shared_weight has shape"),
    ({"shared_weight_T": A["shared_weight_T"] > 0}, TypeError, "shared_weight_T is torch.bool"),
    ({"activation": "relu"}, ValueError, "activation is 'relu'"),
    ({"swiglu_limit": 0}, ValueError, "swiglu_limit is 0.0"),
    ({"swiglu_limit": -1.0}, ValueError, "swiglu_limit is -1.0"),
    ({"swiglu_limit": float("nan")}, ValueError, "swiglu_limit is nan"),
    ({"save": "some"}, ValueError, "save is 'some'"),
    ({"max_tokens": 9}, ValueError, "T = 10 tokens, more than max_tokens = 9"),
    ({"max_tokens": -1}, ValueError, "max_tokens is -1"),
    ({"max_tokens": 2.5}, ValueError, "max_tokens is 2.5"),
    ({"max_tokens": 2**31}, ValueError, "max_tokens = 2147483648 with top_k = 2"),
    ({"ring_rows": 0}, ValueError, "ring_rows is 0"),
    ({"ring_rows": 1.5}, ValueError, "ring_rows is 1.5"),
    ({"backend": "megakernel"}, NotImplementedError, "backend 'megakernel' cannot run here"),
    ({"backend": "gpu"}, ValueError, "backend is 'gpu': it must be one of"),
    ({"group": "world"}, TypeError, "group is 'world'"),
    *(
        ({name: wrong}, TypeError, f"^{name.partition('_T')[0]} is {kind}: it must be a tensor$")
        for name in ("x_TH", "topk_ids_TK", "topk_weights_TK", "w_gate", "w_up", "w_down")
        for wrong, kind in ((None, "None"), ([1, 2], "a list"))
    ),
    *(
        (
            {name: [1]},
            TypeError,
            f"^{name.partition('_T')[0]} is a list: it must be a tensor or None$",
        )
        for name in ("b_gate", "b_up", "b_down", "shared_weight_T")
    ),
    ({"shared": 5}, TypeError, r"^shared is an int: it must be \(gate, up, down\) or None$"),
    ({"shared": (gate, up, [1])}, TypeError, r"^shared_down is a list: it must be a tensor"),
]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    WRONG,
    ids=[f"{i}-{next(iter(w[0]))}" for i, w in enumerate(WRONG)],
)
def test_wrong_arguments_are_named(changes, kind, message):
    with pytest.raises(kind, match=message) as info:
        mok.moe(**moe_arguments(CASE, **changes))
    assert "\n" not in str(info.value)
    mok.moe(**A)  # the workspace is as good as before


@pytest.mark.parametrize("size", ["hidden", "intermediate"])
@pytest.mark.parametrize("width", [1, 4, 7, 12, 20])
def test_widths_are_multiples_of_eight(size, width):
    hidden, intermediate = (width, 8) if size == "hidden" else (8, width)
    case = make_case(3, 1, 2, hidden, intermediate)
    with pytest.raises(ValueError, match=rf"{size} size . is {width}: .*multiple of 8"):
        call(mok.moe, case.tensors, case.topk_ids_TK)


def mutations(tensor):
    yield tensor[:-1]
    yield tensor[..., : max(0, tensor.shape[-1] - 8)]
    yield tensor[:0]
    yield tensor.unsqueeze(0)
    yield tensor.flatten()
    yield tensor.new_empty(0)
    yield tensor.new_empty(())
    yield tensor.repeat(2, *[1] * (tensor.dim() - 1))
    for dtype in (
        torch.float64,
        torch.float16,
        torch.float32,
        torch.bfloat16,
        torch.int32,
        torch.bool,
    ):
        yield tensor.to(dtype)
    yield tensor.to("meta")
    yield tensor.to_sparse()
    yield tensor.unsqueeze(-1).repeat(*[1] * tensor.dim(), 2)[..., 0]
    yield tensor[..., :1].expand(tensor.shape)


# These fit, or fit with some of the saving policies.
MAY_FIT = ({"ring_rows": 2**62}, {"max_tokens": 100}, {"gradients": -1}, {"save": "all"})


def apply(tensors, index, choice):
    """A copy of the list with one of its tensors replaced by one of its mutations."""
    tensors = list(tensors)
    tensor = tensors[index]
    if tensor is not None and tensor.dim() and tensor.is_cpu and not tensor.is_sparse:
        choices = list(mutations(tensor))
        tensors[index] = choices[choice % len(choices)]
    return tensors


@settings(max_examples=400, deadline=None)
@given(
    backward=st.booleans(),
    save=st.sampled_from(SAVE_POLICIES),
    wrong=st.lists(st.tuples(st.integers(0, 31), st.integers(0, 17)), max_size=2),
    other=st.sampled_from(
        [{}, {}, {}]
        + [{"num_experts": count} for count in (8, 0, -4, 2**32 + 4)]
        + [{"ring_rows": rows} for rows in (2**62, 64, -128)]
        + [{"max_tokens": count} for count in (4, 2**40, 100)]
        + [{"gradients": -1}, {"workspace": "none"}, {"save": "no"}, {"save": "all"}]
    ),
)
def test_raw_ops_raise_whatever_they_are_given(backward, save, wrong, other):
    """Nothing crashes; under a sanitizer this test says more."""
    args = flat_arguments(CASE, save=save, gradients=ALL_GRADIENTS)
    results = list(torch.ops.mok.moe_forward(*args))
    saved = results[1:]
    gradients = torch.ops.mok.moe_backward(CASE.dout_TH.bfloat16(), *args[:13], saved, *args[13:])
    tensors = [*args[:13], CASE.dout_TH.bfloat16(), *results, *gradients]
    for index, choice in wrong:
        tensors = apply(tensors, index, choice)
    layer = tuple((dict(zip(SETTING_NAMES, args[13:], strict=True)) | other).values())
    inputs, dout_TH, out, saved = tensors[:13], tensors[13], tensors[14], tensors[15:20]
    try:
        if backward:
            torch.ops.mok.moe_backward_out(dout_TH, *inputs, saved, *layer, False, tensors[20:])
        else:
            torch.ops.mok.moe_forward_out(*inputs, *layer, out, saved)
    except (ValueError, TypeError, NotImplementedError, RuntimeError):
        raised = True
    else:
        raised = False
    if other and other not in MAY_FIT:
        assert raised, other
    if not other and not wrong:
        assert not raised
