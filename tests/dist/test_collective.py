"""The collective backend over gloo: tolerance, shapes, refusals, and how a group falls to it."""

import warnings
import weakref

import pytest
import torch
import torch.distributed as dist

import mok
from mok import _backend, _collective, _grouped, _kernels, workspace
from mok.errors import PeersNotLocalError
from mok.reference import moe_reference
from tests._harness import run_ranks, run_ranks_fresh
from tests._numerics import (
    assert_bitwise_equal,
    assert_close,
    make_case,
    relative_error,
    run_exact,
    three_way,
)
from tests.dist.test_layer_ep import make_layer, run_share, share_of

K, E, H, I = 3, 12, 32, 48
BF16, FP32 = torch.bfloat16, torch.float32
FULL = {"bias": True, "shared": 16, "shared_gate": True}
COLLECTIVE = {"backend": "collective"}


def three_way_job(rank, group, tokens_per_rank, extras, routing, save, grouped):
    case = make_case(sum(tokens_per_rank), K, E, H, I, seed=2, routing=routing, **extras)
    _collective.products_for = (lambda x: _grouped.GroupedProducts) if grouped else _products
    options = {"max_tokens": max(tokens_per_rank), "save": save, **COLLECTIVE}
    ours = run_share(mok.moe, case, tokens_per_rank, rank, group, BF16, **options)
    again = run_share(mok.moe, case, tokens_per_rank, rank, group, BF16, **options)
    _collective.products_for = _products
    plain = run_share(moe_reference, case, tokens_per_rank, rank, group, BF16)
    three_way(ours, plain, share_of(run_exact(case), tokens_per_rank, rank))
    assert_bitwise_equal(ours, again)


_products = _grouped.products_for


@pytest.mark.parametrize("tokens_per_rank", [[60, 41], [33, 0, 70], [101]])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("extras", "routing", "save"),
    [
        (FULL, "uniform", "all"),
        (FULL | {"activation": "gpt_oss"}, "mixed", "gate_up"),
        ({"swiglu_limit": 1.0}, "mixed", "none"),
        ({"shared": 8}, "one", "none"),
    ],
)
def test_within_twice_the_plain_error(tokens_per_rank, extras, routing, save, grouped):
    run_ranks(
        *(len(tokens_per_rank), three_way_job, tokens_per_rank, extras, routing, save, grouped)
    )


def fp32_job(rank, group, tokens_per_rank):
    case = make_case(sum(tokens_per_rank), K, E, H, I, seed=3, **FULL)
    limit = {"max_tokens": max(tokens_per_rank)}
    ours = run_share(mok.moe, case, tokens_per_rank, rank, group, FP32, **limit, **COLLECTIVE)
    cpu = run_share(mok.moe, case, tokens_per_rank, rank, group, FP32, **limit)
    assert_close(ours, cpu, 1e-5)


@pytest.mark.parametrize("tokens_per_rank", [[1, 0], [0, 9, 0], [5, 7], [1]])
def test_fp32_agrees_with_the_cpu_backend(tokens_per_rank):
    run_ranks(len(tokens_per_rank), fp32_job, tokens_per_rank)


def no_tokens_job(rank, group):
    layer = make_layer(group, max_tokens=5, bias=True, shared_intermediate_size=8, **COLLECTIVE)
    x = torch.randn(0, H, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, H)
    assert all((parameter.grad == 0).all() for parameter in layer.parameters())


def test_no_token_on_any_rank():
    run_ranks(2, no_tokens_job)


def no_routes_job(rank, group):
    """Tokens without a route: zeros, though their weights are NaN."""
    layer = make_layer(group, router=None, max_tokens=5, bias=True, **COLLECTIVE)
    x = torch.randn(5, H).bfloat16().requires_grad_()
    ids_TK = torch.full((5, K), -1 if rank == 0 else layer.num_experts)
    weights_TK = torch.full((5, K), float("nan"), requires_grad=True)
    out = layer(x, topk_ids=ids_TK, topk_weights=weights_TK)
    out.sum().backward()
    for tensor in (out, x.grad, weights_TK.grad, *(p.grad for p in layer.parameters())):
        assert (tensor == 0).all()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_route_on_any_rank(num_ranks):
    run_ranks(num_ranks, no_routes_job)


