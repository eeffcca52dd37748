"""One rank's schedule beside plain loops that say what it must be."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

import mok
from mok.shapes import PAD
from mok.simulation import ALL_GRADIENTS, routing_ids, schedule_settings


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
        self.chunks = list(pairwise(ends))
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
