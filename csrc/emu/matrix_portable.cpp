// Any processor: fmaf is one instruction where there is one, and slow but right elsewhere.
#include "csrc/emu/matrix_isas.h"

#define MOK_ISA portable
#define MOK_LANES 4

#pragma GCC diagnostic ignored "-Wpsabi"  // 32-byte vectors are passed between inlined functions only

namespace mok::emu::MOK_ISA {

typedef float Floats __attribute__((vector_size(4 * MOK_LANES)));

inline Floats fma(Floats a, Floats b, Floats c) {
    for (int i = 0; i < MOK_LANES; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}

}  // namespace mok::emu::MOK_ISA

#include "csrc/emu/matrix_multiply_impl.h"

namespace mok::emu {

const MultiplyFunction kMultiplyPortable = portable::multiply;

}  // namespace mok::emu
