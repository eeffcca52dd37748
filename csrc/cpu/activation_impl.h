// exp, sigmoid and the activations with their derivatives (the numerics contract, section "Activations").
#pragma once

#include "csrc/cpu/vec_common.h"

namespace mok::cpu::MOK_ISA {

/// e^x, within 1.1 ulp (measured over every 13th FP32), subnormal results included: x = n ln 2 + r with |r|
/// <= ln 2 / 2 (ln 2 in two parts, the first with 9 trailing zero bits and more, so that n times it is
/// exact), e^r = 1 + r + r^2 q(r), q the polynomial through (e^r - 1 - r) / r^2 at the five Chebyshev nodes
/// of that interval, coefficients rounded to FP32 (1e-8 relative, measured in 120-bit arithmetic). 2^n is
/// applied as two factors: n reaches 128 and -150.
MOK_INLINE Floats exp(Floats x) {
    const Floats log2_e = broadcast(0x1.715476p+0f);
    const Floats ln2_high = broadcast(0x1.63p-1f), ln2_low = broadcast(-0x1.bd0106p-13f);
    const Floats shifter = broadcast(0x1.8p+23f);  // adding it leaves round(x log2 e) in the low bits
    // Beyond these e^x is inf and 0 all the same. A NaN passes both comparisons' false branch.
    x = x > broadcast(89.0f) ? broadcast(89.0f) : x;
    x = x < broadcast(-105.0f) ? broadcast(-105.0f) : x;
    const Floats shifted = madd(x, log2_e, shifter);
    const Words n = as_words(shifted) - as_words(shifter);  // two's complement
    const Floats n_float = shifted - shifter;
    Floats r = madd(n_float, -ln2_high, x);
    r = madd(n_float, -ln2_low, r);
    Floats q = broadcast(0x1.6d10fcp-10f);
    q = madd(q, r, broadcast(0x1.120b62p-7f));
    q = madd(q, r, broadcast(0x1.55551ap-5f));
    q = madd(q, r, broadcast(0x1.5554dep-3f));
    q = madd(q, r, broadcast(0.5f));
    const Floats exp_r = madd(q, r * r, r) + 1.0f;
    const Words n_half = (Words)((Ints)n >> 1), n_rest = n - n_half;
    return exp_r * as_floats((n_half + 127u) << 23) * as_floats((n_rest + 127u) << 23);
}

struct Sigmoid {
    Floats value, complement;  // sigmoid(x) and 1 - sigmoid(x), each within 2.8 ulp
};

MOK_INLINE Sigmoid sigmoid(Floats x) {
    const Floats decay = exp(as_floats(as_words(x) | 0x80000000u));
    // 1 + decay: the last product in exp is exact or below 2^-126, so a contraction would not change a bit.
    const Floats larger = 1.0f / (1.0f + decay), smaller = decay * larger;
    const Ints negative = x < 0.0f;
    return {negative ? smaller : larger, negative ? larger : smaller};
}

/// What one column of the activation gives: p, and the factors of its derivatives.
struct Activated {
    Floats p;
    Floats dp_dg;
    Floats dp_du;
};

constexpr float kGptOssAlpha = 1.702f;

/// The derivatives cost nothing where the caller drops them; p's expression is the same either way.
template <Activation kKind>
MOK_INLINE Activated activate(Floats g, Floats u, Floats limit) {
    constexpr bool kClamped = kKind != Activation::kSwiglu;
    Floats g_passes = broadcast(1.0f), u_passes = broadcast(1.0f);
    if constexpr (kClamped) {
        // Comparisons, not min and max: a NaN stays. The masks are factors, so that 0 x NaN stays NaN as
        // well.
        g_passes = g <= limit ? g_passes : Floats{};
        u_passes = u <= limit ? u_passes : Floats{};
        u_passes = u >= -limit ? u_passes : Floats{};
        g = g > limit ? limit : g;
        u = u > limit ? limit : u;
        u = u < -limit ? -limit : u;
    }
    Floats scaled = g;
    if constexpr (kKind == Activation::kGptOss) {
        scaled = g * kGptOssAlpha;
        u = u + 1.0f;
    }
    const Sigmoid s = sigmoid(scaled);
    Floats slope = s.value * s.complement;  // before g, so that 0 wins where alpha g overflows
    if constexpr (kKind == Activation::kGptOss) slope = slope * kGptOssAlpha;
    const Floats gated = g * s.value;
    Activated result{gated * u, u * madd(slope, g, s.value), gated};
    if constexpr (kClamped) {
        result.dp_dg = result.dp_dg * g_passes;
        result.dp_du = result.dp_du * u_passes;
    }
    return result;
}

}  // namespace mok::cpu::MOK_ISA