def idle_job(rank, group):
    """All routes to rank 0: the idle rank's gradients are zeros, also under checkpointing."""
    layer = make_layer(group, router=None, bias=True, **COLLECTIVE)
    x = torch.randn(5 * rank + 1, H).bfloat16().requires_grad_()
    ids_TK = torch.zeros(len(x), K, dtype=torch.int64)
    weights_TK = torch.rand(len(x), K, requires_grad=True)

    def call(x):
        return layer(x, topk_ids=ids_TK, topk_weights=weights_TK)

    torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False).sum().backward()
    for name, parameter in layer.named_parameters():
        for e, grad in enumerate(parameter.grad):
            assert bool((grad != 0).any()) == (rank == 0 and e == 0), (name, e)
    torch.optim.AdamW(layer.parameters()).step()


def test_idle_ranks_get_zeros():
    run_ranks(2, idle_job)


def main_grad_job(rank, group):
    layer = make_layer(group, max_tokens=8, bias=True, **COLLECTIVE).bfloat16()
    for parameter in layer.experts.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
        parameter.grad_added_to_main_grad = False
    x = torch.randn(8, H).bfloat16()
    for _ in range(2):
        layer.zero_grad()
        layer(x).sum().backward()
    grads = {name: p.main_grad for name, p in layer.experts.named_parameters()}
    assert all(p.grad_added_to_main_grad for p in layer.experts.parameters())
    assert all((p.grad == 0).all() for p in layer.experts.parameters())
    plain = make_layer(group, max_tokens=8, bias=True, **COLLECTIVE).bfloat16()
    plain(x).sum().backward()
    for name, parameter in plain.experts.named_parameters():
        assert relative_error(grads[name], 2 * parameter.grad.float()) < 4e-3, name


def test_main_grad():
    run_ranks(2, main_grad_job)


def compiled_job(rank, group):
    """A graph of torch.compile breaks at the call and goes on behind it."""
    torch._dynamo.reset()
    layer = make_layer(group, max_tokens=8, **COLLECTIVE)
    compiled = torch.compile(lambda x: layer(x * 2) + 1, backend="aot_eager")
    x = torch.randn(3 + rank, H)
    torch.testing.assert_close(compiled(x), layer(x * 2) + 1)


def test_runs_in_a_compiled_model():
    run_ranks(2, compiled_job, timeout=120)


