// What the BF16 megakernels of both passes know of a call, and what their roles share.
#pragma once

#include "csrc/gemm/sm90_task.cuh"
#include "csrc/kernels/task_span.h"
#include "csrc/layout/wait_place.h"
#include "csrc/schedule/prepared.h"

namespace mok {

struct MoeCallParams {
    schedule::ScheduleShape shape;
    schedule::PreparedCall call;
    char* ring_x;           // [ring_rows, H]
    char* ring_dout;        // [ring_rows, H]; backward
    char* saved_x_rows;     // [save_rows, H]; forward, null where x is not saved
    char* home_rows;        // [T K, H] in this rank's window; rank r's lies (r - rank) * window_stride behind
    char* shared_rows;      // [T, H]: y or dx of the shared expert
    int64_t window_stride;  // bytes
    int32_t rank;
    float limit;  // of the clamped activations
    ptx::WaitLimits limits;
    TaskSpans spans;
};

namespace moe_detail {

using namespace sm90;
using schedule::Counter;
using schedule::TaskKind;

/// TileTask::flags: this bit is both kernels'; from kWaitedShift on: 1 + the counter that was waited for.
inline constexpr int32_t kShared = 1;
inline constexpr int32_t kWaitedShift = 16;

MOK_DEVICE bool is_shared(const TileTask& task) {
    return (task.flags & kShared) != 0;
}
MOK_DEVICE bool is_kind(const TileTask& task, TaskKind kind) {
    return task.kind == static_cast<int32_t>(kind);
}
/// Width of the task's expert: I or J.
MOK_DEVICE int32_t inner_of(const MoeCallParams& params, const TileTask& task) {
    const schedule::ScheduleSizes& sizes = params.shape.sizes;
    return static_cast<int32_t>(is_shared(task) ? sizes.shared_intermediate : sizes.intermediate);
}
MOK_DEVICE int32_t hidden_of(const MoeCallParams& params) {
    return static_cast<int32_t>(params.shape.sizes.hidden);
}
/// K steps of so many columns or rows.
MOK_DEVICE int32_t steps_of(int32_t depth) {
    return ceil_div(depth, static_cast<int32_t>(kTileK));
}
/// Where row block `block` lies in the ring.
MOK_DEVICE int32_t ring_row(const schedule::ScheduleShape& shape, int32_t block) {
    return block % shape.ring_blocks * shape.block_m;
}

MOK_DEVICE ptx::Deadline deadline_at(const MoeCallParams& params, WaitPlace place) {
    return ptx::Deadline(params.limits, static_cast<uint32_t>(place));
}

// ---- runs

/// The last run at or behind `hint` that begins at or before `index`, `begin` being one of Run's. The whole
/// warp looks at 32 runs at a time, because each look goes to L2: every acquire empties L1.
template <int64_t schedule::Run::*kBegin>
MOK_DEVICE int32_t find_run(const schedule::Table& table, int64_t index, int32_t hint, uint32_t lane) {
    for (;;) {
        const int32_t run = hint + 1 + static_cast<int32_t>(lane);
        const bool is_before = run < table.num_runs && table.runs[run].*kBegin <= index;
        const uint32_t before = ptx::popcount(ptx::ballot(is_before));
        hint += static_cast<int32_t>(before);
        if (before < ptx::kWarpThreads) return hint;
    }
}

// ---- counters

/// One value of a counter.
MOK_DEVICE uint32_t* counter_address(const MoeCallParams& params, const schedule::Table& table,
                                     Counter counter, int32_t index) {
    int64_t begin = static_cast<int32_t>(counter < Counter::kSpanRead ? counter : Counter::kSpanRead) *
                    schedule::counter_size(params.shape, table, Counter::kX);
    if (counter == Counter::kAccumulator) begin += table.num_spans();
    return params.call.counters + begin + index;
}

MOK_DEVICE uint32_t* counter_address(const MoeCallParams& params, Counter counter, int32_t index) {
    return counter_address(params, *params.call.table, counter, index);
}

// ---- where the rows of a task come from and go to

/// The route of a row of the plan.
struct Route {
    int32_t peer, slot;
};
MOK_DEVICE Route route_of(const MoeCallParams& params, int64_t row) {
    return {ptx::load_global(params.call.row_peer + row), ptx::load_global(params.call.row_slot + row)};
}

/// What lies at `own` in this rank's window, in `peer`'s.
template <typename T>
MOK_DEVICE T* in_window(const MoeCallParams& params, T* own, int32_t peer) {
    const int64_t offset = static_cast<int64_t>(peer - params.rank) * params.window_stride;
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(own) + static_cast<uintptr_t>(offset));
}

inline constexpr uint32_t kLaneRows = kPartRows / ptx::kWarpThreads;

/// Where a valid row of a task goes.
MOK_DEVICE char* home_of(const MoeCallParams& params, const TileTask& task, uint32_t row) {
    const int64_t row_bytes = params.shape.sizes.row_bytes;
    const int64_t at = static_cast<int64_t>(task.row_block) * kTileM + row;
    if (is_shared(task)) return params.shared_rows + at * row_bytes;
    const Route route = route_of(params, at);
    return in_window(params, params.home_rows, route.peer) + route.slot * row_bytes;
}

/// Where the address lies to which a staged row goes: behind the row.
MOK_DEVICE uint32_t staged_home(const Shared& shared, uint32_t part, uint32_t row) {
    return shared.staging(part) + row * kStagedRowBytes + 2 * kTileN;
}
static_assert(kStagedRowBytes >= 2 * kTileN + sizeof(uint64_t) && kStagedRowBytes % sizeof(uint64_t) == 0);

/// The store warp leaves itself where the tile's columns of its valid rows go, because one lane stores them
/// all. Nobody writes there before the tile's buffers are given back.
MOK_DEVICE void stage_homes(const MoeCallParams& params, const Shared& shared, const TileTask& task,
                            uint32_t lane) {
#pragma unroll 1  // or the warp's registers do not suffice
    for (uint32_t part = 0; part < task.parts(); ++part) {
        char* home[kLaneRows];  // all loads are in flight before the first is used
#pragma unroll
        for (uint32_t i = 0; i < kLaneRows; ++i) {
            const uint32_t row = part * kPartRows + i * ptx::kWarpThreads + lane;
            home[i] = static_cast<int32_t>(row) < task.valid_rows ? home_of(params, task, row) : nullptr;
        }
#pragma unroll
        for (uint32_t i = 0; i < kLaneRows; ++i) {
            if (home[i] == nullptr) continue;
            const auto to = reinterpret_cast<uint64_t>(home[i] + 2 * static_cast<int64_t>(task.column));
            ptx::store_shared(staged_home(shared, part, i * ptx::kWarpThreads + lane), to);
        }
    }
    ptx::sync_warp();
}

/// A part's staged rows of H columns, as far as the matrix is wide, to where stage_homes says: one lane
/// issues all, 12 cycles each.
MOK_DEVICE void store_rows(const MoeCallParams& params, const Shared& shared, const TileTask& task,
                           uint32_t part) {
    const int64_t columns = params.shape.sizes.hidden - task.column;
    const uint32_t bytes = 2 * static_cast<uint32_t>(columns < kTileN ? columns : kTileN);
    const int32_t left = task.valid_rows - static_cast<int32_t>(part * kPartRows);
    const uint32_t rows = left < static_cast<int32_t>(kPartRows) ? static_cast<uint32_t>(left) : kPartRows;
    if (ptx::elect_one()) {
#pragma unroll 8
        for (uint32_t row = 0; row < rows; ++row) {
            const uint64_t to = ptx::load_shared<uint64_t>(staged_home(shared, part, row));
            ptx::bulk_store(reinterpret_cast<void*>(to), shared.staging(part) + row * kStagedRowBytes, bytes);
        }
    }
}

// ---- the time line

/// One thread of the block, when the operands of a tile are there; nothing stays in registers until its end.
MOK_DEVICE void record_start(const MoeCallParams& params, const TileTask& task, int32_t steps) {
    if (task.id >= params.spans.num_tasks) return;
    TaskSpan& span = params.spans.tasks[task.id];
    ptx::store_global(&span.kind, task.kind);
    ptx::store_global(&span.shared, task.flags & kShared);
    ptx::store_global(&span.cta, static_cast<int32_t>(ptx::block_idx()));
    ptx::store_global(&span.row_block, task.row_block);
    ptx::store_global(&span.column, task.column);
    ptx::store_global(&span.waited_for, (task.flags >> kWaitedShift) - 1);
    ptx::store_global(&span.rows, task.valid_rows);
    ptx::store_global(&span.steps, steps);
    ptx::store_global(&span.start, ptx::timer_ns());
    ptx::store_global(&span.start_cycles, ptx::clock_cycles());
}

MOK_DEVICE void record_end(const MoeCallParams& params, const TileTask& task) {
    if (task.id >= params.spans.num_tasks) return;
    TaskSpan& span = params.spans.tasks[task.id];
    ptx::store_global(&span.end, ptx::timer_ns());
    ptx::store_global(&span.end_cycles, ptx::clock_cycles());
}

}  // namespace moe_detail

}  // namespace mok
