// The ring of tasks of a block: the scheduler warp writes each task once, the loader, the store warp and the
// consumers read it.
#pragma once

#include "csrc/gemm/sm90_shared.cuh"

namespace mok::sm90 {

/// One tile of a result. What `kind` and `flags` mean is the kernel's; kExitTask ends all roles.
struct TileTask {
    int32_t kind;
    int32_t flags;
    int32_t valid_rows;  // of the tile's 128; at most 64: the second part has nothing to do
    int32_t expert;
    int32_t row_block;  // over all rows of the rank
    int32_t row;        // first row in the buffers that the tile reads and writes
    int32_t column;     // first column of the tile's result, or of its gate and its up half
    int32_t id;         // of the order, for time lines

    MOK_DEVICE uint32_t parts() const { return valid_rows > static_cast<int32_t>(kPartRows) ? 2 : 1; }
    MOK_DEVICE bool has_part(uint32_t part) const {
        return valid_rows > static_cast<int32_t>(part * kPartRows);
    }
};
static_assert(sizeof(TileTask) <= kTaskBytes);
inline constexpr int32_t kExitTask = -1;

// A kernel whose tasks need more fields derives from TileTask: `Task` below.

namespace task_detail {

template <typename Task>
MOK_DEVICE void write_slot(const Shared& shared, uint32_t slot, const Task& task) {
    constexpr uint32_t kWords = sizeof(Task) / 16;
    static_assert(sizeof(Task) <= kTaskBytes && sizeof(Task) % 16 == 0);
    ptx::Words4 words[kWords];
    memcpy(words, &task, sizeof(task));
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) ptx::store_shared(shared.task(slot) + 16 * i, words[i]);
}

template <typename Task>
MOK_DEVICE Task read_slot(const Shared& shared, uint32_t slot) {
    constexpr uint32_t kWords = sizeof(Task) / 16;
    Task task;
    ptx::Words4 words[kWords];
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
        words[i] = ptx::load_shared<ptx::Words4>(shared.task(slot) + 16 * i);
    }
    memcpy(&task, words, sizeof(task));
    return task;
}

template <typename Task>
MOK_DEVICE Task no_task() {
    Task task{};
    task.kind = kExitTask;
    return task;
}

}  // namespace task_detail

/// One thread of the scheduler, once: the first task before its operands are there, so that the loader can
/// begin with what is.
template <typename Task>
MOK_DEVICE void preview_task(const Shared& shared, const Task& task) {
    task_detail::write_slot(shared, kPreviewSlot, task);
    ptx::mbar_arrive(shared.preview());
}

/// What preview_task has left; kExitTask when the time is up.
template <typename Task = TileTask>
MOK_DEVICE Task read_preview(const Shared& shared, ptx::Deadline& deadline) {
    if (!ptx::mbar_wait(shared.preview(), 0, deadline)) return task_detail::no_task<Task>();
    return task_detail::read_slot<Task>(shared, kPreviewSlot);
}

/// One thread of the scheduler: the task in the cursor's slot, once all have read the one before.
template <typename Task>
MOK_DEVICE bool publish_task(const Shared& shared, TaskCursor& cursor, const Task& task,
                             ptx::Deadline& deadline) {
    if (!ptx::mbar_wait(shared.task_empty(cursor.slot), cursor.parity ^ 1, deadline)) return false;
    task_detail::write_slot(shared, cursor.slot, task);
    ptx::mbar_arrive(shared.task_full(cursor.slot));
    cursor.next();
    return true;
}

/// The next task in any number of lanes; kExitTask when the time is up. The caller frees its slot.
template <typename Task = TileTask>
MOK_DEVICE Task read_task(const Shared& shared, const TaskCursor& cursor, ptx::Deadline& deadline) {
    if (!ptx::mbar_wait(shared.task_full(cursor.slot), cursor.parity, deadline)) {
        return task_detail::no_task<Task>();
    }
    return task_detail::read_slot<Task>(shared, cursor.slot);
}

/// One thread.
MOK_DEVICE void free_task(const Shared& shared, TaskCursor& cursor) {
    ptx::mbar_arrive(shared.task_empty(cursor.slot));
    cursor.next();
}

/// A whole warp reads and frees the next task; all lanes get the same, kExitTask if one gave up.
template <typename Task = TileTask>
MOK_DEVICE Task take_task(const Shared& shared, TaskCursor& cursor, uint32_t lane, ptx::Deadline& deadline) {
    Task task = read_task<Task>(shared, cursor, deadline);
    if (ptx::any_lane(deadline.expired)) {
        deadline.expired = true;
        task.kind = kExitTask;
    }
    ptx::sync_warp();
    if (lane == 0) ptx::mbar_arrive(shared.task_empty(cursor.slot));
    cursor.next();
    return task;
}

/// The four warps of a part take the next task and agree on it: all leave when one has given up, because a
/// wgmma needs the four.
template <typename Task = TileTask>
MOK_DEVICE Task take_task_as_part(const Shared& shared, TaskCursor& cursor, uint32_t part, uint32_t lane,
                                  ptx::Deadline& deadline) {
    // Two words, because a fast warp may already be at the next task while a slow one looks at this.
    const uint32_t word = shared.give_up(part, cursor.slot % 2);
    Task task = take_task<Task>(shared, cursor, lane, deadline);
    if (lane == 0 && deadline.expired) ptx::red_relaxed_cta_shared_add(word, 1u);
    ptx::named_barrier_sync(static_cast<uint32_t>(NamedBarrier::kPart0) + part, ptx::kWarpgroupThreads);
    if (ptx::load_shared<uint32_t>(word) != 0) task.kind = kExitTask;
    return task;
}

}  // namespace mok::sm90
