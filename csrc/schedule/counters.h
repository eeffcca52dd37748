// Readiness counters: what a task waits for, what it signals, and the value each counter ends with.
//
// All counters start a call at zero and only grow. Every wait is for a counter's final value, except the
// chain of accumulators of cut segments, which is waited for stretch by stretch. docs/schedule.md has the
// table and the argument why nothing can deadlock.
#pragma once

#include <cstdint>

#include "csrc/schedule/tasks.h"

namespace mok::schedule {

enum class Counter : int32_t {
    kX = 0,           // per row block: pieces of x rows stored by pull warps
    kDout = 1,        // per row block: pieces of dout rows
    kGateUp = 2,      // per row block: parts of gate/up tiles stored (forward: h too)
    kHiddenRead = 3,  // per row block: down tiles that have read h
    kDHidden = 4,     // per row block: parts of dhidden tiles stored
    kDxRead = 5,  // per row block: dx tiles (or the router-gradient task) that have read dg, du and partials
    kSpanRead = 6,     // per span: gradient tiles that have read their operands
    kAccumulator = 7,  // per gradient tile: parts stored for stretches of cut segments
};
constexpr int32_t kNumCounters = 8;

/// Where a counter's values start in the one array of the call. Block counters hold the shared expert's row
/// blocks first.
struct CounterLayout {
    int64_t begin[kNumCounters + 1];
};

/// How many values a counter has.
MOK_HD int64_t counter_size(const ScheduleShape& shape, const Table& table, Counter counter) {
    if (counter == Counter::kSpanRead) return table.num_spans();
    if (counter == Counter::kAccumulator) return shape.routed.span_tiles();
    return static_cast<int64_t>(shape.num_shared_blocks) + table.num_blocks;
}

MOK_HD CounterLayout counter_layout(const ScheduleShape& shape, const Table& table) {
    CounterLayout layout{};
    for (int32_t c = 0; c < kNumCounters; ++c) {
        layout.begin[c + 1] = layout.begin[c] + counter_size(shape, table, static_cast<Counter>(c));
    }
    return layout;
}

/// One value: the counter's `index`, with routed row blocks behind the shared ones.
MOK_HD int32_t counter_block(const ScheduleShape& shape, bool shared, int32_t block) {
    return shared ? block : shape.num_shared_blocks + block;
}

/// Parts of a tile that are stored and signalled one by one: its consumer warpgroups that hold a valid row.
MOK_HD int32_t store_parts(const ScheduleShape& shape, int32_t rows) {
    const int32_t parts = ceil_div(rows, shape.rows_per_store);
    return parts > 0 ? parts : 1;
}

/// Rows of a gradient tile of the matrix: the last row tile may be short.
MOK_HD int32_t gradient_tile_rows(const ScheduleShape& shape, const Task& task) {
    if (!task.is_wgrad()) return 1;
    const int64_t inner = task.shared ? shape.sizes.shared_intermediate : shape.sizes.intermediate;
    const int64_t rows = task.kind == TaskKind::kWgradDown ? shape.sizes.hidden : inner;
    const int64_t left = rows - static_cast<int64_t>(task.m_tile) * shape.wgrad_m;
    return static_cast<int32_t>(left < shape.wgrad_m ? left : shape.wgrad_m);
}

/// Parts in which a task's result is stored.
MOK_HD int32_t task_parts(const ScheduleShape& shape, const Table& table, const Task& task) {
    if (task.kind == TaskKind::kZeroGrad || task.kind == TaskKind::kRouterGrad) return 1;
    if (task.is_gradient()) return store_parts(shape, gradient_tile_rows(shape, task));
    return store_parts(shape, valid_rows(shape, table, task.shared, task.expert, task.begin));
}

/// Whether the gate/up phase runs over a row block in this pass.
MOK_HD bool makes_gate_up(const ScheduleShape& shape, bool shared, int32_t chunk) {
    return shape.runs(Phase::kGateUp, shared ? 0 : chunk);
}

/// The final value of a counter of one row block, whose expert and chunk the caller knows.
MOK_HD int32_t block_final_value(const ScheduleShape& shape, const Table& table, Counter counter, bool shared,
                                 int32_t expert, int32_t chunk, int32_t block) {
    const ExpertTiles& tiles = shared ? shape.shared : shape.routed;
    const int32_t valid = valid_rows(shape, table, shared, expert, block);
    switch (counter) {
        case Counter::kX:
        case Counter::kDout:
            if (shared || !shape.pulls(counter == Counter::kX ? Pulled::kX : Pulled::kDout, chunk)) return 0;
            return (shape.zeroes_padding(chunk) ? shape.block_m : valid) * shape.pull_pieces;
        case Counter::kGateUp:
            return makes_gate_up(shape, shared, chunk) ? tiles.gate_up * store_parts(shape, valid) : 0;
        case Counter::kHiddenRead:
            return tiles.down;
        case Counter::kDHidden:
            return tiles.dhidden * store_parts(shape, valid);
        default:
            return tiles.dx + tiles.router;
    }
}

/// The value a counter has when the call ends, by its index.
MOK_HD int32_t final_value(const ScheduleShape& shape, const Table& table, Counter counter, int32_t index) {
    if (counter == Counter::kSpanRead) return shape.routed.span_tiles();
    if (counter == Counter::kAccumulator) {
        Task task = empty_task(TaskKind::kExit);
        set_gradient_tile(shape, shape.routed, index, task);
        const int32_t num_stretches = table.chunks[table.num_chunks].cut_ordinal;
        return num_stretches * store_parts(shape, gradient_tile_rows(shape, task));
    }
    if (index < shape.num_shared_blocks) {
        return block_final_value(shape, table, counter, true, -1, 0, index);
    }
    const int32_t block = index - shape.num_shared_blocks;
    const Piece& piece = table.pieces[find_piece(table, block)];
    return block_final_value(shape, table, counter, false, piece.expert, piece.chunk, block);
}

constexpr int32_t kFinal = -1;

/// Until counters [first, last) have reached `target`; kFinal: each its own final value.
struct Wait {
    Counter counter;
    int32_t first, last;
    int32_t target;
};
constexpr int32_t kMaxWaits = 4;

/// What a task waits for before it reads anything: fills `waits`, returns how many.
MOK_HD int32_t task_waits(const ScheduleShape& shape, const Task& task, Wait (&waits)[kMaxWaits]) {
    int32_t n = 0;
    const int32_t first = counter_block(shape, task.shared, task.begin);
    const int32_t last = counter_block(shape, task.shared, task.end);
    const auto add = [&](Counter counter) { waits[n++] = Wait{counter, first, last, kFinal}; };
    switch (task.kind) {
        case TaskKind::kGateUp:
            if (task.shared) break;
            add(Counter::kX);
            if (!shape.backward() && shape.phase_index(Phase::kDown) >= 0 &&
                task.begin >= shape.ring_blocks) {
                const int32_t before = first - shape.ring_blocks;
                waits[n++] = Wait{Counter::kHiddenRead, before, before + 1, kFinal};
            }
            break;
        case TaskKind::kDown:
            add(Counter::kGateUp);
            break;
        case TaskKind::kDHidden:
            if (!task.shared) add(Counter::kDout);
            if (makes_gate_up(shape, task.shared, task.chunk)) add(Counter::kGateUp);
            break;
        case TaskKind::kDx:
        case TaskKind::kRouterGrad:
            add(Counter::kDHidden);
            break;
        case TaskKind::kZeroGrad:
        case TaskKind::kExit:
            break;
        default:
            add(Counter::kDHidden);
            // Rows of x that no gate/up task of this pass has waited for.
            if ((task.kind == TaskKind::kWgradGate || task.kind == TaskKind::kWgradUp) && !task.shared &&
                shape.pulls(Pulled::kX, task.chunk) && !makes_gate_up(shape, false, task.chunk)) {
                add(Counter::kX);
            }
            if (task.cut_ordinal > 0) {
                const int32_t parts = store_parts(shape, gradient_tile_rows(shape, task));
                waits[n++] =
                    Wait{Counter::kAccumulator, task.span_tile, task.span_tile + 1, task.cut_ordinal * parts};
            }
    }
    return n;
}

enum class When : int32_t {
    kRead = 0,    // the task has read all its operands: once
    kStored = 1,  // a part of its result is stored and the store is complete: once per part
};

struct Signal {
    Counter counter;
    int32_t index;
    When when;
};
constexpr int32_t kMaxSignals = 2;

/// The counters a task adds one to.
MOK_HD int32_t task_signals(const ScheduleShape& shape, const Task& task, Signal (&signals)[kMaxSignals]) {
    const int32_t block = counter_block(shape, task.shared, task.begin);
    switch (task.kind) {
        case TaskKind::kGateUp:
            signals[0] = Signal{Counter::kGateUp, block, When::kStored};
            return 1;
        case TaskKind::kDown:
            signals[0] = Signal{Counter::kHiddenRead, block, When::kRead};
            return 1;
        case TaskKind::kDHidden:
            signals[0] = Signal{Counter::kDHidden, block, When::kStored};
            return 1;
        case TaskKind::kDx:
        case TaskKind::kRouterGrad:
            signals[0] = Signal{Counter::kDxRead, block, When::kRead};
            return 1;
        case TaskKind::kZeroGrad:
        case TaskKind::kExit:
            return 0;
        default:
            break;
    }
    if (task.shared) return 0;
    signals[0] = Signal{Counter::kSpanRead, task.span, When::kRead};
    if (task.cut_ordinal < 0) return 1;
    signals[1] = Signal{Counter::kAccumulator, task.span_tile, When::kStored};
    return 2;
}

}  // namespace mok::schedule
