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

/// BF16 [experts, columns]; null: none.
struct BiasView {
    const void* data = nullptr;
    int64_t expert_stride = 0;  // bytes
};

/// Gate, up [experts, inner, H], down [experts, H, inner]; the shared expert is a set of one.
struct MoeExpertViews {
    WeightView gate, up, down;
    BiasView b_gate, b_up, b_down;
};

/// Where a weight's or bias's gradient goes: as the weight, in FP32 or BF16. Null: not wanted.
struct GradientView {
    void* data = nullptr;
    bool is_float32 = false;
    int64_t expert_stride = 0, row_stride = 0;  // bytes, multiples of 16
};

/// In the order of schedule::Matrix.
struct MoeGradientViews {
    GradientView weights[3];
    GradientView biases[3];
};

}  // namespace mok::launch
