// The forward megakernel's parameters from what a call gives. For .cu files.
#pragma once

#include "csrc/kernels/sm90_bf16_moe_params.cuh"
#include "csrc/launch/sm90_bf16_maps.h"
#include "csrc/launch/sm90_bf16_moe_forward.h"
#include "csrc/layout/check.h"

namespace mok::launch {

namespace moe_forward_detail {

constexpr int64_t kElementBytes = 2;

// The kernel's tiles are the schedule's.
constexpr bool fits_kernel(const schedule::KernelConfig& config) {
    return config.arch != schedule::Arch::kSm90 ||
           (config.block_m == sm90::kTileM && 2 * config.gate_up_n == sm90::kTileN &&
            config.down_n == sm90::kTileN && config.rows_per_store == sm90::kPartRows &&
            config.pull_bytes == sm90::kPullSlotBytes);
}
constexpr bool all_fit_kernel() {
    for (const schedule::KernelConfig& config : schedule::kConfigs) {
        if (!fits_kernel(config)) return false;
    }
    return true;
}
static_assert(all_fit_kernel(), "a row of kConfigs has tiles that the sm_90 kernels do not");

inline MoeExperts expert_maps(const char* names[3], const MoeExpertViews& views, int64_t experts,
                              int64_t hidden, int64_t inner, bool uses_down) {
    check_weights(names[0], views.gate, experts, inner, hidden);
    check_weights(names[1], views.up, experts, inner, hidden);
    if (uses_down) check_weights(names[2], views.down, experts, hidden, inner);
    MoeExperts result{};
    result.gate = weight_map(views.gate);
    result.up = weight_map(views.up);
    if (uses_down) result.down = weight_map(views.down);
    const auto bias = [](const BiasView& view, const bf16*& data, int64_t& stride) {
        data = static_cast<const bf16*>(view.data);
        stride = view.expert_stride / kElementBytes;
    };
    bias(views.b_gate, result.b_gate, result.b_gate_stride);
    bias(views.b_up, result.b_up, result.b_up_stride);
    bias(views.b_down, result.b_down, result.b_down_stride);
    return result;
}

}  // namespace moe_forward_detail

/// Throws std::invalid_argument.
inline MoeForwardParams moe_forward_params(const MoeForward& forward) {
    using namespace moe_forward_detail;
    const schedule::ScheduleSizes& sizes = forward.shape.sizes;
    const bool is_forward = sizes.pass == schedule::Pass::kForward;
    const int64_t hidden = sizes.hidden, inner = sizes.intermediate, shared = sizes.shared_intermediate;
    MOK_CHECK(sizes.pass != schedule::Pass::kBackward, "the forward kernel was given a backward schedule.");
    MOK_CHECK(hidden % 8 == 0 && inner % 8 == 0 && shared % 8 == 0, "hidden_size = ", hidden,
              ", intermediate_size = ", inner, ", shared_intermediate_size = ", shared,
              ": the GPU kernels need multiples of 8; pad the weights.");
    MoeForwardParams params{};
    const char* routed_names[3] = {"w_gate", "w_up", "w_down"};
    params.experts[0] =
        expert_maps(routed_names, forward.routed, sizes.num_local_experts, hidden, inner, is_forward);
    const auto rows = [](const void* base, int64_t count, int64_t columns) {
        return row_map(base, count, columns, columns * kElementBytes);
    };
    params.rows[0].x = rows(forward.ring_x, sizes.ring_rows, hidden);
    params.rows[0].hidden = rows(forward.ring_hidden, sizes.ring_rows, inner);
    params.rows[0].gate = rows(forward.saved_gate, forward.save_rows, inner);
    params.rows[0].up = rows(forward.saved_up, forward.save_rows, inner);
    params.saved_x = rows(forward.saved_x, forward.save_rows, hidden);
    if (shared > 0) {
        const char* names[3] = {"shared w_gate", "shared w_up", "shared w_down"};
        params.experts[1] = expert_maps(names, forward.shared, 1, hidden, shared, is_forward);
        params.rows[1].x = row_map(forward.x, sizes.num_tokens, hidden, forward.x_stride);
        params.rows[1].hidden = rows(forward.shared_hidden, sizes.num_tokens, shared);
        params.rows[1].gate = rows(forward.saved_shared_gate, sizes.num_tokens, shared);
        params.rows[1].up = rows(forward.saved_shared_up, sizes.num_tokens, shared);
    }
    params.shape = forward.shape;
    params.call = forward.call;
    params.ring_x = static_cast<char*>(forward.ring_x);
    params.saved_x_rows = static_cast<char*>(forward.saved_x);
    params.home_rows = static_cast<char*>(forward.home_rows);
    params.shared_rows = static_cast<char*>(forward.shared_rows);
    params.window_stride = forward.window_stride;
    params.rank = forward.rank;
    params.limit = forward.limit;
    params.limits = forward.limits;
    params.spans = forward.spans;
    return params;
}

}  // namespace mok::launch
