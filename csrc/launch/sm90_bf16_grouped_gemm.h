// A grouped GEMM of csrc/gemm's pieces alone, for tests and benchmarks.
#pragma once

#include <cstdint>

#include "csrc/launch/weight_view.h"
#include "csrc/ptx/wait_record.h"

namespace mok::launch {

/// y[r] = rn(x[r] W_e^T) for the rows r of segment e. Everything BF16; addresses and strides are multiples of
/// 16 bytes.
struct GroupedGemm {
    const void* x;       // [rows, K]
    WeightView weights;  // [experts, N, K]
    void* y;             // [rows, N]; rows that only pad a segment may be written
    int64_t rows;
    int64_t x_stride, y_stride;    // bytes
    const int64_t* segment_begin;  // device, [experts + 1]: multiples of 128, the last one at most `rows`
    const int64_t* counts;         // device, [experts]: valid rows, at least 1 in each segment with rows
    uint64_t* claim;               // device, 0; it is 0 again when the kernel ends
};

/// On `stream` (a cudaStream_t); returns at once. Throws std::invalid_argument and CudaError.
void launch_sm90_bf16_grouped_gemm(const GroupedGemm& gemm, const ptx::WaitLimits& limits, void* stream);

}  // namespace mok::launch
