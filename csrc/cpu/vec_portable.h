// Plain C++ for any processor. MOK_PAIRS (isa_emulated.cpp) gives it the tile and the BF16 pairs of AVX-512.
#pragma once

#include "csrc/cpu/vec_types.h"

namespace mok::cpu::MOK_ISA {

MOK_INLINE Words widen(Halves v) {
    return __builtin_convertvector(v, Words);
}
/// Words below 2^16 only.
MOK_INLINE Halves narrow(Words v) {
    return __builtin_convertvector(v, Halves);
}

/// One rounding, lane by lane: the chains whose bits the contract fixes.
MOK_INLINE Floats fma(Floats a, Floats b, Floats c) {
    for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}

/// a b + c where the rounding of the product is free to choose.
MOK_INLINE Floats madd(Floats a, Floats b, Floats c) {
    return a * b + c;
}

/// acc + a b for one step: the GEMM's only arithmetic. kPairs: two BF16 factors per word.
template <bool kPairs>
MOK_INLINE Floats multiply_add(Words a, Words b, Floats acc) {
    if constexpr (kPairs) {
        acc = madd(as_floats(a & 0xffff0000u), as_floats(b & 0xffff0000u), acc);
        return madd(as_floats(a << 16), as_floats(b << 16), acc);
    }
    return madd(as_floats(a), as_floats(b), acc);
}

#if defined(MOK_PAIRS)
// 4 vectors x 6 rows, as vec_avx512.h.
constexpr bool kHasPairs = true;
constexpr int kTileRows = 6;
constexpr int kTileVectors = 4;
constexpr int kBlockSteps = 96;
constexpr int kBlockRows = 192;
#else
// 4 rows x 8 columns: 8 accumulators, 2 columns, a broadcast and a product fit the 16 registers of SSE2.
constexpr bool kHasPairs = false;
constexpr int kTileRows = 4;
constexpr int kTileVectors = 2;
constexpr int kBlockSteps = 256;
constexpr int kBlockRows = 128;
#endif

}  // namespace mok::cpu::MOK_ISA
