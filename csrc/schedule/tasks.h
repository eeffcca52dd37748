// A task from its index: a binary search over the runs, then arithmetic.
//
// Order: the shared expert's phases over the rank's own rows, the routed runs, zeros for idle experts.
#pragma once

#include <cstdint>

#include "csrc/schedule/order.h"

namespace mok::schedule {

enum class TaskKind : int32_t {
    kGateUp = 0,      // x -> gate, up (rounded), h; in backward gate and up alone
    kDown = 1,        // h -> y, each row written to its home rank
    kDHidden = 2,     // dout, gate, up -> dg, du, h' and partial router gradients
    kDx = 3,          // dg, du -> dx, each row written to its home rank
    kRouterGrad = 4,  // partial sums -> router gradients sent home; where no dx task does it
    kWgradGate = 5,   // dg^T x
    kWgradUp = 6,     // du^T x
    kWgradDown = 7,   // dout^T h'
    kBiasGate = 8,    // column sums of dg
    kBiasUp = 9,      // of du
    kBiasDown = 10,   // of w dout
    kZeroGrad = 11,   // a weight- or bias-gradient tile of an expert without rows
    kExit = 12,
};
constexpr int32_t kNumTaskKinds = 13;

struct Task {
    TaskKind kind;
    bool shared;     // over this rank's own rows; blocks count from 0
    int32_t expert;  // local; -1: shared
    int32_t chunk;
    int32_t begin, end;   // row blocks: one, or the span that a gradient sums over
    int32_t m_tile;       // row tile of a gradient, else 0
    int32_t n_tile;       // column tile
    int32_t span;         // index of a gradient's span
    int32_t span_tile;    // of a gradient: its tile among all of the span
    int32_t cut_ordinal;  // of a cut segment's stretch, -1: the span is the whole segment
    bool continues;       // starts from the stored accumulator
    bool unfinished;      // stores the accumulator for the next chunk

