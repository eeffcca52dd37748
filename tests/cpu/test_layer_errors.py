"""What `mok.MoELayer` refuses, in sentences: settings, inputs, dtype mixes, second derivatives."""

import pytest
import torch

import mok

pytestmark = pytest.mark.quick

H, I, E, K = 32, 48, 6, 3


def make_layer(dtype=torch.float32, **settings):
    return mok.MoELayer(H, I, E, K, dtype=dtype, **settings)


def tokens(count, dtype=torch.bfloat16):
    return torch.randn(count, H).to(dtype).requires_grad_()


@pytest.mark.parametrize(
    ("x", "call", "error", "message"),
    [
        (torch.zeros(3, 8), {}, ValueError, r"x has shape \(3, 8\).*hidden_size \(32\)"),
        (torch.tensor(1.0), {}, ValueError, r"x has shape \(\)"),
        (torch.zeros(3, H).double(), {}, TypeError, "x is torch.float64"),
        (torch.zeros(3, H).half(), {}, TypeError, "x is torch.float16"),
        (torch.zeros(3, H).int(), {}, TypeError, "x is torch.int32"),
        (torch.zeros(3, H), {"topk_weights": torch.ones(3, K)}, ValueError, "without topk_ids"),
        (
            torch.zeros(3, H),
            {"topk_ids": torch.zeros(3, 2).long()},
            ValueError,
            r"topk_ids has shape \(3, 2\).*top_k \(3\)",
        ),
        (
            torch.zeros(3, H),
            {"topk_ids": torch.zeros(4, K).long()},
            ValueError,
            "topk_ids has 4 tokens and x has 3",
        ),
        (
            torch.zeros(3, H),
            {"topk_ids": torch.zeros(3, K)},
            TypeError,
            "topk_ids is torch.float32",
        ),
        (
            torch.zeros(3, H),
            {"topk_ids": torch.zeros(3, K).long(), "topk_weights": torch.ones(3, K).long()},
            TypeError,
            "topk_weights is torch.int64",
        ),
        (
            torch.zeros(3, H),
            {"topk_ids": [[0] * K] * 3, "topk_weights": torch.ones(3, K)},
            TypeError,
            "topk_ids is a list: it must be a tensor",
        ),
        (
            torch.zeros(3, H),
            {"topk_ids": torch.zeros(3, K).long(), "topk_weights": [1.0]},
            TypeError,
            "topk_weights is a list: it must be a tensor",
        ),
        (
            torch.zeros(3, H),
            {
                "topk_ids": torch.zeros(3, K).long(),
                "topk_weights": torch.ones(3, K),
                "return_router_output": True,
            },
            ValueError,
            "return_router_output is True",
        ),
    ],
)
def test_wrong_inputs_are_named(x, call, error, message):
    with pytest.raises(error, match=message):
        make_layer()(x, **call)


def test_mixes_that_make_no_sense():
    x = tokens(3, dtype=torch.float32)
    with pytest.raises(TypeError, match="and the parameters are"):
        make_layer(torch.bfloat16)(x)
    with pytest.raises(TypeError, match=r"the layer's parameters are torch\.float16"):
        make_layer().half()(x)
    bare = make_layer(router=None)
    with pytest.raises(ValueError, match="topk_ids is missing"):
        bare(x)
    with pytest.raises(ValueError, match="topk_weights is missing"):
        bare(x, topk_ids=torch.zeros(3, K).long())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"hidden_size": 12}, ValueError, "hidden_size is 12: .* multiple of 8"),
        ({"intermediate_size": 0}, ValueError, "intermediate_size is 0: .* multiple of 8"),
        ({"intermediate_size": 8.0}, ValueError, "intermediate_size is 8.0"),
        ({"shared_intermediate_size": 20}, ValueError, "shared_intermediate_size is 20"),
        ({"num_experts": -1}, ValueError, "num_experts is -1: it must be a positive integer"),
        ({"top_k": 7}, ValueError, r"top_k is 7: it must be at most num_experts \(6\)"),
        ({"top_k": 0}, ValueError, "top_k is 0"),
        ({"max_tokens": 0}, ValueError, "max_tokens is 0"),
        ({"ring_rows": -5}, ValueError, "ring_rows is -5"),
        ({"shared_gate": True}, ValueError, "shared_gate is True without a shared expert"),
        ({"router": "linear"}, ValueError, "router is 'linear': it must be 'softmax', 'sigmoid'"),
        ({"save": "x"}, ValueError, "save is 'x': it must be 'all', 'gate_up' or 'none'"),
        ({"backend": "gpu"}, ValueError, "backend is 'gpu'"),
        ({"activation": "relu"}, ValueError, "activation is 'relu'"),
        ({"swiglu_limit": -1.0}, ValueError, "swiglu_limit is -1.0"),
        ({"dtype": torch.float16}, TypeError, "dtype is torch.float16"),
        ({"group": "world"}, ValueError, "group is 'world'"),
    ],
)
def test_wrong_settings_are_named(settings, error, message):
    sizes = {"hidden_size": H, "intermediate_size": I, "num_experts": E, "top_k": K}
    with pytest.raises(error, match=message) as caught:
        mok.MoELayer(**(sizes | settings))
    assert "\n" not in str(caught.value)


def test_one_rank_takes_any_number_of_tokens_up_to_max_tokens():
    layer = make_layer()
    assert [layer(tokens(t)).shape[0] for t in (3, 200, 1, 0)] == [3, 200, 1, 0]
    limited = make_layer(max_tokens=8)
    assert limited(tokens(8)).shape[0] == 8
    with pytest.raises(ValueError, match="max_tokens"):
        limited(tokens(9))


def test_double_backward_is_one_clear_error():
    layer = make_layer()
    x = tokens(4)
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()
