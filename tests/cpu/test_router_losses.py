"""Sequence-wise balance and z loss against loops, masks, repeats."""

import math

import pytest
import torch

from mok.router import (
    SigmoidTopKRouter,
    SoftmaxTopKRouter,
    expert_counts,
    load_balancing_loss,
    sequence_load_balancing_loss,
    z_loss,
)

pytestmark = pytest.mark.quick
H, E, K = 16, 6, 2


def sequence_loop(output, sequences, mask, top_k=K):
    """Equations 17 to 20 of DeepSeek-V3's report, in Python numbers."""
    total = 0.0
    for sequence in sequences:
        tokens = [t for t in sequence if mask is None or mask[t]]
        for e in range(E if tokens else 0):
            chosen = sum(output.topk_ids_TK[t].tolist().count(e) for t in tokens)
            fraction = E / (top_k * len(tokens)) * chosen
            probability = math.fsum(output.probabilities_TE[t, e].item() for t in tokens)
            total += fraction * probability / len(tokens)
    return total / max(len(sequences), 1)


@pytest.mark.parametrize("kind", [SoftmaxTopKRouter, SigmoidTopKRouter])
@pytest.mark.parametrize("masked", [True, False])
def test_sequence_loss_equals_the_formula(kind, masked):
    output = kind(H, E, K)(torch.randn(24, H))
    mask = (torch.rand(24) < 0.6) if masked else None
    runs = [range(8 * s, 8 * s + 8) for s in range(3)]
    loss = sequence_load_balancing_loss(output, 3, mask_T=mask)
    assert loss.item() == pytest.approx(sequence_loop(output, runs, mask), rel=1e-5)
    ids = torch.randint(5, (24,))
    ragged = [[t for t in range(24) if ids[t] == s] for s in range(5)]
    loss = sequence_load_balancing_loss(output, 5, sequence_ids_T=ids, mask_T=mask)
    assert loss.item() == pytest.approx(sequence_loop(output, ragged, mask), rel=1e-5)


def test_sequence_loss_of_an_even_routing_is_one_and_of_none_zero():
    even = SoftmaxTopKRouter(H, E, K)(torch.zeros(3, H))
    even = even._replace(topk_ids_TK=torch.arange(E).reshape(3, 2))
    assert sequence_load_balancing_loss(even, 1).item() == pytest.approx(1.0)
    none = SoftmaxTopKRouter(H, E, K)(torch.zeros(0, H))
    assert sequence_load_balancing_loss(none, 0) == 0
    assert sequence_load_balancing_loss(none, 4) == 0
    unrouted = even._replace(topk_ids_TK=torch.full((3, 2), -1))
    assert sequence_load_balancing_loss(unrouted, 1) == 0


@pytest.mark.parametrize("num_sequences", [0, 5])
def test_sequences_that_do_not_divide_are_refused(num_sequences):
    output = SoftmaxTopKRouter(H, E, K)(torch.randn(12, H))
    with pytest.raises(
        ValueError, match=f"num_sequences is {num_sequences}: it must divide the 12"
    ):
        sequence_load_balancing_loss(output, num_sequences)


@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_z_loss_equals_the_formula(tokens):
    output = SoftmaxTopKRouter(H, E, K)(torch.randn(tokens, H))
    logits = output.logits_TE.tolist()
    squares = [math.log(math.fsum(math.exp(z) for z in row)) ** 2 for row in logits]
    expected = math.fsum(squares) / max(tokens, 1)
    assert z_loss(output).item() == pytest.approx(expected, rel=1e-5)


