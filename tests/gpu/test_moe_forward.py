"""The forward megakernel on one GPU, alone and as virtual ranks: right, and the same bits however
it is run. tests/emu/test_moe_forward.py has its every bit against the CPU executor."""

import contextlib
import dataclasses

import pytest
import torch

from mok import _C
from tests._numerics import assert_bitwise_equal
from tests.gpu._forward import Layer, Weights, make_batch, ranks_of, reference, relative_error

pytestmark = pytest.mark.usefixtures("needs_sm90")

SMALL = Layer(num_experts=8, top_k=2, hidden=512, intermediate=384)
LAYERS = {
    "plain": SMALL,
    "one K step": Layer(num_experts=4, top_k=1, hidden=8, intermediate=8),
    "sizes 72 and 24": Layer(num_experts=6, top_k=3, hidden=72, intermediate=24),
    "2880": Layer(num_experts=8, top_k=4, hidden=2880, intermediate=2880, biases=True),
    "768": Layer(num_experts=16, top_k=8, hidden=2048, intermediate=768),
    "shared": dataclasses.replace(SMALL, shared=640),
    "biases": dataclasses.replace(SMALL, biases=True),
    "limit": dataclasses.replace(SMALL, activation="swiglu_limit", biases=True),
    "gpt-oss": dataclasses.replace(SMALL, activation="gpt_oss", biases=True),
    "packed": dataclasses.replace(SMALL, view="packed"),
    "interleaved": dataclasses.replace(SMALL, view="interleaved"),
    "small ring": dataclasses.replace(SMALL, ring_rows=256),
    "saves": dataclasses.replace(SMALL, save="gate_up", shared=64),
    "saves all": dataclasses.replace(SMALL, save="all", ring_rows=384),
}
TOKENS = (0, 1, 31, 45, 257, 1000)


@pytest.fixture(scope="module", params=LAYERS, ids=lambda name: name.replace(" ", "-"))
def layer_and_weights(request):
    layer = LAYERS[request.param]
    return layer, Weights(layer)


@pytest.mark.parametrize("tokens", TOKENS)
def test_is_right(layer_and_weights, tokens):
    layer, weights = layer_and_weights
    batch = make_batch(layer, tokens)
    with ranks_of(layer, weights, (tokens,), *batch) as ranks:
        out = ranks.out()
        assert torch.isfinite(out).all()
        # out is rounded once more than the reference; g, u, h and y may round the other way.
        assert relative_error(out, reference(layer, weights, *batch)) < 2**-7
        assert_bitwise_equal({"out": ranks.out()}, {"out": out})


@pytest.mark.parametrize("name", ["plain", "768", "shared", "gpt-oss", "small ring", "saves all"])
@pytest.mark.parametrize("tokens", [(500, 500), (0, 999), (321, 7, 400, 64)])
def test_any_number_of_ranks_gives_the_same_bits(name, tokens):
    layer = LAYERS[name]
    weights = Weights(layer)
    batch = make_batch(layer, sum(tokens))
    with ranks_of(layer, weights, (sum(tokens),), *batch) as one:
        expected = one.out()
    with ranks_of(layer, weights, tokens, *batch) as several:
        assert_bitwise_equal({"out": several.out()}, {"out": expected})


@pytest.mark.parametrize("ring_rows", [128, 256, 1024])
def test_the_ring_does_not_matter(ring_rows):
    weights = Weights(SMALL)
    batch = make_batch(SMALL, 700, skew=0.4)
    with ranks_of(SMALL, weights, (700,), *batch) as ranks:
        expected = ranks.out()
    small = dataclasses.replace(SMALL, ring_rows=ring_rows)
    with ranks_of(small, weights, (700,), *batch) as ranks:
        assert_bitwise_equal({"out": ranks.out()}, {"out": expected})


SHIPPED = [row for row in _C.kernel_configs() if row["arch"] == 90]
TUNED = ("lag_waves", "group_m")  # what the rows differ in, and what decides who shares L2


@pytest.mark.parametrize("ring_rows", [256, 1024, None])
@pytest.mark.parametrize("row", range(len(SHIPPED)))
def test_20_repeats_of_each_configuration_and_ring_beside_a_sleeping_kernel(row, ring_rows):
    tuning = tuple((name, SHIPPED[row][name]) for name in TUNED)
    layer = dataclasses.replace(LAYERS["768"], ring_rows=ring_rows, tuning=tuning)
    weights = Weights(layer)
    batch = make_batch(layer, 500, skew=0.3)
    with ranks_of(LAYERS["768"], weights, (500,), *batch) as ranks:
        expected = ranks.out()
    side = torch.cuda.Stream()
    with ranks_of(layer, weights, (500,), *batch) as ranks:
        for turn in range(20):
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000 * (turn % 7))
            assert_bitwise_equal({"out": ranks.out()}, {"out": expected})


def test_the_same_bits_200_times_beside_another_stream():
    layer = LAYERS["768"]
    weights = Weights(layer)
    batch = make_batch(layer, 2000)
    side = torch.cuda.Stream()
    noise = torch.randn(4096, 4096, device="cuda")
    with ranks_of(layer, weights, (2000,), *batch) as ranks:
        expected = ranks.out()
        for turn in range(200):
            if turn % 2:
                with torch.cuda.stream(side):
                    noise @ noise
            assert_bitwise_equal({"out": ranks.out()}, {"out": expected})


def test_two_kernels_share_the_multiprocessors():
    """Neither has all of its blocks at once: the other's hold their place."""
    layer = LAYERS["768"]
    weights = Weights(layer)
    batches = [make_batch(layer, tokens, seed=tokens) for tokens in (1500, 700)]
    streams = [torch.cuda.Stream() for _ in batches]
    with contextlib.ExitStack() as stack:
        calls = [
            stack.enter_context(ranks_of(layer, weights, (len(batch[0]),), *batch))
            for batch in batches
        ]
        expected = [ranks.out() for ranks in calls]
        for _ in range(10):
            for ranks in calls:
                ranks.ranks[0].out.fill_(torch.nan)
            torch.cuda._sleep(1_000_000)  # when it ends, both queues are full
            ready = torch.cuda.Event()
            ready.record()
            for stream in streams:
                stream.wait_event(ready)
            for _ in range(3):
                for ranks, stream in zip(calls, streams, strict=True):
                    with torch.cuda.stream(stream):
                        ranks.ranks[0].launch()
            torch.cuda.synchronize()
            for ranks, wanted in zip(calls, expected, strict=True):
                ranks.workspaces[0].check()
                assert_bitwise_equal({"out": ranks.ranks[0].out}, {"out": wanted})


def test_a_graph_serves_other_routings():
    layer = LAYERS["shared"]
    weights = Weights(layer)
    x_TH, ids_TK, weights_TK = make_batch(layer, 600, none_share=0.0)
    with ranks_of(layer, weights, (600,), x_TH, ids_TK, weights_TK) as ranks:
        ranks.out()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ranks.ranks[0].launch()
        held_x, held_ids = ranks.ranks[0].kept[:2]
        for seed in range(3):
            other_x, other_ids, _ = make_batch(layer, 600, seed=seed, none_share=0.2)
            held_x.copy_(other_x)
            held_ids.copy_(other_ids)
            ranks.ranks[0].out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            replayed = ranks.ranks[0].out.clone()
            assert_bitwise_equal({"out": ranks.out()}, {"out": replayed})
            exact = reference(layer, weights, other_x, other_ids, weights_TK)
            assert relative_error(replayed, exact) < 2**-7
