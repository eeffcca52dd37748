"""The schedule against plain loops: order, tiles, counters, pull lists, chunks, configurations."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mok
from mok.simulation import ALL_GRADIENTS, routing_ids, schedule_settings

PAD = 128


def ceil_div(a, b):
    return -(-a // b)


class Case:
    """One rank's schedule, its plan, and the settings it was made from."""

    def __init__(self, ids, rank=0, **arguments):
        native = mok._C
        self.ids = [np.asarray(rank_ids, dtype=np.int64) for rank_ids in ids]
        self.rank = rank
        self.settings = schedule_settings(native, self.ids, **arguments)
        self.schedule = native.schedule(self.ids, rank, self.settings)
        self.block_m = self.settings["tuning"].get("block_m", PAD)
        self.plan = native.build_plan(self.ids, rank, self.settings["num_experts"], self.block_m)
        self.backward = self.settings["direction"] == "backward"
        ends = native.chunk_bounds(
            self.plan["segment_begin"].tolist(), self.settings["ring_rows"], self.block_m
        )
        self.chunks = list(zip(ends[:-1], ends[1:], strict=True))
        if self.settings["direction"] == "recompute":
            self.chunks = self.chunks[:1]

    def wants(self, *names):
        return any(self.settings["gradients"] & ALL_GRADIENTS[name] for name in names)

    def tasks(self):
        """(kind, shared, expert, begin, end, m_tile, n_tile) in order."""
        columns = self.schedule["tasks"]
        names = ("shared", "expert", "begin", "end", "m_tile", "n_tile")
        return list(zip(columns["kind"], *(columns[name].tolist() for name in names), strict=True))

    def phase_tiles(self, inner, shared):
        """Phase name -> tiles per row block, in the order of phases; wgrad: its tile list."""
        H = self.settings["hidden"]
        direction = self.settings["direction"]
        if not self.backward:
            tiles = {"gate_up": ceil_div(inner, 128)}
            if direction == "forward":
                tiles["down"] = ceil_div(H, 256)
            return tiles
        prefix = "shared_" if shared else ""
        matrices = [m for m in ("gate", "up", "down") if self.wants(prefix + m)]
        biases = [] if shared else [m for m in ("gate", "up", "down") if self.wants("b_" + m)]
        want_dw = self.wants("shared_weight" if shared else "weights")
        if not (self.wants("x") or want_dw or matrices or biases):
            return {}
        tiles = {"gate_up": ceil_div(inner, 128), "dhidden": ceil_div(inner, 256)}
        if self.wants("x"):
            tiles["dx"] = ceil_div(H, 256)
        elif want_dw:
            tiles["router_grad"] = 1
        grads = []
        for m in matrices:
            rows, columns = (H, inner) if m == "down" else (inner, H)
            grads += swizzled(
                f"wgrad_{m}", ceil_div(rows, 128), ceil_div(columns, 256), self.group_m
            )
        for m in biases:
            grads += [
                (f"bias_{m}", 0, n) for n in range(ceil_div(H if m == "down" else inner, 256))
            ]
        if grads:
            tiles["wgrad"] = grads
        return tiles

    @property
    def group_m(self):
        return self.settings["tuning"].get("group_m", 16)

    @property
    def saves_gate_up(self):
        return self.settings["save"] != "none"


def swizzled(kind, num_m, num_n, group_m):
    """Groups of group_m row tiles run through all columns, rows innermost."""
    tiles = []
    for first in range(0, num_m, group_m):
        for n in range(num_n):
            tiles += [(kind, m, n) for m in range(first, min(first + group_m, num_m))]
    return tiles


def expected_pieces(case):
    """(begin, end, expert, chunk, span_begin, ends_span) in row blocks."""
    longest = case.schedule["max_piece_blocks"]
    begin = case.plan["segment_begin"].tolist()
    pieces = []
    for chunk, (chunk_begin, chunk_end) in enumerate(case.chunks):
        for expert in range(len(begin) - 1):
            first = max(begin[expert], chunk_begin) // case.block_m
            last = min(begin[expert + 1], chunk_end) // case.block_m
            for block in range(first, last, longest):
                end = min(block + longest, last)
                pieces.append((block, end, expert, chunk, first, end == last))
    return pieces