def test_masked_tokens_reach_neither_losses_nor_gradients():
    router = SoftmaxTopKRouter(H, E, K)
    x_TH = torch.randn(10, H)
    padded_TH = torch.cat([x_TH, torch.full((3, H), torch.nan)])
    mask_T = torch.arange(13) < 10

    def losses(x_TH, mask_T, ids):
        router.weight.grad = None
        output = router(x_TH)
        loss = z_loss(output, mask_T)
        loss = loss + sequence_load_balancing_loss(output, 2, sequence_ids_T=ids, mask_T=mask_T)
        loss.backward()
        return loss.detach(), expert_counts(output.topk_ids_TK, E, mask_T)

    ids = torch.arange(13) % 2
    plain, counts = losses(x_TH, None, ids[:10])
    masked, masked_counts = losses(padded_TH, mask_T, ids)
    torch.testing.assert_close(masked, plain)
    assert torch.equal(counts, masked_counts)
    # The router's own product gives 0 * NaN for its weight: the loss must not add to that, so look
    # at the gradient of the logits.
    output = router(padded_TH)
    logits = output.logits_TE.detach().requires_grad_()
    z_loss(output._replace(logits_TE=logits), mask_T).backward()
    assert logits.grad[:10].abs().sum() > 0
    assert (logits.grad[10:] == 0).all()


def test_losses_in_fp64_gradcheck():
    router = SigmoidTopKRouter(H, E, K, dtype=torch.float64)
    x_TH = torch.randn(8, H, dtype=torch.float64, requires_grad=True)

    def losses(x_TH, weight):
        output = torch.func.functional_call(router, {"weight": weight}, (x_TH,))
        return sequence_load_balancing_loss(output, 2), z_loss(output)

    assert torch.autograd.gradcheck(losses, (x_TH, router.weight))


def test_losses_and_gradients_are_bitwise_repeatable():
    router = SigmoidTopKRouter(64, 32, 4)
    x_TH = torch.randn(500, 64)
    repeats = []
    for _ in range(8):
        router.weight.grad = None
        output = router(x_TH)
        (sequence_load_balancing_loss(output, 5) + z_loss(output)).backward()
        repeats.append(router.weight.grad)
    assert all(torch.equal(repeat, repeats[0]) for repeat in repeats[1:])


@pytest.mark.parametrize("masked", [True, False])
def test_losses_compile_without_breaks(masked):
    router = SigmoidTopKRouter(H, E, K)
    mask_T = (torch.rand(12) < 0.5) if masked else None

    def job(x_TH):
        output = router(x_TH)
        return z_loss(output, mask_T), sequence_load_balancing_loss(output, 3, mask_T=mask_T)

    x_TH = torch.randn(12, H)
    compiled = torch.compile(job, fullgraph=True, backend="aot_eager")(x_TH)
    torch.testing.assert_close(compiled, job(x_TH))


@pytest.mark.parametrize(
    "loss",
    [
        load_balancing_loss,
        z_loss,
        lambda output, mask: sequence_load_balancing_loss(output, 1, mask_T=mask),
        lambda output, mask: expert_counts(output.topk_ids_TK, E, mask),
    ],
)
def test_masks_that_do_not_fit_the_tokens_are_refused(loss):
    output = SoftmaxTopKRouter(H, E, K)(torch.randn(6, H))
    for shape in ((1,), (5,), (2, 3)):
        with pytest.raises(ValueError, match=r"mask has shape .* each of the router's 6 tokens"):
            loss(output, torch.ones(shape, dtype=torch.bool))
    for dtype in (torch.float32, torch.int64):
        with pytest.raises(TypeError, match=f"mask is {dtype}: it must be torch.bool"):
            loss(output, torch.ones(6, dtype=dtype))


def test_sequences_that_cannot_be_are_refused():
    output = SoftmaxTopKRouter(H, E, K)(torch.randn(6, H))
    with pytest.raises(ValueError, match="num_sequences is -2: it must not be negative"):
        sequence_load_balancing_loss(output, -2)
    with pytest.raises(ValueError, match=r"sequence_ids has shape \(5,\)"):
        sequence_load_balancing_loss(output, 2, sequence_ids_T=torch.zeros(5, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"sequence_ids is torch.float32"):
        sequence_load_balancing_loss(output, 2, sequence_ids_T=torch.zeros(6))
