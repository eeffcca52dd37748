"""`mok.moe` looks at the arguments of equal calls once: what differs is noticed all the same."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mok
from mok import _calls, workspace
from tests._numerics import assert_bitwise_equal, make_case
from tests._ops import moe_arguments


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch):
    monkeypatch.setattr(_calls, "_known", {})


@pytest.fixture
def arguments() -> dict:
    return moe_arguments(make_case(6, 2, 3, 16, 24, shared=16, bias=True))


def refused(arguments: dict, **changes) -> str:
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        mok.moe(**(arguments | changes))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_second_call_takes_what_the_first_has_found(arguments, monkeypatch):
    first = mok.moe(**arguments)
    monkeypatch.setattr("mok.ops._settings", None)
    assert_bitwise_equal({"out": mok.moe(**arguments)}, {"out": first})
    assert len(_calls._known) == 1


def test_other_numbers_of_tokens(arguments):
    def call(tokens):
        rows = ("x_TH", "topk_ids_TK", "topk_weights_TK", "shared_weight_T")
        fewer = {n: arguments[n][:tokens] for n in rows if arguments.get(n) is not None}
        return mok.moe(**(arguments | fewer))

    whole = call(6)
    for tokens in (3, 6, 0, 1):
        assert_bitwise_equal({"out": call(tokens)}, {"out": whole[:tokens]})


@pytest.mark.parametrize(
    "changes",
    [
        {"x_TH": torch.zeros(6, 16, dtype=torch.float64)},
        {"x_TH": torch.zeros(6, 24)},
        {"x_TH": torch.zeros(6)},
        {"x_TH": torch.zeros(7, 16)},
        {"x_TH": torch.zeros(6, 16, dtype=torch.bfloat16), "w_up": torch.zeros(1)},
        {"w_up": torch.zeros(3, 24, 8)},
        {"w_gate": torch.zeros(3, 8, 16)},
        {"w_down": torch.zeros(3, 16, 24, dtype=torch.float64)},
        {"b_up": torch.zeros(3, 1)},
        {"topk_ids_TK": torch.zeros(6, 2)},
        {"topk_ids_TK": torch.zeros(6, 4, dtype=torch.int64)},
        {"topk_weights_TK": torch.zeros(6, 2, dtype=torch.int64)},
        {"shared": (torch.zeros(16, 16),) * 2},
        {"shared_weight_T": torch.zeros(6, dtype=torch.int64)},
        {"max_tokens": 5},
        {"max_tokens": 1.5},
        {"ring_rows": [128]},
        {"save": "some"},
        {"activation": "relu"},
        {"swiglu_limit": -1.0},
        {"backend": "megakernel"},
        {"group": "world"},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_a_wrong_argument_is_refused_as_in_a_first_call(arguments, changes):
    first = refused(arguments, **changes)
    out = mok.moe(**arguments)
    assert refused(arguments, **changes) == first
    assert refused(arguments, **changes) == first
    assert_bitwise_equal({"out": mok.moe(**arguments)}, {"out": out})


@pytest.mark.parametrize("name", ["max_tokens", "ring_rows"])
def test_a_float_is_refused_after_an_equal_integer(arguments, name):
    mok.moe(**arguments, **{name: 128})
    assert "128.0" in refused(arguments, **{name: 128.0})


def test_three_tensors_that_are_no_tuple_are_no_shared_expert(arguments):
    del arguments["shared_weight_T"]
    mok.moe(**arguments)
    named = dict(zip(("gate", "up", "down"), arguments["shared"], strict=True))
    assert "shared is a dict" in refused(arguments, shared=named)
    assert "shared is a Tensor" in refused(arguments, shared=torch.zeros(3, 16, 16))


def test_a_limit_that_is_a_tensor_may_change(arguments):
    limit = torch.tensor(1.0)
    mok.moe(**(arguments | {"swiglu_limit": limit}))
    limit.fill_(0.125)
    expected = mok.moe(**(arguments | {"swiglu_limit": 0.125}))
    changed = mok.moe(**(arguments | {"swiglu_limit": limit}))
    assert_bitwise_equal({"out": changed}, {"out": expected})


def test_gradients_are_those_that_the_call_asks_for(arguments):
    arguments = arguments | {"max_tokens": 6}
    w_up, x_TH = arguments["w_up"], arguments["x_TH"]
    assert not mok.moe(**arguments).requires_grad
    w_up.requires_grad_()
    with torch.no_grad():
        assert not mok.moe(**arguments).requires_grad
    mok.moe(**arguments).sum().backward()
    alone = w_up.grad.clone()
    x_TH.requires_grad_()
    mok.moe(**arguments).sum().backward()
    assert x_TH.grad is not None
    assert_bitwise_equal({"w_up": w_up.grad}, {"w_up": 2 * alone})
    w_up.requires_grad_(False)
    w_up.grad = None
    mok.moe(**arguments).sum().backward()
    assert w_up.grad is None


def test_a_closed_workspace_is_replaced(arguments):
    first = mok.moe(**arguments, workspace_tag="calls")
    (known,) = _calls._known.values()
    workspace.close(known.settings.workspace)
    again = mok.moe(**arguments, workspace_tag="calls")
    assert_bitwise_equal({"out": again}, {"out": first})
    (known_again,) = _calls._known.values()
    assert known_again.settings.workspace != known.settings.workspace


def test_modes_and_fakes_see_the_op(arguments):
    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    plain = mok.moe(**arguments)
    for requires_grad in (False, True):
        arguments["w_gate"].requires_grad_(requires_grad)
        with Names() as seen:
            out = mok.moe(**arguments)
        assert "mok.moe_forward.default" in seen.names
        assert out.requires_grad == requires_grad
        assert_bitwise_equal({"out": out.detach()}, {"out": plain})
    with FakeTensorMode() as mode:
        faked = {
            name: torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, value)
            for name, value in arguments.items()
        }
        assert mok.moe(**faked).shape == plain.shape


@pytest.mark.parametrize("requires_grad", [False, True])
def test_function_modes_see_the_op(arguments, requires_grad):
    class Names(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.names.append(str(function))
            return function(*args, **(kwargs or {}))

    arguments["w_gate"].requires_grad_(requires_grad)
    with Names() as seen:
        mok.moe(**arguments)
    assert "mok.moe_forward" in seen.names


def test_what_is_known_stays_small(arguments, monkeypatch):
    monkeypatch.setattr(_calls, "_MOST", 3)
    for max_tokens in range(6, 12):
        mok.moe(**arguments, max_tokens=max_tokens)
    assert len(_calls._known) <= 3
