// The type of a tensor map: 128 bytes that only its maker and TMA read. On the host that emulates the kernels
// no CUDA header is needed.
#pragma once

#if defined(__CUDACC__)
#include <cuda.h>
#else
#include <cstdint>
#endif

namespace mok::ptx {

#if defined(__CUDACC__)
using TensorMap = CUtensorMap;
#else
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};
#endif

}  // namespace mok::ptx
