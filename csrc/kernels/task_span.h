// What a call that is traced leaves for each task, each batch of pulls, and between its kernels.
#pragma once

#include <cstdint>

namespace mok {

/// Times in nanoseconds of the device's clock, cycles of the multiprocessor's own, whose rate changes with
/// the card's power. An entry that was not recorded keeps what the host put there.
struct TaskSpan {
    int32_t kind;    // schedule::TaskKind; kPullSpan
    int32_t shared;  // 1: of the shared expert
    int32_t cta;
    int32_t row_block;
    int32_t column;      // first column of the tile; of a pull: how many elements
    int32_t waited_for;  // schedule::Counter that the task's operands were waited for last; -1: none
    int32_t rows;        // of the tile's 128 those that count
    int32_t steps;       // of its product, 64 of K each; 0: none
    uint64_t start;      // its first operands are there; before it the CTA had no tile to work on
    uint64_t end;        // its results are staged
    uint64_t start_cycles, end_cycles;  // of a pull: not recorded
};
constexpr int32_t kPullSpan = 100;

struct TaskSpans {
    TaskSpan* tasks;  // by index of the order
    TaskSpan* pulls;  // by claim: index of the batch's first element, divided by a claim's elements
    int64_t num_tasks, num_pulls;  // entries there are; what comes later is not recorded
};

/// Moments of a call on its stream.
enum class CallMoment : int32_t { kBegin, kPrepared, kComputed, kMet, kEnd };
constexpr int32_t kNumCallMoments = 5;

/// In front of a call's spans, as long as one.
struct CallStamps {
    uint64_t moments[kNumCallMoments];  // nanoseconds
    int64_t num_tasks, num_pulls;       // of the call's table: elements of the pull list, not batches
    int64_t unused;
};
static_assert(sizeof(CallStamps) == 64 && sizeof(TaskSpan) == sizeof(CallStamps));

}  // namespace mok
