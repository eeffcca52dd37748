// The backward megakernel's parameters from what a call gives. For .cu files.
#pragma once

#include "csrc/kernels/sm90_bf16_moe_backward_params.cuh"
#include "csrc/launch/sm90_bf16_maps.h"
#include "csrc/launch/sm90_bf16_moe_backward.h"
#include "csrc/layout/check.h"

namespace mok::launch {

namespace moe_backward_params_detail {

constexpr int64_t kElementBytes = 2, kFloatBytes = 4;

// The kernel's tiles are the schedule's.
constexpr bool fits_kernel(const schedule::KernelConfig& config) {
    return config.arch != schedule::Arch::kSm90 ||
           (config.block_m == sm90::kTileM && 2 * config.gate_up_n == sm90::kTileN &&
            config.dhidden_n == sm90::kTileN && config.dx_n == sm90::kTileN &&
            config.wgrad_m == sm90::kTileM && config.wgrad_n == sm90::kTileN &&
            config.bias_n == sm90::kTileN && config.rows_per_store == sm90::kPartRows &&
            config.pull_bytes == sm90::kPullSlotBytes);
}
constexpr bool all_fit_kernel() {
    for (const schedule::KernelConfig& config : schedule::kConfigs) {
        if (!fits_kernel(config)) return false;
    }
    return true;
}
static_assert(all_fit_kernel(), "a row of kConfigs has tiles that the sm_90 kernels do not");

inline MoeBackwardExperts expert_maps(const char* const (&names)[3], const MoeExpertViews& views,
                                      int64_t experts, int64_t hidden, int64_t inner) {
    check_weights(names[0], views.gate, experts, inner, hidden);
    check_weights(names[1], views.up, experts, inner, hidden);
    check_weights(names[2], views.down, experts, hidden, inner);
    MoeBackwardExperts result{};
    result.gate_rows = weight_map(views.gate);
    result.up_rows = weight_map(views.up);
    result.gate = weight_map(views.gate, sm90::kTileK);
    result.up = weight_map(views.up, sm90::kTileK);
    result.down = weight_map(views.down, sm90::kTileK);
    const auto bias = [](const BiasView& view, const bf16*& data, int64_t& stride) {
        data = static_cast<const bf16*>(view.data);
        stride = view.expert_stride / kElementBytes;
    };
    bias(views.b_gate, result.b_gate, result.b_gate_stride);
    bias(views.b_up, result.b_up, result.b_up_stride);
    bias(views.b_down, result.b_down, result.b_down_stride);
    return result;
}

/// Rows and columns of a matrix of an expert set.
struct MatrixSize {
    int64_t rows, columns;
};
inline MatrixSize matrix_size(int32_t matrix, int64_t hidden, int64_t inner) {
    if (matrix == schedule::kDown) return {hidden, inner};
    return {inner, hidden};
}

/// Of one set: `first` is the set's first bit of the schedule's gradients.
inline MoeGradients gradient_maps(const MoeGradientViews& views, int64_t wanted, int64_t first,
                                  int64_t experts, int64_t hidden, int64_t inner, bool has_biases) {
    MoeGradients result{};
    for (int32_t m = 0; m < schedule::kNumMatrices; ++m) {
        const MatrixSize size = matrix_size(m, hidden, inner);
        const bool has_weight = (wanted & first << m) != 0;
        const bool has_bias = has_biases && (wanted & first << (schedule::kNumMatrices + m)) != 0;
        const GradientView &weight = views.weights[m], &bias = views.biases[m];
        MOK_CHECK((!has_weight || weight.data != nullptr) && (!has_bias || bias.data != nullptr), "gradient ",
                  m, " is wanted but has no memory.");
        if (has_weight) result.weight[m] = gradient_map(weight, experts, size.rows, size.columns);
        if (has_bias) {
            result.bias[m] = bias.data;
            result.bias_stride[m] = bias.expert_stride / (bias.is_float32 ? kFloatBytes : kElementBytes);
        }
        if (weight.is_float32) result.float32 |= 1u << m;
        if (bias.is_float32) result.float32 |= 1u << (schedule::kNumMatrices + m);
    }
    return result;
}

inline MoeAccumulators accumulator_maps(float* memory, int64_t hidden, int64_t inner) {
    MoeAccumulators result{};
    if (memory == nullptr) return result;
    for (int32_t m = 0; m < schedule::kNumMatrices; ++m) {
        const MatrixSize size = matrix_size(m, hidden, inner);
        const int64_t bytes = size.rows * size.columns * kFloatBytes;
        const GradientView view{memory, true, bytes, size.columns * kFloatBytes};
        result.weight[m] = gradient_map(view, 1, size.rows, size.columns);
        memory += size.rows * size.columns;
    }
    for (int32_t m = 0; m < schedule::kNumMatrices; ++m) {
        result.bias[m] = memory;
        memory += matrix_size(m, hidden, inner).rows;
    }
    return result;
}

}  // namespace moe_backward_params_detail

/// Throws std::invalid_argument.
inline MoeBackwardParams moe_backward_params(const MoeBackward& backward) {
    using namespace moe_backward_params_detail;
    const schedule::ScheduleSizes& sizes = backward.shape.sizes;
    const int64_t hidden = sizes.hidden, inner = sizes.intermediate, shared = sizes.shared_intermediate;
    MOK_CHECK(sizes.pass == schedule::Pass::kBackward, "the backward kernel was given a forward schedule.");
    MOK_CHECK(hidden % 8 == 0 && inner % 8 == 0 && shared % 8 == 0, "hidden_size = ", hidden,
              ", intermediate_size = ", inner, ", shared_intermediate_size = ", shared,
              ": the GPU kernels need multiples of 8; pad the weights.");
    MoeBackwardParams params{};
    params.shape = backward.shape;
    params.call = backward.call;
    params.ring_x = static_cast<char*>(backward.ring_x);
    params.ring_dout = static_cast<char*>(backward.ring_dout);
    params.home_rows = static_cast<char*>(backward.home_rows);
    params.shared_rows = static_cast<char*>(backward.shared_rows);
    params.window_stride = backward.window_stride;
    params.rank = backward.rank;
    params.limit = backward.limit;
    params.limits = backward.limits;
    params.spans = backward.spans;
    const auto rows = [](const void* base, int64_t count, int64_t columns) {
        return row_map(base, count, columns, columns * kElementBytes);
    };
    params.experts[0] =
        expert_maps({"w_gate", "w_up", "w_down"}, backward.routed, sizes.num_local_experts, hidden, inner);
    MoeBackwardRows& routed = params.rows[0];
    routed.x = rows(backward.ring_x, sizes.ring_rows, hidden);
    routed.dout = rows(backward.ring_dout, sizes.ring_rows, hidden);
    routed.gate = rows(backward.ring_gate, sizes.ring_rows, inner);
    routed.up = rows(backward.ring_up, sizes.ring_rows, inner);
    routed.dgate = rows(backward.ring_dgate, sizes.ring_rows, inner);
    routed.dup = rows(backward.ring_dup, sizes.ring_rows, inner);
    routed.hidden = rows(backward.ring_hidden, sizes.ring_rows, inner);
    routed.weight_partials = backward.ring_partials;
    params.saved_x = rows(backward.saved_x, backward.save_rows, hidden);
    params.saved_gate = rows(backward.saved_gate, backward.save_rows, inner);
    params.saved_up = rows(backward.saved_up, backward.save_rows, inner);
    params.gradients[0] = gradient_maps(backward.routed_gradients, sizes.gradients, schedule::kGradientRouted,
                                        sizes.num_local_experts, hidden, inner, true);
    if (shared > 0) {
        params.experts[1] = expert_maps({"shared w_gate", "shared w_up", "shared w_down"}, backward.shared, 1,
                                        hidden, shared);
        MoeBackwardRows& own = params.rows[1];
        own.x = row_map(backward.x, sizes.num_tokens, hidden, backward.x_stride);
        own.dout = row_map(backward.dout, sizes.num_tokens, hidden, backward.dout_stride);
        own.gate = rows(backward.shared_gate, sizes.num_tokens, shared);
        own.up = rows(backward.shared_up, sizes.num_tokens, shared);
        own.dgate = rows(backward.shared_dgate, sizes.num_tokens, shared);
        own.dup = rows(backward.shared_dup, sizes.num_tokens, shared);
        own.hidden = rows(backward.shared_hidden, sizes.num_tokens, shared);
        own.weight_partials = backward.shared_partials;
        params.gradients[1] = gradient_maps(backward.shared_gradients, sizes.gradients,
                                            schedule::kGradientShared, 1, hidden, shared, false);
    }
    params.accumulators = accumulator_maps(backward.accumulators, hidden, inner);
    params.accumulate = backward.accumulate;
    params.row_weights = backward.ring_weights;
    params.weights = backward.weights;
    params.home_weight_grads = backward.home_weight_grads;
    params.shared_weight = backward.shared_weight;
    params.shared_weight_grads = backward.shared_weight_grads;
    return params;
}

}  // namespace mok::launch
