// Which calls of this process are traced, and where each leaves its time line. The host's half: it touches no
// device, so it is tested without one.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "csrc/kernels/task_span.h"
#include "csrc/layout/call_header.h"
#include "csrc/layout/plan.h"
#include "csrc/schedule/shape.h"

namespace mok::launch {

/// One recorded call. Its entries of the trace's memory: the stamps, then tasks, then pulls.
struct TracedCall {
    CallHeader header;
    int32_t rank, num_ranks;
    int32_t num_ctas;
    int64_t first;  // entry of the stamps
    int64_t num_tasks, num_pulls;
};

/// Calls of a trace that left nothing.
struct Untraced {
    int64_t captured;   // into a CUDA graph, which may outlive the memory
    int64_t no_room;    // the memory was full
    int64_t elsewhere;  // on another device
};

class CallTrace {
  public:
    /// `memory` holds `num_entries` of 64 bytes on `device` until end(). Throws std::logic_error when a trace
    /// is on.
    void begin(void* memory, int64_t num_entries, int device);
    /// Throws std::logic_error when none is on.
    void end(std::vector<TracedCall>& calls, Untraced& untraced);

    bool is_on() const { return is_on_.load(std::memory_order_relaxed); }

    /// Memory for a call, from its stamps on; fills in `call`'s entries. Null: the call is not traced.
    CallStamps* take(TracedCall& call, const PlanShape& plan, const schedule::ScheduleShape& shape,
                     int device, bool is_captured);

  private:
    std::atomic<bool> is_on_ = false;
    std::mutex mutex_;
    TaskSpan* memory_ = nullptr;
    int64_t num_entries_ = 0, used_ = 0;
    int device_ = -1;
    std::vector<TracedCall> calls_;
    Untraced untraced_{};
};

/// The process's.
CallTrace& call_trace();

/// Entries that a call fills: of tasks and of batches of pulls. Of more ranks than a few, routing that sends
/// far more than a fair share here is not provided for: what lies behind the entries is not recorded.
struct TraceEntries {
    int64_t tasks, pulls;
};
TraceEntries trace_entries(const PlanShape& plan, const schedule::ScheduleShape& shape);

}  // namespace mok::launch
