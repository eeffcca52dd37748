// The memory in which an emulated call leaves its time line, as mok.trace would give it.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>

#include "csrc/bindings/emulator/session.h"
#include "csrc/launch/call_stamp.h"

namespace mok::emulator {

class TraceMemory {
  public:
    /// `arrays["trace"]`: uint8 [1 + tasks + pulls, 64], CallStamps and then TaskSpans, of which
    /// "trace_tasks" are for tasks. Without it the call is not traced.
    TraceMemory(Session& session, const pybind11::dict& arrays, int rank) {
        if (!arrays.contains("trace")) return;
        const pybind11::array array = arrays["trace"].cast<pybind11::array>();
        const int64_t tasks = arrays["trace_tasks"].cast<int64_t>();
        stamps_ = static_cast<CallStamps*>(session.add("trace", array, kOutput, rank));
        TaskSpan* first = reinterpret_cast<TaskSpan*>(stamps_ + 1);
        spans_ = {first, first + tasks, tasks, array.shape(0) - 1 - tasks};
    }

    const TaskSpans& spans() const { return spans_; }

    void stamp(CallMoment moment, const schedule::ScheduleShape& shape, const schedule::PreparedCall* call,
               void* stream) const {
        if (stamps_ != nullptr) launch::launch_call_stamp(stamps_, moment, shape, call, stream);
    }

  private:
    CallStamps* stamps_ = nullptr;
    TaskSpans spans_{};
};

}  // namespace mok::emulator
