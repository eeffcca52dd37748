// The time of a moment of a traced call.
#pragma once

#include <cstdint>

#include "csrc/kernels/task_span.h"
#include "csrc/schedule/prepared.h"

namespace mok::launch {

/// Makes the kernel resident on the current device.
void load_call_stamp();

/// Notes the time in `stamps` when `stream` (a cudaStream_t) gets there; with a `call`, which has been
/// prepared, its number of tasks and pulls as well. Throws CudaError.
void launch_call_stamp(CallStamps* stamps, CallMoment moment, const schedule::ScheduleShape& shape,
                       const schedule::PreparedCall* call, void* stream);

}  // namespace mok::launch
