// The combine epilogue on the device.
#pragma once

#include <cstdint>

#include "csrc/layout/types.h"

namespace mok::launch {

/// out_t = rn(w_s y_s + w_0 y_0 + ... + w_{K-1} y_{K-1}), summed in FP32 in that order, rounded once.
/// Row starts are 16-byte aligned and strides multiples of 16 bytes.
struct WeightedSum {
    DType dtype;
    int64_t tokens;  // 0 is allowed
    int64_t top_k;
    int64_t hidden;              // a multiple of 8
    const void* rows;            // [tokens * top_k, hidden], row stride rows_stride bytes
    const void* shared_rows;     // [tokens, hidden]; nullptr: no shared expert
    const float* shared_weight;  // [tokens]; nullptr: 1
    const int32_t* ids;          // [tokens * top_k]; negative: no route, its row and weight are not used
    const float* weights;        // [tokens * top_k]; nullptr: 1, as for dx
    void* out;                   // [tokens, hidden]
    int64_t rows_stride;
    int64_t shared_stride;
    int64_t out_stride;
    const uint32_t* expired = nullptr;  // WaitLimits::expired: once set, nothing is read or written
};

/// Makes the kernels resident on the current device.
void load_weighted_sum();

/// Launches on `stream` (a cudaStream_t) and returns at once. Throws std::invalid_argument and CudaError.
void launch_weighted_sum(const WeightedSum& sum, void* stream);

}  // namespace mok::launch
