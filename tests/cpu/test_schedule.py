"""The schedule against plain loops: order, tiles, counters, pull lists, chunks, configurations."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

import mok
from mok.shapes import PAD
from mok.simulation import routing_ids
from tests.cpu._schedule_case import Case, cases, ceil_div, expected_pieces, expected_tasks


@given(cases())
@settings(max_examples=300, deadline=None)
def test_tasks_equal_nested_loops(case):
    assert case.tasks() == expected_tasks(case)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_runs_and_pieces_are_prefix_tables(case):
    runs, pieces = case.schedule["runs"], case.schedule["pieces"]
    assert runs["task_begin"].tolist() == sorted(runs["task_begin"].tolist())
    assert runs["pull_begin"].tolist() == sorted(runs["pull_begin"].tolist())
    found = list(
        zip(
            *(pieces[n].tolist() for n in ("begin", "end", "expert", "chunk", "span_begin")),
            strict=True,
        )
    )
    assert found == [piece[:5] for piece in expected_pieces(case)]
    assert case.schedule["chunk_ends"].tolist() == [end // case.block_m for _, end in case.chunks]
    chunks, most_pieces, most_runs = case.schedule["capacity"]
    assert len(case.chunks) <= chunks
    assert len(found) <= most_pieces
    assert len(runs["piece"]) <= most_runs


def stored_parts(case, task):
    """A tile is stored in parts of rows_per_store rows; parts without a valid row are left out."""
    kind, shared, expert, begin, _, m_tile, _ = task
    rows_per_store = case.settings["tuning"].get("rows_per_store", 64)
    if kind.startswith(("bias", "zero")) or kind == "router_grad":
        return 1
    if kind.startswith("wgrad"):
        inner = case.settings["shared_intermediate" if shared else "intermediate"]
        rows = case.settings["hidden"] if kind == "wgrad_down" else inner
        return ceil_div(min(128, rows - 128 * m_tile), rows_per_store)
    if shared:
        end = len(case.ids[case.rank])
    else:
        end = case.plan["segment_begin"][expert] + case.plan["counts"][expert]
    return ceil_div(min(case.block_m, int(end) - begin * case.block_m), rows_per_store)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_final_counters_equal_a_count_over_all_tasks_and_pulls(case):
    s = case.schedule
    own_tokens = len(case.ids[case.rank])
    shared_blocks = (
        ceil_div(own_tokens, case.block_m) if case.settings["shared_intermediate"] else 0
    )
    counted = {name: Counter() for name in s["counters"]}
    spans = {}
    grads = case.phase_tiles(case.settings["intermediate"], False).get("wgrad", [])
    cut = s["tasks"]["cut_ordinal"].tolist()
    for task, cut_ordinal in zip(case.tasks(), cut, strict=True):
        kind, shared, _, begin, _, m_tile, n_tile = task
        block = begin if shared else shared_blocks + begin
        if kind == "gate_up":
            counted["gate_up"][block] += stored_parts(case, task)
        elif kind == "down":
            counted["hidden_read"][block] += 1
        elif kind == "dhidden":
            counted["dhidden"][block] += stored_parts(case, task)
        elif kind in ("dx", "router_grad"):
            counted["dx_read"][block] += 1
        elif kind.startswith(("wgrad", "bias")) and not shared:
            counted["span_read"][spans.setdefault(begin, len(spans))] += 1
            if cut_ordinal >= 0:
                tile = grads.index((kind, m_tile, n_tile))
                counted["accumulator"][tile] += stored_parts(case, task)
    units = s["units"]
    for buffer, unit in zip(
        s["pulls"]["buffer"].tolist(), s["pulls"]["unit"].tolist(), strict=True
    ):
        rows = units["rows"][units["row_begin"][unit] : units["row_begin"][unit + 1]]
        for row in rows.tolist():
            counted["x" if buffer == 0 else "dout"][shared_blocks + row // case.block_m] += 1
    for name, finals in s["counters"].items():
        expected = [counted[name][i] for i in range(len(finals))]
        assert finals.tolist() == expected, name
        assert sum(counted[name].values()) == sum(expected), name


@given(cases())
@settings(max_examples=100, deadline=None)
def test_pulls_fetch_each_token_of_a_chunk_once_and_fill_every_row(case):
    s, plan = case.schedule, case.plan
    units, pulls = s["units"], s["pulls"]
    top_k = case.ids[0].shape[1]
    pieces = ceil_div(2 * case.settings["hidden"], case.settings["tuning"]["pull_bytes"])
    chunk_of_row = np.full(len(plan["row_peer"]), -1)
    for chunk, (begin, end) in enumerate(case.chunks):
        chunk_of_row[begin:end] = chunk
    seen, filled = set(), Counter()
    for unit, (peer, token) in enumerate(
        zip(units["peer"].tolist(), units["token"].tolist(), strict=True)
    ):
        rows = units["rows"][units["row_begin"][unit] : units["row_begin"][unit + 1]]
        assert len(rows) > 0
        assert len(set(chunk_of_row[rows].tolist())) == 1
        filled.update(rows.tolist())
        if peer < 0:
            assert (plan["row_peer"][rows] == -1).all()
            continue
        assert (plan["row_peer"][rows] == peer).all()
        assert (plan["row_slot"][rows] // top_k == token).all()
        key = (peer, token, int(chunk_of_row[rows[0]]))
        assert key not in seen
        seen.add(key)
    assert set(filled.values()) <= {1}
    # Which buffers are pulled for which rows.
    pulled = {0: Counter(), 1: Counter()}
    for buffer, unit, piece in zip(
        *(pulls[name].tolist() for name in ("buffer", "unit", "piece")), strict=True
    ):
        assert 0 <= piece < pieces
        rows = units["rows"][units["row_begin"][unit] : units["row_begin"][unit + 1]]
        pulled[buffer].update(rows.tolist())
    tiles = case.phase_tiles(case.settings["intermediate"], False)
    for row, chunk in enumerate(chunk_of_row.tolist()):
        valid = plan["row_peer"][row] >= 0
        first, save = chunk == 0, case.settings["save"]
        if case.backward:
            zeroed = "wgrad" in tiles
            needs_x = (
                not first or save == "none" or (save == "gate_up" and case.wants("gate", "up"))
            )
            wanted = {0: needs_x and bool(tiles), 1: bool(tiles)}
        else:
            zeroed = first and save == "all"
            wanted = {0: True, 1: False}
        for buffer in (0, 1):
            expected = pieces if wanted[buffer] and chunk >= 0 and (valid or zeroed) else 0
            assert pulled[buffer][row] == expected


@given(cases(directions=("forward",)))
@settings(max_examples=50, deadline=None)
def test_pull_order_rotates_over_sources_only_inside_windows(case):
    units, pieces = case.schedule["units"], case.schedule["pieces"]
    window = case.settings["tuning"]["window_blocks"]
    begins = pieces["begin"]
    keys = []
    for unit, peer in enumerate(units["peer"].tolist()):
        row = units["rows"][units["row_begin"][unit]]
        block = row // case.block_m
        piece = int(np.searchsorted(begins, block, side="right")) - 1
        turn = (peer - case.rank) % len(case.ids) if peer >= 0 else 0
        keys.append((piece, (block - begins[piece]) // window, turn, row))
    assert keys == sorted(keys)


def test_a_row_block_is_consumed_two_waves_after_it_is_produced():
    """Shape A of the benchmarks: 128 experts on two ranks, 132 CTAs."""
    ids = routing_ids("random", num_ranks=2, num_tokens=4096, num_experts=128, top_k=8)
    case = Case(ids, num_experts=128, hidden=2048, intermediate=768)
    produced, consumed = {}, {}
    tasks = case.tasks()
    for index, (kind, _, _, begin, *_) in enumerate(tasks):
        if kind == "gate_up":
            produced[begin] = index
        else:
            consumed.setdefault(begin, index)
    last_produced = max(produced.values())
    gaps = [consumed[b] - produced[b] for b in produced if consumed[b] < last_produced]
    assert len(gaps) > len(produced) / 2
    assert min(gaps) > 2 * 132
    # No wider than it needs to be: h stays in L2.
    assert max(gaps) < 8 * 132


def test_idle_experts_have_no_tasks_but_their_zeros():
    ids = routing_ids("one_expert", num_ranks=2, num_tokens=100, num_experts=64, top_k=1)
    arguments = {"num_experts": 64, "hidden": 256, "intermediate": 256, "direction": "backward"}
    case = Case(ids, **arguments)
    kinds = Counter((task[0] == "zero_grad", task[2]) for task in case.tasks())
    tiles = 3 * 2 * 1  # 128 x 256 tiles of three 256 x 256 matrices
    assert {expert for zero, expert in kinds if not zero} == {0}
    assert {expert: n for (zero, expert), n in kinds.items() if zero} == dict.fromkeys(
        range(1, 32), tiles
    )
    accumulating = Case(ids, accumulate=True, **arguments)
    assert {task[2] for task in accumulating.tasks()} == {0}
    other = Case(ids, rank=1, **arguments)
    assert {task[0] for task in other.tasks()} == {"zero_grad"}


def test_no_tokens_anywhere():
    ids = [np.zeros((0, 2), np.int64)] * 3
    for direction in ("forward", "recompute"):
        case = Case(ids, num_experts=6, hidden=256, intermediate=256, direction=direction)
        assert case.tasks() == []


def test_the_shared_expert_comes_first():
    ids = routing_ids("random", num_ranks=2, num_tokens=300, num_experts=4, top_k=2)
    for direction in ("forward", "backward"):
        case = Case(
            ids,
            num_experts=4,
            hidden=256,
            intermediate=256,
            shared_intermediate=384,
            direction=direction,
        )
        shared = [task[1] for task in case.tasks()]
        assert any(shared)
        assert shared == sorted(shared, reverse=True)


def test_cut_segments_form_one_chain_of_accumulators():
    ids = routing_ids("one_expert", num_ranks=2, num_tokens=1000, num_experts=2, top_k=1)
    case = Case(
        ids, num_experts=2, hidden=256, intermediate=256, direction="backward", ring_rows=512
    )
    tasks = case.schedule["tasks"]
    wgrad = np.array([kind == "wgrad_down" for kind in tasks["kind"]])
    rows = np.stack(
        [tasks[n][wgrad] for n in ("begin", "end", "cut_ordinal", "continues", "unfinished")], 1
    )
    stretches = [list(map(int, row)) for row in np.unique(rows, axis=0)]
    assert stretches == [
        [0, 4, 0, 0, 1],
        [4, 8, 1, 1, 1],
        [8, 12, 2, 1, 1],
        [12, 16, 3, 1, 0],
    ]


def test_a_very_wide_layer():
    """One row block with more column tiles than a 16-bit tile index holds."""
    ids = routing_ids("one_expert", num_ranks=1, num_tokens=256, num_experts=1, top_k=1)
    case = Case(ids, num_experts=1, hidden=8, intermediate=128 * 40000)
    assert case.schedule["runs"]["task_begin"].max() == 2 * (40000 + 1)
    assert len(set(case.tasks())) == 2 * (40000 + 1)


def test_configuration_table():
    rows = mok._C.kernel_configs()
    assert mok._C.choose_config(90, 768) == 0
    assert rows[mok._C.choose_config(90, 768)]["lag_waves"] == 2
    assert rows[mok._C.choose_config(90, 1536)]["lag_waves"] == 3
    assert rows[mok._C.choose_config(90, 14336)]["lag_waves"] == 3
    assert mok._C.choose_config(70, 768) == -1
    assert all(row["block_m"] == PAD for row in rows)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"ring_rows": 100}, "ring_rows = 100"),
        ({"hidden": 0}, "hidden = 0"),
        ({"direction": "sideways"}, "direction = 'sideways'"),
        ({"save": "some"}, "save = 'some'"),
        ({"num_experts": 3}, "num_experts = 3"),
        ({"ring_rows": 0}, "ring_rows = 0"),
        ({"tuning": {"group_m": 0}}, "group_m = 0"),
        ({"gradients": ["z"]}, "gradients has 'z'"),
    ],
)
def test_wrong_sizes_are_named(changed, message):
    ids = [np.zeros((4, 1), np.int64)] * 2
    arguments = {"num_experts": 4, "hidden": 256, "intermediate": 256} | changed
    with pytest.raises(ValueError, match=message):
        Case(ids, **arguments)
