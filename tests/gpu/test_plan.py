"""The plan on the GPU equals mok._C.build_plan bit for bit, for all routings and under replay."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mok
from tests.gpu._plan import DevicePlanner
from tests.gpu._routing import ROUTINGS, make_ids


def check(planner: DevicePlanner, ids_per_rank: list[np.ndarray]) -> None:
    """Every rank's plan, from memory that held something else before."""
    for rank in range(planner.num_ranks):
        planner.set_ids(ids_per_rank)
        planner.poison()
        planner.launch(rank)
        compare(planner, ids_per_rank, rank)


def compare(planner: DevicePlanner, ids_per_rank: list[np.ndarray], rank: int) -> None:
    expected = mok._C.build_plan(ids_per_rank, rank, planner.num_experts, planner.pad)
    actual = planner.result()
    for name, array in expected.items():
        np.testing.assert_array_equal(
            actual[name][: len(array)], array, err_msg=f"{name}, rank {rank}"
        )
    rows = len(expected["row_peer"])
    assert (actual["row_peer"][rows:] == planner.POISON).all(), (
        "rows behind the plan are left alone"
    )
    assert (actual["row_slot"][rows:] == planner.POISON).all()


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"),
    [
        ([16384, 16384], 8, 128),
        ([256, 256], 8, 128),
        ([16384], 8, 128),
        ([4096, 0, 1, 777], 4, 64),
        ([3000], 16, 896),
        ([2048] * 8, 10, 512),
        ([1024] * 72, 8, 144),
        ([17, 5], 1, 2),
        ([0, 0, 0], 2, 6),
    ],
)
def test_against_the_host(routing, tokens, top_k, num_experts):
    ids_per_rank = [
        make_ids(routing, count, top_k, num_experts, seed=[rank, count])
        for rank, count in enumerate(tokens)
    ]
    planner = DevicePlanner(len(tokens), num_experts, top_k, max(tokens))
    ranks = range(len(tokens)) if len(tokens) <= 4 else (0, 3, len(tokens) - 1)
    for rank in ranks:
        planner.set_ids(ids_per_rank)
        planner.poison()
        planner.launch(rank)
        compare(planner, ids_per_rank, rank)


@st.composite
def cases(draw):
    num_ranks = draw(st.integers(1, 9))
    local_experts = draw(st.integers(1, 40))
    top_k = draw(st.integers(1, 12))
    most = draw(st.sampled_from([0, 1, 5, 40, 600, 2500]))
    tokens = [draw(st.integers(0, most)) for _ in range(num_ranks)]
    routing = draw(st.sampled_from(ROUTINGS))
    pad = draw(st.sampled_from([1, 16, 128, 256]))
    return tokens, top_k, num_ranks * local_experts, routing, pad, draw(st.integers(0, 2**31))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_shape(case):
    tokens, top_k, num_experts, routing, pad, seed = case
    ids_per_rank = [
        make_ids(routing, count, top_k, num_experts, seed=[rank, seed])
        for rank, count in enumerate(tokens)
    ]
    # The buffers were made for more tokens than this call has.
    planner = DevicePlanner(len(tokens), num_experts, top_k, max(tokens) + 3, pad)
    check(planner, ids_per_rank)


@pytest.mark.parametrize("local_experts", [192, 1025, 3000])
def test_many_experts_on_one_rank(local_experts):
    ids_per_rank = [make_ids("random", 5000, 8, local_experts, seed=[0, local_experts])]
    check(DevicePlanner(1, local_experts, 8, 5000), ids_per_rank)


def test_several_million_routes():
    ids_per_rank = [make_ids("zipf", 8192, 8, 144, seed=[rank, 1]) for rank in range(72)]
    planner = DevicePlanner(72, 144, 8, 8192)
    planner.set_ids(ids_per_rank)
    planner.poison()
    planner.launch(5)
    compare(planner, ids_per_rank, 5)


def test_the_same_bits_every_time():
    ids_per_rank = [make_ids("zipf", 9000, 8, 64, seed=[rank, 2]) for rank in range(2)]
    planner = DevicePlanner(2, 64, 8, 9000)
    planner.set_ids(ids_per_rank)
    planner.poison()
    planner.launch(1)
    first = planner.result()
    for _ in range(50):
        planner.launch(1)
        for name, array in planner.result().items():
            np.testing.assert_array_equal(array, first[name], err_msg=name)


def test_while_another_stream_holds_multiprocessors():
    ids_per_rank = [make_ids("random", 16384, 8, 128, seed=[rank, 3]) for rank in range(2)]
    planner = DevicePlanner(2, 128, 8, 16384)
    planner.set_ids(ids_per_rank)
    planner.poison()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
    planner.launch(0)
    compare(planner, ids_per_rank, 0)
    torch.cuda.synchronize()


def test_graph_replay_with_other_routings():
    planner = DevicePlanner(2, 128, 8, 16384)
    ids_per_rank = [make_ids("random", 16384, 8, 128, seed=[rank, 4]) for rank in range(2)]
    planner.set_ids(ids_per_rank)
    planner.launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planner.launch(0)
    for seed, (routing, tokens) in enumerate(
        [
            ("random", 16384),
            ("zipf", 200),
            ("one", 16384),
            ("none", 16384),
            ("mixed", 5000),
            ("random", 0),
        ]
    ):
        other = [make_ids(routing, tokens, 8, 128, seed=[rank, 40 + seed]) for rank in range(2)]
        planner.set_ids(other)
        planner.poison()
        graph.replay()
        compare(planner, other, 0)


def test_a_token_count_past_the_maximum_writes_nothing_outside():
    """It cannot happen: the count is checked before it is published. Memory stays whole still."""
    ids_per_rank = [make_ids("random", 100, 4, 8, seed=[0, 5])]
    planner = DevicePlanner(1, 8, 4, 100)
    planner.set_ids(ids_per_rank)
    planner.poison()
    planner.num_tokens.fill_(10**12)
    planner.launch(0)
    compare(planner, ids_per_rank, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 7}, "num_experts = 7: must be a positive multiple of the 2 ranks"),
        ({"rank": 2}, r"rank = 2: must lie in \[0, 2\)"),
        ({"pad": 0}, "pad = 0"),
        ({"num_experts": 2 * 60000}, "more than the plan's kernel can count"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    planner = DevicePlanner(2, 8, 2, 16)
    rank = change.pop("rank", 0)
    for name, value in change.items():
        setattr(planner, name, value)
    with pytest.raises(ValueError, match=message):
        planner.launch(rank)
