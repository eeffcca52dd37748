"""The plan and the chunks of the ring against an oracle in NumPy and against their rules."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mok import _C, shapes

pytestmark = pytest.mark.quick

PAD = _C.DEFAULT_PAD
PLAN_ARRAYS = ("segment_begin", "counts", "row_peer", "row_slot")
NO_ROUTES = np.array([-1, -2, -(2**31), 2**31, 2**32, 2**32 + 1, 2**62, -(2**63), 2**63 - 1])


def oracle(ids_per_rank, rank, num_experts, pad):
    """Sort (expert, source rank, slot) of the routes that this rank owns, then pad each expert."""
    num_local = num_experts // len(ids_per_rank)
    routes = [
        (expert - rank * num_local, source, slot)
        for source, ids_TK in enumerate(ids_per_rank)
        for slot, expert in enumerate(ids_TK.ravel().tolist())
        if rank * num_local <= expert < (rank + 1) * num_local
    ]
    routes = np.array(sorted(routes), dtype=np.int64).reshape(-1, 3)
    counts = np.bincount(routes[:, 0], minlength=num_local)
    padded = (counts + pad - 1) // pad * pad
    segment_begin = np.concatenate([[0], np.cumsum(padded)])
    index_in_segment = np.arange(len(routes)) - (np.cumsum(counts) - counts)[routes[:, 0]]
    rows = segment_begin[routes[:, 0]] + index_in_segment
    row_peer, row_slot = np.full((2, segment_begin[-1]), -1)
    row_peer[rows], row_slot[rows] = routes[:, 1], routes[:, 2]
    return dict(zip(PLAN_ARRAYS, (segment_begin, counts, row_peer, row_slot), strict=True))


def assert_plan_is_the_oracle(ids_per_rank, rank, num_experts, pad=PAD):
    plan = _C.build_plan(ids_per_rank, rank, num_experts, pad)
    expected = oracle(ids_per_rank, rank, num_experts, pad)
    assert sorted(plan) == sorted(expected)
    for name in PLAN_ARRAYS:
        np.testing.assert_array_equal(plan[name], expected[name], err_msg=name)
    return plan


@st.composite
def routings(draw, max_ranks=72, max_experts=896, max_tokens=12, max_k=16):
    """(one [T, K] id array per rank, num_experts): ragged, skewed, with ids that are no routes."""
    num_ranks = draw(st.integers(1, max_ranks))
    num_experts = num_ranks * draw(st.integers(1, max(1, max_experts // num_ranks)))
    top_k = draw(st.integers(1, max_k))
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    skew = draw(st.sampled_from(["uniform", "one expert", "one rank", "few", "no routes", "mixed"]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    favourite = generator.integers(num_experts)
    num_local = num_experts // num_ranks
    outside = np.append(NO_ROUTES, [num_experts, num_experts + 1])
    outside = outside[(outside >= np.iinfo(dtype).min) & (outside <= np.iinfo(dtype).max)]

    ids_per_rank = []
    for num_tokens in draw(
        st.lists(st.integers(0, max_tokens), min_size=num_ranks, max_size=num_ranks)
    ):
        size = (num_tokens, top_k)
        ids_TK = generator.integers(0, num_experts, size)
        if skew == "one expert":
            ids_TK[:] = favourite
        elif skew == "one rank":
            ids_TK = favourite // num_local * num_local + generator.integers(0, num_local, size)
        elif skew == "few":
            ids_TK = generator.choice(generator.integers(0, num_experts, 3), size)
        elif skew == "no routes":
            ids_TK = generator.choice(outside, size)
        elif skew == "mixed":
            ids_TK = np.where(generator.random(size) < 0.3, generator.choice(outside, size), ids_TK)
        ids_per_rank.append(ids_TK.astype(dtype))
    return ids_per_rank, num_experts


@settings(max_examples=150, deadline=None)
@given(routings(), st.data())
def test_plan_equals_the_oracle(routing, data):
    ids_per_rank, num_experts = routing
    rank = data.draw(st.integers(0, len(ids_per_rank) - 1))
    assert_plan_is_the_oracle(
        ids_per_rank, rank, num_experts, data.draw(st.sampled_from([1, 128, 256]))
    )


@settings(max_examples=30, deadline=None)
@given(routings(max_ranks=8, max_experts=64, max_tokens=200, max_k=8), st.sampled_from([128, 256]))
def test_plans_of_all_ranks_hold_every_route_once(routing, pad):
    ids_per_rank, num_experts = routing
    rows = []
    for rank in range(len(ids_per_rank)):
        plan = assert_plan_is_the_oracle(ids_per_rank, rank, num_experts, pad)
        is_row = plan["row_peer"] >= 0
        rows += zip(
            plan["row_peer"][is_row].tolist(), plan["row_slot"][is_row].tolist(), strict=True
        )
    routes = [
        (source, slot)
        for source, ids_TK in enumerate(ids_per_rank)
        for slot, expert in enumerate(ids_TK.ravel().tolist())
        if 0 <= expert < num_experts
    ]
    assert sorted(rows) == sorted(routes)


def test_all_routes_of_72_ranks_to_one_expert():
    ids_per_rank = [np.full((num_tokens, 16), 863) for num_tokens in [0, 40] * 36]
    ids_per_rank[3][0, :3] = [2**62, -1, 864]
    plan = assert_plan_is_the_oracle(ids_per_rank, 71, 864)
    assert plan["counts"].tolist() == [0] * 11 + [36 * 40 * 16 - 3]
    assert_plan_is_the_oracle(ids_per_rank, 70, 864)


def test_ids_of_both_widths_and_of_a_view():
    ids_TK = np.array([[0, -1, 5], [3, 3, 2**31 - 1], [-(2**31), 1, 4]])
    wide = _C.build_plan([ids_TK], 0, 6)
    for other in (
        ids_TK.astype(np.int32),
        np.asfortranarray(ids_TK),
        np.repeat(ids_TK, 2, 1)[:, ::2],
    ):
        plan = _C.build_plan([other], 0, 6)
        for name in PLAN_ARRAYS:
            np.testing.assert_array_equal(plan[name], wide[name])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_no_tokens_at_all(num_ranks):
    plan = assert_plan_is_the_oracle([np.zeros((0, 4), int)] * num_ranks, num_ranks - 1, 6)
    assert plan["row_peer"].size == 0
    assert plan["segment_begin"].tolist() == [0] * (6 // num_ranks + 1)


IDS = np.zeros((2, 2), int)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 0, 4), "ids_per_rank is empty"),
        (([np.zeros(4, int)], 0, 4), r"ids must be \[T, K\], got 1"),
        (([IDS, np.zeros((2, 3), int)], 0, 4), r"ids_per_rank\[[01]\] has K = [23]"),
        (([IDS], 1, 4), "rank = 1"),
        (([IDS], -1, 4), "rank = -1"),
        (([IDS, IDS, IDS], 0, 4), "num_experts = 4.* multiple of the 3 ranks"),
        (([IDS], 0, 0), "num_experts = 0"),
        (([IDS], 0, -4), "num_experts = -4"),
        (([np.zeros((2, 0), int)], 0, 4), "top_k = 0"),
        (([IDS], 0, 4, 0), "pad = 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        _C.build_plan(*arguments)


def test_slots_fit_in_32_bits():
    assert _C.worst_case_rows(1, 8, 8, (2**31 - 1) // 8) > 2**31 - 128
    with pytest.raises(ValueError, match=r"max_tokens = 268435456 with top_k = 8.*32 bits"):
        _C.worst_case_rows(1, 8, 8, 2**31 // 8)


sizes = st.tuples(
    st.integers(1, 72),  # R
    st.integers(1, 192),  # local experts
    st.integers(1, 16),  # K
    st.one_of(st.integers(0, 300), st.integers(0, 2**24)),  # max_tokens
)


@settings(max_examples=150, deadline=None)
@given(sizes)
@example((1, 1, 1, 0))
@example((1, 1, 1, 1))
@example((72, 12, 16, 2**26))
def test_python_and_cpp_formulas_are_equal(size):
    num_ranks, num_local, top_k, max_tokens = size
    arguments = (num_ranks, num_ranks * num_local, top_k, max_tokens)
    worst = _C.worst_case_rows(*arguments)
    ring = _C.default_ring_rows(*arguments)
    assert shapes.worst_case_rows(*arguments) == worst
    assert shapes.default_ring_rows(*arguments) == ring
    assert worst % PAD == ring % PAD == 0
    assert PAD <= ring <= max(worst, PAD)
    routes = top_k * max_tokens
    assert ring >= min(worst, -(-5 * routes // 4) + PAD * num_local)
    assert ring < 1.25 * routes + PAD * num_local + PAD + 1 or ring == PAD


@settings(max_examples=60, deadline=None)
@given(routings(max_ranks=4, max_experts=16, max_tokens=150, max_k=4))
def test_worst_case_is_a_bound(routing):
    ids_per_rank, num_experts = routing
    max_tokens = max(len(ids_TK) for ids_TK in ids_per_rank)
    num_ranks, top_k = len(ids_per_rank), ids_per_rank[0].shape[1]
    worst = _C.worst_case_rows(num_ranks, num_experts, top_k, max_tokens)
    for rank in range(num_ranks):
        assert _C.build_plan(ids_per_rank, rank, num_experts)["segment_begin"][-1] <= worst


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 120),
    st.sampled_from([128, 256]),
)
def test_worst_case_is_reached(num_ranks, num_local, top_k, max_tokens, pad):
    """One route to each of the first experts, all the others to the last one in use."""
    num_routes = num_ranks * max_tokens * top_k
    ids = np.minimum(np.arange(num_routes), num_local - 1)
    ids_per_rank = list(ids.reshape(num_ranks, max_tokens, top_k))
    plan = _C.build_plan(ids_per_rank, 0, num_ranks * num_local, pad)
    worst = _C.worst_case_rows(num_ranks, num_ranks * num_local, top_k, max_tokens, pad)
    assert plan["segment_begin"][-1] == worst


segments = st.lists(
    st.one_of(st.just(0), st.integers(1, 300), st.integers(0, 5000)), min_size=1, max_size=40
)


@settings(max_examples=150, deadline=None)
@given(segments, st.integers(1, 20), st.sampled_from([128, 256]))
@example([0], 1, 128)
@example([128, 0, 129, 0, 0, 1], 1, 128)
@example([1, 640, 1], 2, 128)  # the tail of a cut segment shares its chunk
@example([256, 256], 4, 128)
@example([100, 1000], 4, 128)  # a segment that must be cut starts a chunk
def test_chunk_rules(counts, ring_pads, pad):
    ring_rows = ring_pads * pad
    begins = np.concatenate([[0], np.cumsum([-(-count // pad) * pad for count in counts])]).tolist()
    bounds = _C.chunk_bounds(begins, ring_rows, pad)
    # All rows once, never more than the ring holds.
    assert bounds[0] == 0
    assert bounds[-1] == begins[-1]
    assert all(0 < end - begin <= ring_rows for begin, end in itertools.pairwise(bounds))
    for begin, end in itertools.pairwise(begins):
        cuts = [bound for bound in bounds if begin < bound < end]
        if end - begin <= ring_rows:
            assert not cuts, "a segment that fits was cut"
        else:
            assert begin in bounds, "a cut segment starts a chunk"
            assert all((cut - begin) % ring_rows == 0 for cut in cuts)
    # A chunk ends before a segment only because that segment has no room in it.
    rows_at = {begin: end - begin for begin, end in itertools.pairwise(begins) if end > begin}
    for begin, end in itertools.pairwise(bounds):
        if end in rows_at:
            assert end - begin + rows_at[end] > ring_rows


@pytest.mark.parametrize("ring_rows", [0, -128, 64, 130, 192])
def test_a_ring_is_a_positive_multiple_of_the_pad(ring_rows):
    with pytest.raises(ValueError, match=f"ring_rows = {ring_rows}: must be a positive multiple"):
        _C.chunk_bounds([0, 256], ring_rows)
