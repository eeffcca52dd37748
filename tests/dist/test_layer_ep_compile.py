"""`mok.MoELayer` over several ranks under torch.compile and activation checkpointing."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mok
from tests._harness import run_ranks
from tests._numerics import assert_bitwise_equal

H, I, E, K = 32, 48, 12, 3


def make_layer(group, **settings):
    torch.manual_seed(5)
    return mok.MoELayer(H, I, E, K, group=group, router=None, bias=True, **settings)


def step(function, layer, num_tokens):
    layer.zero_grad()
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, H, generator=generator).bfloat16().requires_grad_()
    ids_TK = torch.randint(-1, E, (num_tokens, K), generator=generator)
    weights_TK = torch.rand(num_tokens, K, generator=generator).requires_grad_()
    out = function(x, ids_TK, weights_TK)
    out.sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    return {"out": out.detach(), "dx": x.grad, "dw": weights_TK.grad} | grads


def job(rank, group, counts, backend, checkpointed, dynamic, settings):
    """Compiled and eager steps give the same bits; rank r has counts[i][r] tokens in step i."""
    torch._dynamo.reset()
    layer, eager = make_layer(group, **settings), make_layer(group, max_tokens=40)

    def call(x, ids_TK, weights_TK):
        return layer(x, topk_ids=ids_TK, topk_weights=weights_TK)

    def function(x, ids_TK, weights_TK):
        if checkpointed:
            return checkpoint(call, x, ids_TK, weights_TK, use_reentrant=False) * 2
        return call(x, ids_TK, weights_TK) * 2

    def plain(x, ids_TK, weights_TK):
        return eager(x, topk_ids=ids_TK, topk_weights=weights_TK) * 2

    if backend is not None:
        function = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
    for step_counts in counts:
        results = step(function, layer, step_counts[rank])
        assert_bitwise_equal(results, step(plain, eager, step_counts[rank]))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_no_tokens_on_one_rank(backend, checkpointed):
    counts = [(9, 4), (5, 0), (0, 7), (1, 9)]
    run_ranks(2, job, counts, backend, checkpointed, None, {}, timeout=240)


@pytest.mark.parametrize("dynamic", [None, True])
def test_inductor_agrees_on_max_tokens_while_tracing(dynamic):
    counts = [(12, 0), (6, 5), (0, 12)]
    run_ranks(2, job, counts, "inductor", False, dynamic, {}, timeout=240)


def refused_job(rank, group, settings, when):
    """One rank's compiled layer refuses its input; then all make two good calls."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    layer = mok.MoELayer(H, I, E, K, group=group, **settings)
    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(3, H).bfloat16()
    if when == "later":
        compiled(x)
    try:
        compiled(x.double() if rank == 1 else x)
        outcome = None
    except Exception as error:
        outcome = type(error).__name__, str(error)
    return outcome, compiled(x).shape[0], layer(x).shape[0]


@pytest.mark.parametrize("settings", [{}, {"max_tokens": 6}])
@pytest.mark.parametrize("when", ["first", "later"])
def test_a_refused_input_reaches_the_peers_once(settings, when):
    (peer, *after), (culprit, *after_too) = run_ranks(2, refused_job, settings, when, timeout=240)
    assert culprit[0] == "TypeError"
    assert "x is torch.float64" in culprit[1]
    # Dynamo wraps what is raised while the peers agree at trace time.
    assert "PeerAbortedError" in f"{peer[0]}: {peer[1]}"
    assert "x is torch.float64" in peer[1]
    assert after == after_too == [3, 3]
