// Builds the plan on the device.
#pragma once

#include <cstdint>

#include "csrc/layout/plan.h"
#include "csrc/ptx/wait_record.h"

namespace mok::launch {

/// Where the ranks' ids and token counts lie, all of it readable by this device: windows of the symmetric
/// heap, or one array with a row per rank.
struct PlanInputs {
    const void* ids;  // int32 [T_r * K] of rank r at r * ids_stride bytes
    int64_t ids_stride;
    const void* num_tokens;  // int64 T_r, at most max_tokens, at r * tokens_stride bytes
    int64_t tokens_stride;
};

/// The same arrays as Plan of csrc/layout/plan_host.h; rows behind segment_begin[E_local] are left alone.
struct PlanOutputs {
    int32_t* row_peer;       // [worst_case_rows(shape)]
    int32_t* row_slot;       // [worst_case_rows(shape)]
    int64_t* segment_begin;  // [E_local + 1]
    int64_t* counts;         // [E_local]
};

/// Device memory that launch_plan needs besides, zero before its first use on a stream.
int64_t plan_scratch_bytes(const PlanShape& shape);

/// Launches on `stream` (a cudaStream_t) and returns at once. Token counts and ids are read on the device, so
/// a captured launch is right for every routing. Throws std::invalid_argument where the shape does not fit,
/// and CudaError.
void launch_plan(const PlanShape& shape, const PlanInputs& inputs, const PlanOutputs& outputs, void* scratch,
                 const ptx::WaitLimits& limits, void* stream);

}  // namespace mok::launch