def outcome_of(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def refused_job(rank, group, kind):
    """One rank passes what is refused; the peers learn why; then all make a good call."""
    layer = make_layer(group, max_tokens=6, **COLLECTIVE)
    good = torch.randn(4, H)
    bad = {"dtype": good.double(), "T": torch.randn(7, H), "shape": good[:, :8]}[kind]
    outcome = outcome_of(layer, bad if rank == 1 else good)
    return outcome, layer(good).shape[0]


@pytest.mark.parametrize("kind", ["dtype", "T", "shape"])
def test_a_refused_input_reaches_the_peers(kind):
    results = run_ranks(3, refused_job, kind)
    (culprit, text), _ = results[1]
    assert culprit in ("ValueError", "TypeError")
    for rank in (0, 2):
        peer, peer_text = results[rank][0]
        assert peer == "PeerAbortedError"
        assert "rank 1" in peer_text
        assert text in peer_text
    assert [after for _, after in results] == [4, 4, 4]


def refused_function_job(rank, group):
    case = make_case(8, K, E, H, I).experts(6 * rank, 6 * rank + 6)
    weights = [case.tensors[name] for name in ("w_gate", "w_up", "w_down")]
    ids_TK = case.topk_ids_TK.float() if rank else case.topk_ids_TK
    args = (case.tensors["x_TH"], ids_TK, case.tensors["topk_weights_TK"], *weights)
    return outcome_of(mok.moe, *args, group=group, max_tokens=8, **COLLECTIVE)


def test_a_refused_argument_of_moe_reaches_the_peers():
    (peer, text), (culprit, reason) = run_ranks(2, refused_function_job)
    assert (peer, culprit) == ("PeerAbortedError", "TypeError")
    assert reason in text


def differing_job(rank, group):
    layer = make_layer(group, max_tokens=6 + rank, **COLLECTIVE)
    return outcome_of(layer, torch.randn(4, H))


def test_settings_that_differ_are_named_on_all_ranks():
    for name, text in run_ranks(2, differing_job):
        assert name == "ValueError"
        assert "max_tokens is 7 on rank 1 and 6 on rank 0" in text


def not_local_job(rank, group):
    """As on two hosts: ranks cannot map each other's memory, and all of them learn it."""

    def refuse(name):
        raise PeersNotLocalError("the ranks of this group run on 2 hosts (a: rank 0; b: rank 1).")

    workspace.ensure, ensure = refuse, workspace.ensure
    try:
        layer = make_layer(group, max_tokens=8)
        before = str(mok.explain(layer))
        x = torch.randn(4, H)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = layer(x)
            layer(x)
            make_layer(group, max_tokens=9)(x)
        after = mok.explain(layer)
        backend = layer.backend
    finally:
        workspace.ensure = ensure
    expected = make_layer(group, max_tokens=8, backend="cpu")(x)
    texts = [str(warning.message) for warning in caught]
    return relative_error(out.detach(), expected.detach()), before, after, backend, texts


def test_a_group_over_hosts_falls_to_it_with_one_warning():
    for error, before, after, backend, texts in run_ranks_fresh(2, not_local_job):
        assert error < 1e-5
        assert before.startswith("cpu: CPU tensors")
        assert backend == after.backend == "collective"
        assert "2 hosts" in after.reason
        assert len([text for text in texts if "falls to the collective backend" in text]) == 1


def explain_job(rank, group):
    one = dist.new_group([rank], use_local_synchronization=True)
    return [
        str(mok.explain(group=group)),
        str(mok.explain(group=one)),
        str(mok.explain(backend="collective", group=group)),
        str(mok.explain(make_layer(group, backend="cpu"))),
        str(mok.explain(device="cuda", group=group)),
        outcome_of(mok.explain, backend="megakernel"),
        outcome_of(mok.explain, backend="cpu", device="cuda"),
        _backend.choose("auto", "meta", None).backend,
    ]


def test_explain_says_which_and_why():
    for texts in run_ranks(2, explain_job):
        assert texts[0] == "cpu: CPU tensors, and ranks that can map each other's memory"
        assert texts[1] == "cpu: CPU tensors of one rank"
        assert texts[2] == 'collective: asked for by backend="collective"'
        assert texts[3] == 'cpu: asked for by backend="cpu"'
        reason = _kernels.why_not(None, True)  # as this build and this machine have it
        assert texts[4].startswith("megakernel" if reason is None else f"collective: {reason}")
        assert texts[5][0] == texts[6][0] == "NotImplementedError"
        assert texts[7] == "cpu"


def reused_name_job(rank, group):
    """A new group under the name of a destroyed one is asked anew."""
    first = dist.new_group([0, 1], use_local_synchronization=True)
    _backend._not_local[first.group_name] = "two hosts"
    _backend._groups_not_local[first.group_name] = weakref.ref(first)
    _backend.forget_destroyed(first.group_name)
    kept = _backend.choose("auto", "cpu", first.group_name).backend
    name = first.group_name
    _backend._groups_not_local[name] = weakref.ref(group)  # as if the name had been another group's
    _backend.forget_destroyed(name)
    return kept, _backend.choose("auto", "cpu", name).backend


def test_a_name_that_comes_again_is_another_group():
    assert run_ranks_fresh(2, reused_name_job) == [("collective", "cpu")] * 2
