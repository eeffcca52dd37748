// The first of four lanes with fused multiply-adds, the others meaningless: the executor's formulas as the
// AVX2 and AVX-512 tables evaluate them, for single numbers and any processor.
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

MOK_INLINE Floats fma(Floats a, Floats b, Floats c) {
    c[0] = __builtin_fmaf(a[0], b[0], c[0]);
    return c;
}
MOK_INLINE Floats madd(Floats a, Floats b, Floats c) {
    return fma(a, b, c);
}

}  // namespace mok::cpu::MOK_ISA
