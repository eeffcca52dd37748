"""Sigmoid and top-k-softmax routers against loops; bias update; record and replay; refusals."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import mok
from mok.router import (
    SigmoidTopKRouter,
    SoftmaxTopKRouter,
    TopKSoftmaxRouter,
    expert_counts,
    record_routing,
    replay_routing,
    top_k_lowest_first,
    z_loss,
)
from tests._numerics import relative_error

pytestmark = pytest.mark.quick
KINDS = (SoftmaxTopKRouter, SigmoidTopKRouter, TopKSoftmaxRouter)


def deepseek_loop(logits, bias, top_k, num_groups, topk_groups, normalize, factor):
    """One token in Python floats: ids and weights as DeepSeek-V3's report describes them."""
    scores = [1 / (1 + math.exp(-z)) for z in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // num_groups
    groups = [sorted(biased[g * size : (g + 1) * size])[-2:] for g in range(num_groups)]
    order = sorted(range(num_groups), key=lambda g: (-sum(groups[g]), g))
    kept = [e for g in order[:topk_groups] for e in range(g * size, (g + 1) * size)]
    if num_groups == 1:
        kept = list(range(len(logits)))
    ids = sorted(kept, key=lambda e: (-biased[e], e))[:top_k]
    total = sum(scores[e] for e in ids) if normalize else 1.0
    return ids, [factor * scores[e] / total for e in ids]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "topk_groups"),
    [(1, 1, 1, 1), (12, 5, 1, 1), (16, 4, 4, 2), (24, 6, 3, 2), (32, 8, 16, 4), (8, 8, 2, 2)],
)
def test_sigmoid_equals_a_loop(num_experts, top_k, num_groups, topk_groups, normalize):
    router = SigmoidTopKRouter(
        16,
        num_experts,
        top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        normalize=normalize,
        scaling_factor=2.5,
    )
    router.expert_bias.uniform_(-2, 2)  # also scores below 0
    x_TH = torch.randn(40, 16)
    output = router(x_TH)
    for t in range(40):
        ids, weights = deepseek_loop(
            output.logits_TE[t].tolist(),
            router.expert_bias.tolist(),
            top_k,
            num_groups,
            topk_groups,
            normalize,
            2.5,
        )
        assert output.topk_ids_TK[t].tolist() == ids
        assert output.topk_weights_TK[t].tolist() == pytest.approx(weights, rel=1e-5)


@given(st.integers(0, 2**32 - 1), st.integers(1, 30), st.data())
def test_ties_of_any_sign_go_to_the_lowest_id(seed, num_experts, data):
    top_k = data.draw(st.integers(1, num_experts))
    generator = torch.Generator().manual_seed(seed)
    values_TE = torch.randint(-3, 4, (6, num_experts), generator=generator) / 4
    values_TE[values_TE == 0] *= -1  # -0 equals 0
    values_TE[0, 0] = -torch.inf
    expected = [
        sorted(range(num_experts), key=lambda e, row=row: (-row[e], e))[:top_k]
        for row in values_TE.tolist()
    ]
    assert top_k_lowest_first(values_TE, top_k).tolist() == expected


def test_equal_groups_and_equal_scores_go_to_the_lowest_ids():
    router = SigmoidTopKRouter(8, 12, 4, num_groups=3, topk_groups=2)
    with torch.no_grad():
        router.weight.zero_()
    assert router(torch.randn(2, 8)).topk_ids_TK.tolist() == [[0, 1, 2, 3]] * 2
    # A NaN token must not make ids that are no experts, nor one twice.
    (ids,) = router(torch.full((1, 8), torch.nan)).topk_ids_TK.tolist()
    assert len(set(ids)) == 4
    assert set(ids) <= set(range(12))


@pytest.mark.parametrize("bias", [True, False])
def test_topk_softmax_equals_mixtrals_order(bias):
    ours = TopKSoftmaxRouter(16, 20, 4, bias=bias)
    mixtral = SoftmaxTopKRouter(16, 20, 4, bias=bias)
    mixtral.load_state_dict(ours.state_dict())
    x_TH = torch.randn(50, 16)
    first, second = ours(x_TH), mixtral(x_TH)
    assert torch.equal(first.topk_ids_TK, second.topk_ids_TK)
    torch.testing.assert_close(first.topk_weights_TK, second.topk_weights_TK)
    torch.testing.assert_close(first.probabilities_TE, second.probabilities_TE)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_fp64_and_none_for_the_expert_bias(kind):
    router = kind(6, 5, 2, bias=True, dtype=torch.float64)
    x_TH = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in router.named_parameters()]
    assert names == ["weight", "bias"]

    def outputs(x_TH, *parameters):
        values = dict(zip(names, parameters, strict=True))
        output = torch.func.functional_call(router, values, (x_TH,))
        return output.topk_weights_TK, output.probabilities_TE, z_loss(output)

    assert torch.autograd.gradcheck(outputs, (x_TH, *router.parameters()))


