// p = act(g, u) in FP32, in the operation order of the CPU executor (csrc/cpu/activation_impl.h).
#pragma once

#include "csrc/ptx/ptx.h"

namespace mok {

/// As csrc/cpu/kernels.h numbers them.
enum class ActivationForm : int32_t { kSwiglu = 0, kSwigluLimit = 1, kGptOss = 2 };

/// Two approximations and three plain instructions: within 1e-5 (relative), which BF16 does not show. The
/// emulator has the executor's, so that results can be compared bit for bit.
MOK_DEVICE float fast_sigmoid(float x) {
#if defined(__CUDACC__)
    constexpr float kLog2E = 0x1.715476p+0f;
    return ptx::reciprocal_approx(1.0f + ptx::exp2_approx(-kLog2E * x));
#else
    return ptx::sigmoid(x).value;
#endif
}

/// From the rounded g and u. Comparisons, not fminf, so that NaN propagates.
template <ActivationForm kForm>
MOK_DEVICE float activate(float g, float u, float limit) {
    if constexpr (kForm != ActivationForm::kSwiglu) {
        g = g > limit ? limit : g;
        u = u > limit ? limit : u;
        u = u < -limit ? -limit : u;
    }
    float scaled = g;
    if constexpr (kForm == ActivationForm::kGptOss) {
        constexpr float kAlpha = 1.702f;
        scaled = g * kAlpha;
        u = u + 1.0f;
    }
    const float gated = g * fast_sigmoid(scaled);
    return gated * u;
}

}  // namespace mok
