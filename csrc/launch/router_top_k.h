// A router's choice of experts on the device.
#pragma once

#include <cstdint>

namespace mok::launch {

/// ids[t] = the top_k experts with the largest scores[t] + bias, of equal ones the lowest id first. A NaN is
/// ordered by its bits: what is no number on a GPU comes first.
struct RouterTopK {
    const float* scores;  // [tokens, experts], contiguous
    const float* bias;    // [experts]; nullptr: none
    int64_t* ids;         // [tokens, top_k], contiguous
    int64_t tokens;       // 0 is allowed
    int64_t experts;
    int64_t top_k;  // 1 to 32, at most experts
};

/// Makes the kernel resident on the current device: a first choice may be captured.
void load_router_top_k();

/// Launches on `stream` (a cudaStream_t) and returns at once. Throws std::invalid_argument and CudaError.
void launch_router_top_k(const RouterTopK& choice, void* stream);

}  // namespace mok::launch
