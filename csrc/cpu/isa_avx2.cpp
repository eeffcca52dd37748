// AVX2 + FMA. The wider instructions are switched on after every include from outside this folder, so that no
// inline function which other files share is compiled with them.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "csrc/cpu/isa_tables.h"
#include "csrc/cpu/kernels.h"
#include "csrc/layout/types.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")

#define MOK_ISA avx2
#define MOK_LANES 8
// clang-format off
#include "csrc/cpu/vec_avx2.h"
#include "csrc/cpu/table_impl.h"
// clang-format on

namespace mok::cpu {

const KernelTable& avx2_table() {
    return avx2::table("avx2");
}

}  // namespace mok::cpu

#pragma GCC pop_options

#endif  // defined(__x86_64__)
