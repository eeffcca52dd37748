// What a layer's workspace holds on a GPU, by the functions that place it, before anything is allocated.
#pragma once

#include <cstdint>

#include "csrc/layout/call_header.h"

namespace mok::launch {

/// Bytes of one rank. The sum is what is allocated, but for tensors in the heap's arena.
struct DeviceMemory {
    int64_t inputs;     // several ranks: ids, weights, x and dout in the window
    int64_t home_rows;  // [max_tokens * K, H]
    int64_t flags;      // control block and router gradients in the window, its rounding to 2 MiB
    int64_t plan;       // arrays of the preparation
    int64_t rows;       // ring, shared expert, partial sums, accumulators: the larger of forward and backward
    int64_t rounding;   // of the temporaries to 2 MiB
};

/// `header`: settings as in a backward that asks for the gradients of its mask, with num_tokens = max_tokens.
/// `multiprocessors`: of the GPU. Throws std::invalid_argument for sizes that the kernels do not take.
DeviceMemory device_memory(const CallHeader& header, int32_t num_ranks, uint32_t multiprocessors);

}  // namespace mok::launch
