// What all test kernels of csrc/ptx take.
#pragma once

#include "csrc/ptx/ptx.h"

namespace mok {

struct PtxTestParams {
    const void* in[2];
    void* out[2];
    int64_t numbers[4];
    ptx::WaitLimits limits;

    MOK_DEVICE void put(uint32_t buffer, uint32_t index, uint32_t value) const {
        ptx::store_global(static_cast<uint32_t*>(out[buffer]) + index, value);
    }
    MOK_DEVICE uint32_t get(uint32_t buffer, uint32_t index) const {
        return ptx::load_global(static_cast<const uint32_t*>(in[buffer]) + index);
    }
};

}  // namespace mok
