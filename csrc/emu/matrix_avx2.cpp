// AVX2 + FMA. The wider instructions are switched on after every include of a header that other files share.
#if defined(__x86_64__)

#include <immintrin.h>

#include "csrc/emu/matrix_isas.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")

#define MOK_ISA avx2
#define MOK_LANES 8

namespace mok::emu::MOK_ISA {

typedef float Floats __attribute__((vector_size(4 * MOK_LANES)));

inline Floats fma(Floats a, Floats b, Floats c) {
    return _mm256_fmadd_ps(a, b, c);
}

}  // namespace mok::emu::MOK_ISA

#include "csrc/emu/matrix_multiply_impl.h"

namespace mok::emu {

const MultiplyFunction kMultiplyAvx2 = avx2::multiply;

}  // namespace mok::emu

#pragma GCC pop_options

#endif  // defined(__x86_64__)
