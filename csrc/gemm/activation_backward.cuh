// p = act(g, u) with its derivatives in FP32, in the operation order of the CPU executor
// (csrc/cpu/activation_impl.h).
#pragma once

#include "csrc/gemm/activation.cuh"

namespace mok {

/// fast_sigmoid(x) and 1 - it. The difference loses its last bits where the sigmoid is near 1, but then it
/// counts for nothing beside it.
MOK_DEVICE ptx::Sigmoid fast_sigmoid_pair(float x) {
#if defined(__CUDACC__)
    const float value = fast_sigmoid(x);
    return {value, 1.0f - value};
#else
    return ptx::sigmoid(x);
#endif
}

struct Activated {
    float p, dp_dg, dp_du;
};

/// From the rounded g and u, whose values make the masks of the clamps. Masks are factors and comparisons no
/// fminf, so that NaN propagates.
template <ActivationForm kForm>
MOK_DEVICE Activated activate_with_derivatives(float g, float u, float limit) {
    [[maybe_unused]] float g_passes = 1.0f, u_passes = 1.0f;
    if constexpr (kForm != ActivationForm::kSwiglu) {
        g_passes = g <= limit ? 1.0f : 0.0f;
        u_passes = u <= limit && u >= -limit ? 1.0f : 0.0f;
        g = g > limit ? limit : g;
        u = u > limit ? limit : u;
        u = u < -limit ? -limit : u;
    }
    float scaled = g;
    constexpr float kAlpha = 1.702f;
    if constexpr (kForm == ActivationForm::kGptOss) {
        scaled = g * kAlpha;
        u = u + 1.0f;
    }
    const ptx::Sigmoid s = fast_sigmoid_pair(scaled);
    float slope = s.value * s.complement;  // before g, so that 0 wins where alpha g overflows
    if constexpr (kForm == ActivationForm::kGptOss) slope = slope * kAlpha;
    const float gated = g * s.value;
    Activated result{gated * u, u * ptx::fused_multiply_add(slope, g, s.value), gated};
    if constexpr (kForm != ActivationForm::kSwiglu) {
        result.dp_dg = result.dp_dg * g_passes;
        result.dp_du = result.dp_du * u_passes;
    }
    return result;
}

}  // namespace mok
