// What a megakernel built to record its time line leaves for each task and each batch of pulls.
#pragma once

#include <cstdint>

namespace mok {

/// Times in nanoseconds of the device's clock. An entry that was not recorded keeps what the host put there.
struct TaskSpan {
    int32_t kind;    // schedule::TaskKind; kPullSpan
    int32_t shared;  // 1: of the shared expert
    int32_t cta;
    int32_t row_block;
    int32_t column;      // first column of the tile
    int32_t waited_for;  // schedule::Counter that the task's operands were waited for last; -1: none
    uint64_t start;      // its first operands are there; before it the CTA had no tile to work on
    uint64_t end;        // its results are staged
};
constexpr int32_t kPullSpan = 100;

struct TaskSpans {
    TaskSpan* tasks;               // by index of the order
    TaskSpan* pulls;               // by pull-list index of a batch's first element, divided by 4
    int64_t num_tasks, num_pulls;  // entries there are; what comes later is not recorded
};

}  // namespace mok
