#include "csrc/launch/call_trace.h"

#include <algorithm>
#include <stdexcept>

#include "csrc/schedule/table.h"

namespace mok::launch {

namespace {

constexpr int64_t kFairShares = 4;       // that a rank's routes are provided for
constexpr int64_t kElementsOfClaim = 4;  // most that a pull warp takes at a time

}  // namespace

void CallTrace::begin(void* memory, int64_t num_entries, int device) {
    const std::lock_guard lock(mutex_);
    if (is_on_) throw std::logic_error("a trace is on already: end it before the next one begins.");
    memory_ = static_cast<TaskSpan*>(memory);
    num_entries_ = num_entries;
    used_ = 0;
    device_ = device;
    calls_.clear();
    untraced_ = {};
    is_on_ = true;
}

void CallTrace::end(std::vector<TracedCall>& calls, Untraced& untraced) {
    const std::lock_guard lock(mutex_);
    if (!is_on_) throw std::logic_error("no trace is on.");
    is_on_ = false;
    calls = std::move(calls_);
    calls_.clear();
    untraced = untraced_;
}

CallStamps* CallTrace::take(TracedCall& call, const PlanShape& plan, const schedule::ScheduleShape& shape,
                            int device, bool is_captured) {
    const std::lock_guard lock(mutex_);
    if (!is_on_) return nullptr;
    if (is_captured || device != device_) {
        ++(is_captured ? untraced_.captured : untraced_.elsewhere);
        return nullptr;
    }
    const TraceEntries wanted = trace_entries(plan, shape);
    // The last call that finds room may find less than it wants: tasks first.
    const int64_t left = num_entries_ - used_ - 1;
    if (left <= 0) {
        ++untraced_.no_room;
        return nullptr;
    }
    call.first = used_;
    call.num_tasks = std::min(wanted.tasks, left);
    call.num_pulls = std::min(wanted.pulls, left - call.num_tasks);
    used_ += 1 + call.num_tasks + call.num_pulls;
    calls_.push_back(call);
    return reinterpret_cast<CallStamps*>(memory_ + call.first);
}

CallTrace& call_trace() {
    static CallTrace trace;
    return trace;
}

TraceEntries trace_entries(const PlanShape& plan, const schedule::ScheduleShape& shape) {
    const int64_t fair = plan.max_tokens * plan.top_k + plan.num_local_experts() * plan.pad;
    const int64_t rows = std::min(worst_case_rows(plan), kFairShares * fair);
    const int64_t blocks = ceil_div<int64_t>(rows, shape.block_m);
    TraceEntries entries{0, 0};
    int64_t pulled = 0;
    for (int32_t k = 0; k < shape.num_phases; ++k) {
        const schedule::PhaseRule& rule = shape.phases[k];
        entries.tasks += blocks * shape.routed.per_block(rule.phase) + shape.shared_tasks(k);
        using schedule::Pulled;
        if (rule.pulls_first != Pulled::kNone || rule.pulls_later != Pulled::kNone) pulled += rows;
    }
    // Spans that gradients sum over, and idle experts.
    const int64_t spans = schedule::table_capacity(shape, rows).pieces;
    entries.tasks += spans * shape.routed.span_tiles() + shape.shared.span_tiles();
    // A short list is claimed in smaller batches: fewer than four elements for every CTA.
    entries.pulls = pulled * shape.pull_pieces / kElementsOfClaim + kElementsOfClaim * shape.sizes.num_sms;
    return entries;
}

}  // namespace mok::launch