@pytest.mark.parametrize("kind", KINDS)
def test_replay_recomputes_the_weights_of_given_ids(kind):
    router = kind(16, 8, 3)
    x_TH = torch.randn(6, 16)
    routed = router(x_TH)
    replayed = router(x_TH, routed.topk_ids_TK.to(torch.int32))
    assert torch.equal(replayed.topk_weights_TK, routed.topk_weights_TK)
    ids_TK = torch.tensor([[0, -1, 8], [-1, -1, -1], [7, 7, 2]])
    output = router(x_TH[:3], ids_TK)
    assert (output.topk_weights_TK[0, 1:] == 0).all()
    assert output.topk_weights_TK[0, 0] > 0
    assert (output.topk_weights_TK[1] == 0).all()
    output.topk_weights_TK.sum().backward()
    assert router.weight.grad.isfinite().all()


def test_bias_update_is_the_published_rule():
    router = SigmoidTopKRouter(8, 4, 1)
    router.update_expert_bias(torch.tensor([6, 2, 0, 0]), rate=0.5)
    assert router.expert_bias.tolist() == [-0.5, 0.0, 0.5, 0.5]
    router.update_expert_bias(torch.tensor([2, 2, 2, 2]), rate=0.5)
    assert router.expert_bias.tolist() == [-0.5, 0.0, 0.5, 0.5]


def test_bias_updates_balance_a_skewed_router():
    router = SigmoidTopKRouter(16, 8, 2)
    x_TH = torch.randn(512, 16) + 1
    with torch.no_grad():
        router.weight[:2] += 0.1

    def largest_share():
        counts_E = expert_counts(router(x_TH).topk_ids_TK, 8)
        return (counts_E.max() / counts_E.sum()).item()

    assert largest_share() > 0.25
    for _ in range(400):
        router.update_expert_bias(expert_counts(router(x_TH).topk_ids_TK, 8), rate=2e-3)
    assert largest_share() < 0.15


def test_expert_bias_is_saved_and_stays_fp32():
    router = SigmoidTopKRouter(8, 4, 2)
    router.expert_bias.fill_(1.001)
    for moved in (router.to(torch.bfloat16), copy.deepcopy(router).double()):
        assert moved.expert_bias.dtype == torch.float32
        assert torch.equal(moved.expert_bias, torch.full((4,), 1.001))
    assert router.weight.dtype == torch.bfloat16
    assert "expert_bias" in router.state_dict()
    layer = mok.MoELayer(8, 8, 4, 2, router="sigmoid", device="meta", dtype=torch.bfloat16)
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.equal(layer.router.expert_bias, torch.zeros(4))


