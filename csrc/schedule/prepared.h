// What the preparation of a call leaves on the device for the megakernel: the part of a kernel's parameters
// that is known before the routing is. Counts that follow from the routing lie in device memory too, so the
// host never waits for them.
#pragma once

#include <cstdint>

#include "csrc/schedule/pull.h"

namespace mok::schedule {

/// One rank's inputs, as this rank addresses them: its own tensors or its window of the heap.
struct RankInputs {
    const char* x;     // row t at x + t * x_stride
    const char* dout;  // the same; backward only
    int64_t x_stride;  // bytes
    int64_t dout_stride;
    int64_t num_tokens;
};

/// Every pointer is device memory that stays valid until the next call of the workspace. All of it is written
/// in stream order before the megakernel starts, unless `expired` is set: then nothing here may be read, and
/// the kernel returns at once.
struct PreparedCall {
    const uint32_t* expired;  // non-zero: the workspace has ended
    const Table* table;       // its arrays and those of `units` are device memory
    const PullUnits* units;
    const RankInputs* ranks;  // [R]
    const int32_t* row_peer;  // [worst_case_rows], as Plan::row_peer
    const int32_t* row_slot;  // [worst_case_rows], as Plan::row_slot
    const int32_t* ids;       // [T * K] of this rank, -1: no route; what the weighted sum skips
    uint32_t* counters;       // zero; counter_layout(shape, *table) says where each begins
    uint32_t* task_claim;     // zero: the next task
    uint32_t* pull_claim;     // zero: the next element of the pull list
};

}  // namespace mok::schedule
