// What the simulator knows of a rank before it runs: schedule, decoded tasks, final counters, and how often
// each row block of each buffer is written and read.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/schedule/host_schedule.h"
#include "csrc/schedule/sim_types.h"

namespace mok::schedule {

/// Buffers of routed rows. kHidden is h forward; dg, du, h' and partial router gradients backward.
enum Buffer : int32_t {
    kBufferX = 0,
    kBufferDout = 1,
    kBufferGateUp = 2,
    kBufferHidden = 3,
    kNumBuffers = 4
};

/// Bits over Buffer that a task reads and writes; the shared expert's x and dout are inputs and not counted.
struct Access {
    int32_t reads, writes;
};
Access task_access(const ScheduleShape& shape, const Task& task);

/// A buffer's row blocks: where each lies, and the accesses of each over the call.
struct BufferModel {
    int32_t shared_blocks = 0;
    int32_t saved_blocks = 0;  // of the first chunk, where the saved context holds them
    int32_t ring_blocks = 0;
    bool saved_is_given = false;  // the saved context was filled by an earlier call
    bool shared_is_given = false;
    std::vector<int32_t> writes, reads;  // [shared + routed blocks]; writes in stored parts or pulled pieces

    int32_t num_slots() const { return shared_blocks + saved_blocks + ring_blocks; }
    bool given(bool shared, int32_t block) const {
        return shared ? shared_is_given : (saved_is_given && block < saved_blocks);
    }
    int32_t slot(bool shared, int32_t block) const {
        if (shared) return block;
        if (block < saved_blocks) return shared_blocks + block;
        return shared_blocks + saved_blocks + block % ring_blocks;
    }
};

struct RankModel {
    RankModel(const SimProblem& problem, int32_t rank, const Bug& bug);

    const ScheduleShape& shape() const { return schedule->shape(); }
    const Table& table() const { return schedule->table(); }
    int64_t counter(Counter counter, int32_t index) const {
        return layout.begin[static_cast<int32_t>(counter)] + index;
    }

    int32_t rank;
    std::unique_ptr<HostSchedule> schedule;
    PullUnits units;
    std::vector<Task> tasks;
    std::vector<int8_t> parts;  // of each task
    std::vector<PullElement> pulls;
    std::vector<int32_t> order;  // claim -> task; empty: the same
    CounterLayout layout;
    std::vector<int32_t> finals;
    BufferModel buffers[kNumBuffers];
    std::vector<int32_t> gradient_parts;  // [(E_local + 1) * span tiles], the shared expert last
    int32_t gradient_stride = 0;
    int32_t home_tiles = 0;  // stores to each slot of a home rank's return buffer
    bool sends_router_gradient = false;
    std::vector<SimError> errors;  // tiles that the task list misses or repeats

  private:
    void set_buffers(const Bug& bug);
    void count_accesses();
    void check_coverage();
};

}  // namespace mok::schedule