def expected_tasks(case):
    """The whole order by nested loops."""
    s = case.settings
    own_tokens = len(case.ids[case.rank])
    shared_blocks = ceil_div(own_tokens, case.block_m) if s["shared_intermediate"] else 0
    shared_tiles = case.phase_tiles(s["shared_intermediate"], True) if shared_blocks else {}
    tasks = []
    for phase, tiles in shared_tiles.items():
        if phase == "gate_up" and case.backward and case.saves_gate_up:
            continue
        if phase == "wgrad":
            tasks += [(kind, True, -1, 0, shared_blocks, m, n) for kind, m, n in tiles]
        else:
            tasks += [
                (kind, True, -1, m, m + 1, 0, n)
                for kind, m, n in swizzled(phase, shared_blocks, tiles, case.group_m)
            ]

    tiles = case.phase_tiles(s["intermediate"], False)
    pieces = expected_pieces(case)
    ring = s["ring_rows"] // case.block_m
    # The schedule of the native side has a phase wherever routed or shared rows need one.
    phases = list(tiles)
    merged = [*case.phase_tiles(s["shared_intermediate"], True)] if s["shared_intermediate"] else []
    order = ("gate_up", "down", "dhidden", "dx", "router_grad", "wgrad")
    slots = [p for p in order if p in phases or p in merged]
    if "dx" in slots and "router_grad" in slots:
        slots.remove("router_grad")
    lags = dict(zip(slots, case.schedule["lag_blocks"], strict=True)) if tiles else {}

    def emit(phase, piece):
        begin, end, expert, chunk, span_begin, ends_span = piece
        if phase == "gate_up" and case.backward and case.saves_gate_up and chunk == 0:
            return []
        if phase == "wgrad":
            grads = tiles[phase] if ends_span else []
            return [(kind, False, expert, span_begin, end, m, n) for kind, m, n in grads]
        return [
            (kind, False, expert, begin + m, begin + m + 1, 0, n)
            for kind, m, n in swizzled(phase, end - begin, tiles[phase], case.group_m)
        ]

    if tiles:
        emitted = dict.fromkeys(phases[1:], 0)
        for index, piece in enumerate(pieces):
            reach = case.chunks[piece[3]][1] // case.block_m if case.backward else piece[1]
            for phase in phases[1:]:
                while emitted[phase] < index:
                    earlier = pieces[emitted[phase]]
                    lags_behind = piece[0] >= earlier[1] + lags[phase]
                    reused_from = earlier[4] if case.backward else earlier[0]
                    if not lags_behind and reused_from >= reach - ring:
                        break
                    tasks += emit(phase, earlier)
                    emitted[phase] += 1
            tasks += emit(phases[0], piece)
        for phase in phases[1:]:
            for piece in pieces[emitted[phase] :]:
                tasks += emit(phase, piece)

    if case.backward and s["zero_idle"]:
        for expert, count in enumerate(case.plan["counts"].tolist()):
            if count == 0:
                tasks += [
                    ("zero_grad", False, expert, 0, 0, m, n) for _, m, n in tiles.get("wgrad", [])
                ]
        if s["shared_intermediate"] and not shared_blocks:
            grads = case.phase_tiles(s["shared_intermediate"], True).get("wgrad", [])
            tasks += [("zero_grad", True, -1, 0, 0, m, n) for _, m, n in grads]
    return tasks


@st.composite
def cases(draw, directions=("forward", "backward", "recompute")):
    num_ranks = draw(st.sampled_from([1, 2, 3, 8, 72]))
    num_experts = num_ranks * draw(st.sampled_from([1, 2, 5]))
    tokens = [draw(st.integers(0, 700 // num_ranks + 1)) for _ in range(num_ranks)]
    top_k = draw(st.integers(1, 4))
    ids = routing_ids(
        draw(st.sampled_from(["random", "zipf", "one_rank", "one_expert", "none"])),
        num_ranks=num_ranks,
        num_tokens=tokens,
        num_experts=max(num_experts, top_k),
        top_k=top_k,
        seed=draw(st.integers(0, 1000)),
    )
    for rank_ids in ids:  # some routes are dropped
        rank_ids[torch.rand(rank_ids.shape) < 0.1] = -1
    names = list(ALL_GRADIENTS)
    return Case(
        ids,
        rank=draw(st.integers(0, num_ranks - 1)),
        num_experts=num_experts,
        hidden=draw(st.sampled_from([8, 256, 520])),
        intermediate=draw(st.sampled_from([8, 384])),
        shared_intermediate=draw(st.sampled_from([0, 200])),
        ring_rows=PAD * draw(st.sampled_from([1, 2, 3, 50])),
        save=draw(st.sampled_from(["none", "gate_up", "all"])),
        direction=draw(st.sampled_from(directions)),
        gradients=[name for name in names if draw(st.booleans())],
        accumulate=draw(st.booleans()),
        num_sms=draw(st.sampled_from([1, 4, 132])),
        tuning={
            "block_m": draw(st.sampled_from([32, 128])),
            "rows_per_store": 16,
            "group_m": draw(st.sampled_from([1, 3, 16])),
            "lag_waves": draw(st.integers(1, 3)),
            "window_blocks": draw(st.integers(1, 3)),
            "pull_bytes": draw(st.sampled_from([256, 4096])),
        },
    )


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
