"""The softmax top-k router and its load-balancing loss against loops, ties and repeats."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mok.router import (
    RouterOutput,
    SoftmaxTopKRouter,
    load_balancing_loss,
    top_k_lowest_first,
)
from tests._numerics import relative_error

pytestmark = pytest.mark.quick


def naive_routing(logits_TE, top_k, normalize):
    """Sorted Python tuples: the largest probability first, of equal ones the lowest id."""
    ids, weights = [], []
    for row in torch.softmax(logits_TE, dim=1).tolist():
        best = sorted((-p, e) for e, p in enumerate(row))[:top_k]
        total = sum(-p for p, _ in best) if normalize else 1.0
        ids.append([e for _, e in best])
        weights.append([-p / total for p, _ in best])
    return torch.tensor(ids), torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (5, 5), (16, 4), (300, 7)])
def test_equals_a_loop(num_experts, top_k, normalize):
    router = SoftmaxTopKRouter(24, num_experts, top_k, normalize=normalize)
    x_TH = torch.randn(37, 24)
    output = router(x_TH)
    ids_TK, weights_TK = naive_routing(x_TH @ router.weight.detach().T, top_k, normalize)
    assert output.topk_ids_TK.dtype == torch.int64
    assert output.topk_weights_TK.dtype == torch.float32
    assert torch.equal(output.topk_ids_TK, ids_TK)
    assert relative_error(output.topk_weights_TK.detach(), weights_TK) < 1e-6
    expected_sum = torch.ones(37) if normalize else output.topk_weights_TK.sum(1)
    torch.testing.assert_close(output.topk_weights_TK.sum(1), expected_sum)


@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.data())
def test_ties_go_to_the_lowest_id(seed, num_experts, data):
    top_k = data.draw(st.integers(1, num_experts))
    generator = torch.Generator().manual_seed(seed)
    values_TE = torch.randint(0, 4, (6, num_experts), generator=generator) / 4
    expected = [
        sorted(range(num_experts), key=lambda e, row=row: (-row[e], e))[:top_k]
        for row in values_TE.tolist()
    ]
    assert top_k_lowest_first(values_TE, top_k).tolist() == expected


def test_equal_logits_and_extreme_values():
    router = SoftmaxTopKRouter(8, 300, 4)
    with torch.no_grad():
        router.weight.zero_()
    output = router(torch.randn(3, 8))
    assert output.topk_ids_TK.tolist() == [[0, 1, 2, 3]] * 3
    torch.testing.assert_close(output.topk_weights_TK, torch.full((3, 4), 0.25))
    values_TE = torch.tensor([[0.0, 1e-45, 1.0, 1e-38, 0.0]])
    assert top_k_lowest_first(values_TE, 5).tolist() == [[2, 3, 1, 0, 4]]
    # A NaN token must not make ids that are no experts.
    nan_TE = torch.full((1, 5), torch.nan)
    assert top_k_lowest_first(nan_TE, 3).tolist() == [[0, 1, 2]]
    assert top_k_lowest_first(-nan_TE, 3).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_computes_in_fp32_whatever_the_dtypes(weight_dtype, autocast):
    router = SoftmaxTopKRouter(64, 16, 2, dtype=torch.float32).to(weight_dtype)
    assert router.weight.dtype == weight_dtype
    x_TH = torch.randn(10, 64).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = router(x_TH)
    exact = torch.softmax(x_TH.double() @ router.weight.detach().double().T, dim=1)
    assert output.probabilities_TE.dtype == torch.float32
    assert relative_error(output.probabilities_TE.detach(), exact) < 1e-6


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_in_fp64(normalize):
    router = SoftmaxTopKRouter(6, 5, 2, normalize=normalize, dtype=torch.float64)
    x_TH = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def weights(x_TH, weight):
        output = torch.func.functional_call(router, {"weight": weight}, (x_TH,))
        return output.topk_weights_TK, load_balancing_loss(output)

    assert torch.autograd.gradcheck(weights, (x_TH, router.weight))


@pytest.mark.parametrize("normalize", [True, False])
def test_replay_recomputes_the_weights_of_given_ids(normalize):
    router = SoftmaxTopKRouter(16, 8, 3, normalize=normalize)
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


def naive_loss(output, num_experts, mask=None):
    tokens = [t for t in range(len(output.topk_ids_TK)) if mask is None or mask[t]]
    if not tokens:
        return 0.0
    chosen, probability = [0] * num_experts, [0.0] * num_experts
    for t in tokens:
        for e in output.topk_ids_TK[t].tolist():
            if 0 <= e < num_experts:
                chosen[e] += 1
        for e, p in enumerate(output.probabilities_TE[t].tolist()):
            probability[e] += p
    parts = zip(chosen, probability, strict=True)
    return num_experts * math.fsum(c * p for c, p in parts) / len(tokens) ** 2


@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_loss_equals_the_formula(tokens):
    router = SoftmaxTopKRouter(16, 6, 2)
    output = router(torch.randn(tokens, 16))
    assert load_balancing_loss(output).item() == pytest.approx(naive_loss(output, 6), rel=1e-5)
    mask_T = torch.rand(tokens) < 0.5
    loss = load_balancing_loss(output, mask_T)
    assert loss.item() == pytest.approx(naive_loss(output, 6, mask_T.tolist()), rel=1e-5)
    assert load_balancing_loss(output, torch.zeros(tokens, dtype=torch.bool)) == 0


def test_loss_of_even_and_worst_routing():
    even = RouterOutput(
        torch.arange(8).reshape(4, 2),
        torch.ones(4, 2),
        torch.full((4, 8), 1 / 8),
        torch.zeros(4, 8),
    )
    assert load_balancing_loss(even).item() == pytest.approx(2.0)
    worst = RouterOutput(
        torch.tensor([[0, 1]] * 4),
        torch.ones(4, 2),
        torch.tensor([[0.5, 0.5] + [0.0] * 6] * 4),
        torch.zeros(4, 8),
    )
    assert load_balancing_loss(worst).item() == pytest.approx(8.0)


def test_masked_tokens_do_not_reach_the_loss():
    router = SoftmaxTopKRouter(16, 6, 2)
    x_TH = torch.randn(10, 16)
    padded_TH = torch.cat([x_TH, torch.full((3, 16), torch.nan)])
    mask_T = torch.arange(13) < 10
    loss = load_balancing_loss(router(padded_TH), mask_T)
    torch.testing.assert_close(loss, load_balancing_loss(router(x_TH)))
    no_routes = router(x_TH)._replace(topk_ids_TK=torch.full((10, 2), -1))
    assert load_balancing_loss(no_routes) == 0


def test_loss_and_gradient_are_bitwise_repeatable():
    router = SoftmaxTopKRouter(64, 32, 4)
    x_TH = torch.randn(500, 64)
    repeats = []
    for _ in range(8):
        router.weight.grad = None
        output = router(x_TH)
        loss = load_balancing_loss(output)
        (loss + output.topk_weights_TK.square().sum()).backward()
        repeats.append((loss.detach(), output.topk_ids_TK, router.weight.grad))
    for repeat in repeats[1:]:
        assert all(torch.equal(a, b) for a, b in zip(repeat, repeats[0], strict=True))


@pytest.mark.parametrize("top_k", [0, 5])
def test_top_k_is_checked(top_k):
    with pytest.raises(ValueError, match=rf"top_k is {top_k}: .* num_experts \(4\)"):
        SoftmaxTopKRouter(8, 4, top_k)


def test_repr_names_the_settings():
    text = repr(SoftmaxTopKRouter(8, 4, 2, normalize=False))
    assert "hidden_size=8, num_experts=4, top_k=2, normalize=False" in text


def test_compiles_without_breaks():
    router = SoftmaxTopKRouter(16, 8, 2)
    x_TH = torch.randn(12, 16)

    def job(x_TH):
        output = router(x_TH)
        return output.topk_ids_TK, output.topk_weights_TK, load_balancing_loss(output)

    expected = job(x_TH)
    compiled = torch.compile(job, fullgraph=True, backend="aot_eager")(x_TH)
    assert torch.equal(expected[0], compiled[0])
    torch.testing.assert_close(compiled[1:], expected[1:])
