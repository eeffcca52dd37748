// Expert weights as a layer's caller has them.
#pragma once

#include <cstdint>

namespace mok::launch {

/// BF16 [experts, rows, columns] with contiguous columns; strides in bytes, multiples of 16. Packed, separate
/// and row-interleaved matrices differ in their strides alone.
struct WeightView {
    const void* data = nullptr;
    int64_t experts = 0, rows = 0, columns = 0;
    int64_t expert_stride = 0, row_stride = 0;
};

}  // namespace mok::launch
