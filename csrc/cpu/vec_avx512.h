// AVX-512 with BF16: 16 lanes, BF16 factors are multiplied in pairs along k (vdpbf16ps, which takes subnormal
// factors and results as zero).
#pragma once

#include "csrc/cpu/vec_types.h"

namespace mok::cpu::MOK_ISA {

// GCC's unmasked forms warn of an uninitialised value of their own.
constexpr __mmask16 kAll = 0xffff;

MOK_INLINE Words widen(Halves v) {
    return (Words)_mm512_maskz_cvtepu16_epi32(kAll, (__m256i)v);
}
/// Words below 2^16 only.
MOK_INLINE Halves narrow(Words v) {
    return (Halves)_mm512_maskz_cvtepi32_epi16(kAll, (__m512i)v);
}

MOK_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return _mm512_fmadd_ps(a, b, c);
}
MOK_INLINE Floats madd(Floats a, Floats b, Floats c) {
    return fma(a, b, c);
}

/// acc + a b for one step: the GEMM's only arithmetic. kPairs: two BF16 factors per word.
template <bool kPairs>
MOK_INLINE Floats multiply_add(Words a, Words b, Floats acc) {
    if constexpr (kPairs) return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
    return fma(as_floats(a), as_floats(b), acc);
}

// 6 rows x 64 columns: 24 accumulators, 4 columns and a broadcast in 32 registers; per step 10 loads for 24
// products, and only six streams where A is read in place.
constexpr bool kHasPairs = true;
constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;
// A panel of B (96 x 64 words, 24 KB) fits an L1 of 32 KB and leaves half of one of 48 KB to A and C.
constexpr int kBlockSteps = 96;
constexpr int kBlockRows = 192;

}  // namespace mok::cpu::MOK_ISA
