// AVX2 + FMA: 8 lanes, BF16 factors are widened to FP32 while they are packed.
#pragma once

#include "csrc/cpu/vec_types.h"

namespace mok::cpu::MOK_ISA {

MOK_INLINE Words widen(Halves v) {
    return (Words)_mm256_cvtepu16_epi32((__m128i)v);
}
/// Words below 2^16 only.
MOK_INLINE Halves narrow(Words v) {
    const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);  // within each 128-bit half
    return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
}

MOK_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return _mm256_fmadd_ps(a, b, c);
}
MOK_INLINE Floats madd(Floats a, Floats b, Floats c) {
    return fma(a, b, c);
}

/// acc + a b for one step: the GEMM's only arithmetic.
template <bool kPairs>
MOK_INLINE Floats multiply_add(Words a, Words b, Floats acc) {
    static_assert(!kPairs);
    return fma(as_floats(a), as_floats(b), acc);
}

// 6 rows x 16 columns: 12 accumulators, 2 columns and a broadcast in 16 registers; per step 8 loads for 12
// FMAs.
constexpr bool kHasPairs = false;
constexpr int kTileRows = 6;
constexpr int kTileVectors = 2;
// A panel of B (256 x 16 floats) is half of a 32 KB L1; a block of A (132 x 256 floats) stays in L2, and a
// 128-row block of routes is one block.
constexpr int kBlockSteps = 256;
constexpr int kBlockRows = 132;

}  // namespace mok::cpu::MOK_ISA
