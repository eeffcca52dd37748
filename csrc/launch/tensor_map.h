// Tensor maps for TMA, made by the driver's encoder, which is found at run time: nothing links libcuda.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace mok::launch {

/// A dense tensor of up to 3 dimensions, innermost first, and the box that one copy moves.
struct TensorMapSpec {
    CUtensorMapDataType dtype;
    uint32_t element_bytes;
    uint32_t rank;             // 2 or 3
    void* base;                // 16-byte aligned
    uint64_t sizes[3];         // elements
    uint64_t stride_bytes[2];  // of dimensions 1 and 2; multiples of 16
    uint32_t box[3];           // elements, at most 256 each
    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_NONE;
};

/// Throws CudaError with the numbers that the driver refused.
CUtensorMap make_tensor_map(const TensorMapSpec& spec);

}  // namespace mok::launch
