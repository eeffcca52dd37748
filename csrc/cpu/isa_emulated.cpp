// The AVX-512 code path over plain C++, for tests (see isa_tables.h).
#include <cstddef>
#include <cstdint>
#include <utility>

#include "csrc/cpu/isa_tables.h"
#include "csrc/cpu/kernels.h"
#include "csrc/layout/types.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // 64-byte vectors are passed between inlined functions only

#define MOK_ISA emulated
#define MOK_LANES 16
#define MOK_PAIRS
// clang-format off
#include "csrc/cpu/vec_portable.h"
#include "csrc/cpu/table_impl.h"
// clang-format on

namespace mok::cpu {

const KernelTable& emulated_table() {
    return emulated::table("emulated");
}

}  // namespace mok::cpu