def test_computes_in_fp32_under_autocast():
    router = SigmoidTopKRouter(64, 16, 2, normalize=False, bias=True, dtype=torch.bfloat16)
    x_TH = torch.randn(10, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        output = router(x_TH)
    logits = x_TH.double() @ router.weight.detach().double().T + router.bias.detach().double()
    exact = torch.sigmoid(logits).gather(1, output.topk_ids_TK)
    assert output.topk_weights_TK.dtype == torch.float32
    assert relative_error(output.topk_weights_TK.detach(), exact) < 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_groups": 3}, r"num_groups is 3: it must divide num_experts \(8\)"),
        ({"num_groups": 8}, "num_groups is 8: .* must be at least 16"),
        ({"num_groups": 2, "topk_groups": 3}, "topk_groups is 3: it must be between 1 and"),
        ({"num_groups": 4, "topk_groups": 1}, "top_k is 3: 1 groups of 2 experts have fewer"),
        ({"score_before_experts": True}, "score_before_experts is True: mok applies"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        SigmoidTopKRouter(16, 8, 3, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_before_experts_are_refused_at_construction(kind):
    with pytest.raises(ValueError, match="score_before_experts is True: mok applies"):
        kind(16, 8, 3, score_before_experts=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_takes_any_router(kind):
    router = kind(32, 6, 2, bias=True)
    layer = mok.MoELayer(32, 16, 6, 2, router=router)
    assert layer.router is router
    x_TH = torch.randn(9, 32)
    out, routing = layer(x_TH, return_router_output=True)
    expected = mok.reference.moe_reference(
        x_TH,
        routing.topk_ids_TK,
        routing.topk_weights_TK,
        *(layer.experts.w_gate, layer.experts.w_up, layer.experts.w_down),
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    out.sum().backward()
    assert router.weight.grad.abs().sum() > 0
    assert router.bias.grad.abs().sum() > 0
    assert layer(torch.randn(0, 32)).shape == (0, 32)


def test_a_layers_router_has_its_sizes():
    with pytest.raises(ValueError, match=r"router has hidden_size=16, .*\(32, 6, 2\)"):
        mok.MoELayer(32, 16, 6, 2, router=SoftmaxTopKRouter(16, 6, 2))
    with pytest.raises(ValueError, match="router is 'linear': it must be 'softmax'"):
        mok.MoELayer(32, 16, 6, 2, router="linear")


class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = mok.MoELayer(32, 16, 6, 2, router="sigmoid")
        self.second = mok.MoELayer(32, 16, 6, 2)

    def forward(self, x):
        x = x + checkpoint(self.first, x, use_reentrant=False)
        return x + self.second(x)


def test_a_recorded_routing_is_replayed_by_name():
    """The same experts whatever the replaying model thinks; gradient to the weights only."""
    model, other = TwoLayers(), TwoLayers()
    x = torch.randn(2, 5, 32)
    with record_routing(model) as routing:
        out = model(x)
    assert sorted(routing) == ["first.router", "second.router"]
    with record_routing(other) as own:
        other(x)
    assert not torch.equal(own["second.router"], routing["second.router"])
    with replay_routing(other, routing), record_routing(other) as replayed:
        other(x).sum().backward()  # the checkpointed layer's router runs again inside
    assert {name: ids.tolist() for name, ids in replayed.items()} == {
        name: ids.tolist() for name, ids in routing.items()
    }
    assert other.first.router.weight.grad.abs().sum() > 0
    with record_routing(other) as after:
        other(x)
    assert torch.equal(after["second.router"], own["second.router"])
    with replay_routing(model, routing):
        assert torch.equal(model(x), out)


def test_replay_names_what_does_not_fit():
    model = TwoLayers()
    ids_TK = torch.zeros(4, 2, dtype=torch.int64)
    with (
        pytest.raises(ValueError, match=r"routing has 'third'.*'first.router', 'second.router'"),
        replay_routing(model, {"third": ids_TK}),
    ):
        pass
    with (
        replay_routing(model, {"second.router": ids_TK}),
        pytest.raises(ValueError, match="has 4 tokens and the router's input 10"),
    ):
        model(torch.randn(2, 5, 32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2, 2), (5, 2), (3, 3), (3,)])
def test_a_replayed_routing_has_the_shape_of_the_tokens(kind, shape):
    with pytest.raises(ValueError, match=r"topk_ids has shape .* must be \(3, 2\)"):
        kind(16, 6, 2)(torch.randn(3, 16), torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_tokens_of_other_forms_are_refused(kind):
    router = kind(16, 6, 2)
    with pytest.raises(TypeError, match=r"topk_ids is torch.float32: expert ids are"):
        router(torch.randn(3, 16), torch.zeros(3, 2))
    for shape in ((2, 3, 16), (3, 17), (16,)):
        with pytest.raises(ValueError, match=r"x has shape .* must be \[T, 16\]"):
            router(torch.randn(shape))
    with pytest.raises(ValueError, match=r"top_k is 2\.0"):
        kind(16, 6, 2.0)


def test_counts_that_would_move_the_bias_wrongly_are_refused():
    router = SigmoidTopKRouter(16, 6, 2)
    with pytest.raises(ValueError, match=r"counts has shape \(1,\): it must be \(6,\)"):
        router.update_expert_bias(torch.ones(1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"counts is torch.float32: pass numbers of routes"):
        router.update_expert_bias(torch.rand(6))
    assert not router.expert_bias.any()


@pytest.mark.parametrize("kind", KINDS)
def test_bitwise_repeatable_and_compiles_without_breaks(kind):
    router = kind(64, 32, 4)
    x_TH = torch.randn(100, 64)

    def job(x_TH):
        output = router(x_TH)
        return output.topk_ids_TK, output.topk_weights_TK, z_loss(output)

    expected = job(x_TH)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(job(x_TH), expected, strict=True))
    compiled = torch.compile(job, fullgraph=True, backend="aot_eager")(x_TH)
    assert torch.equal(expected[0], compiled[0])
    torch.testing.assert_close(compiled[1:], expected[1:])