    MOK_HD bool is_gradient() const { return kind >= TaskKind::kWgradGate && kind <= TaskKind::kBiasDown; }
    MOK_HD bool is_wgrad() const { return kind >= TaskKind::kWgradGate && kind <= TaskKind::kWgradDown; }
};

struct Tile {
    int32_t m, n;
};

/// Tile `index` of an m x n grid: groups of `group_m` row tiles run through all columns, rows innermost, so
/// that tiles of one time share their operands.
MOK_HD Tile swizzled_tile(int64_t index, int32_t num_m, int32_t num_n, int32_t group_m) {
    // Fewer than 2^32 tiles: on a device a 64-bit division is a hundred instructions.
    const uint32_t tile = static_cast<uint32_t>(index), group = static_cast<uint32_t>(group_m);
    const uint32_t per_group = group * static_cast<uint32_t>(num_n);
    const uint32_t first = tile / per_group * group, rest = tile % per_group;
    const uint32_t left = static_cast<uint32_t>(num_m) - first;
    const uint32_t height = left < group ? left : group;
    return Tile{static_cast<int32_t>(first + rest % height), static_cast<int32_t>(rest / height)};
}

/// Valid rows of a row block: routes of its segment, or own tokens.
MOK_HD int32_t valid_rows(const ScheduleShape& shape, const Table& table, bool shared, int32_t expert,
                          int32_t block) {
    const int64_t row = static_cast<int64_t>(block) * shape.block_m;
    const int64_t end = shared ? shape.sizes.num_tokens : table.segment_begin[expert] + table.counts[expert];
    const int64_t rows = end - row;
    return static_cast<int32_t>(rows < 0 ? 0 : (rows < shape.block_m ? rows : shape.block_m));
}

/// Sets kind and tile of tile `index` of a span's gradients: gate, up, down, then their biases.
MOK_HD void set_gradient_tile(const ScheduleShape& shape, const ExpertTiles& tiles, int32_t index,
                              Task& task) {
    task.span_tile = index;
    for (int32_t m = 0; m < kNumMatrices; ++m) {
        if (index < tiles.wgrad_tiles(m)) {
            const Tile tile = swizzled_tile(index, tiles.wgrad_m[m], tiles.wgrad_n[m], shape.group_m);
            task.kind = static_cast<TaskKind>(static_cast<int32_t>(TaskKind::kWgradGate) + m);
            task.m_tile = tile.m;
            task.n_tile = tile.n;
            return;
        }
        index -= tiles.wgrad_tiles(m);
    }
    for (int32_t m = 0; m < kNumMatrices; ++m) {
        if (index < tiles.bias[m]) {
            task.kind = static_cast<TaskKind>(static_cast<int32_t>(TaskKind::kBiasGate) + m);
            task.n_tile = index;
            return;
        }
        index -= tiles.bias[m];
    }
}

MOK_HD TaskKind block_task_kind(Phase phase, const ExpertTiles& tiles) {
    switch (phase) {
        case Phase::kGateUp:
            return TaskKind::kGateUp;
        case Phase::kDown:
            return TaskKind::kDown;
        case Phase::kDHidden:
            return TaskKind::kDHidden;
        default:
            return tiles.dx > 0 ? TaskKind::kDx : TaskKind::kRouterGrad;
    }
}

MOK_HD Task empty_task(TaskKind kind) {
    return Task{kind, false, -1, 0, 0, 0, 0, 0, -1, -1, -1, false, false};
}

/// `kSpans`: the pass may have tasks over spans; forward and recompute have none, and without them the code
/// is a fraction.
template <bool kSpans = true>
MOK_HD Task shared_task(const ScheduleShape& shape, int64_t index) {
    Task task = empty_task(TaskKind::kExit);
    task.shared = true;
    for (int32_t k = 0; k < shape.num_phases; ++k) {
        const int64_t tasks = shape.shared_tasks(k);
        if (index >= tasks) {
            index -= tasks;
            continue;
        }
        const Phase phase = shape.phases[k].phase;
        if (kSpans && phase == Phase::kWgrad) {
            task.end = shape.num_shared_blocks;
            set_gradient_tile(shape, shape.shared, static_cast<int32_t>(index), task);
        } else {
            const Tile tile =
                swizzled_tile(index, shape.num_shared_blocks, shape.shared.per_block(phase), shape.group_m);
            task.kind = block_task_kind(phase, shape.shared);
            task.begin = tile.m;
            task.end = tile.m + 1;
            task.n_tile = tile.n;
        }
        break;
    }
    return task;
}

/// The run that holds routed task `index`. `hint` is any run at or before it: a CTA's last one saves steps.
MOK_HD int32_t find_run(const Table& table, int64_t index, int32_t hint) {
    int32_t low = hint, high = table.num_runs;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (table.runs[middle].task_begin <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

template <bool kSpans = true>
MOK_HD Task routed_task(const ScheduleShape& shape, const Table& table, int32_t run_idx, int64_t index) {
    const Run& run = table.runs[run_idx];
    const Piece& piece = table.pieces[run.piece];
    const Phase phase = shape.phases[run.phase_idx].phase;
    const int64_t local = index - run.task_begin;
    Task task = empty_task(TaskKind::kExit);
    task.expert = piece.expert;
    task.chunk = piece.chunk;
    if (kSpans && phase == Phase::kWgrad) {
        const Chunk& chunk = table.chunks[piece.chunk];
        task.begin = piece.span_begin;
        task.end = piece.end;
        task.span = piece.spans_before;
        if (piece.span_begin == chunk.begin && chunk.cut_ordinal >= 0) {
            task.cut_ordinal = chunk.cut_ordinal;
            task.continues =
                table.segment_begin[piece.expert] < static_cast<int64_t>(task.begin) * shape.block_m;
            task.unfinished =
                table.segment_begin[piece.expert + 1] > static_cast<int64_t>(task.end) * shape.block_m;
        }
        set_gradient_tile(shape, shape.routed, static_cast<int32_t>(local), task);
    } else {
        const Tile tile =
            swizzled_tile(local, piece.end - piece.begin, shape.routed.per_block(phase), shape.group_m);
        task.kind = block_task_kind(phase, shape.routed);
        task.begin = piece.begin + tile.m;
        task.end = task.begin + 1;
        task.n_tile = tile.n;
    }
    return task;
}

/// Experts of the zeroing tasks: idle local ones, then the shared one when this rank has no tokens.
MOK_HD int64_t num_zero_tasks(const ScheduleShape& shape, const Table& table) {
    if (!shape.sizes.zero_idle) return 0;
    const bool shared_idle = shape.sizes.shared_intermediate > 0 && shape.num_shared_blocks == 0;
    return static_cast<int64_t>(table.num_idle) * shape.routed.span_tiles() +
           (shared_idle ? shape.shared.span_tiles() : 0);
}

MOK_HD Task zero_task(const ScheduleShape& shape, const Table& table, int64_t index) {
    Task task = empty_task(TaskKind::kZeroGrad);
    const int32_t per_expert = shape.routed.span_tiles();
    const int64_t routed = static_cast<int64_t>(table.num_idle) * per_expert;
    task.shared = index >= routed;
    if (task.shared) {
        set_gradient_tile(shape, shape.shared, static_cast<int32_t>(index - routed), task);
    } else {
        task.expert = table.idle_experts[index / per_expert];
        set_gradient_tile(shape, shape.routed, static_cast<int32_t>(index % per_expert), task);
    }
    task.kind = TaskKind::kZeroGrad;
    return task;
}

MOK_HD int64_t num_tasks(const ScheduleShape& shape, const Table& table) {
    return table.num_shared_tasks + table.num_routed_tasks + num_zero_tasks(shape, table);
}

/// Task `index` of the order; kExit behind the last. `run_hint` is 0 or what an earlier call with a smaller
/// index left there.
MOK_HD Task decode_task(const ScheduleShape& shape, const Table& table, int64_t index, int32_t& run_hint) {
    if (index < table.num_shared_tasks) return shared_task(shape, index);
    index -= table.num_shared_tasks;
    if (index < table.num_routed_tasks) {
        run_hint = find_run(table, index, run_hint);
        return routed_task(shape, table, run_hint, index);
    }
    index -= table.num_routed_tasks;
    return index < num_zero_tasks(shape, table) ? zero_task(shape, table, index)
                                                : empty_task(TaskKind::kExit);
}

/// Whether a task finishes the router gradients of its row block: adds the partial sums in order (and the
/// bias term) and sends them home.
MOK_HD bool finishes_router_gradient(const ScheduleShape& shape, const Task& task) {
    if (task.kind == TaskKind::kRouterGrad) return true;
    return task.kind == TaskKind::kDx && task.n_tile == 0 &&
           shape.wants(task.shared ? kGradientSharedWeight : kGradientWeights);
}

}  // namespace mok::schedule
