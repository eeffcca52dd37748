// AVX-512. The wider instructions are switched on after every include of a header that other files share.
#if defined(__x86_64__)

#include <immintrin.h>

#include "csrc/emu/matrix_isas.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")

#define MOK_ISA avx512
#define MOK_LANES 16

namespace mok::emu::MOK_ISA {

typedef float Floats __attribute__((vector_size(4 * MOK_LANES)));

inline Floats fma(Floats a, Floats b, Floats c) {
    return _mm512_fmadd_ps(a, b, c);
}

}  // namespace mok::emu::MOK_ISA

#include "csrc/emu/matrix_multiply_impl.h"

namespace mok::emu {

const MultiplyFunction kMultiplyAvx512 = avx512::multiply;

}  // namespace mok::emu

#pragma GCC pop_options

#endif  // defined(__x86_64__)
