// Plain C++: any processor.
#include <cstddef>
#include <cstdint>
#include <utility>

#include "csrc/cpu/isa_tables.h"
#include "csrc/cpu/kernels.h"
#include "csrc/layout/types.h"

#define MOK_ISA portable
#define MOK_LANES 4
// clang-format off
#include "csrc/cpu/vec_portable.h"
#include "csrc/cpu/table_impl.h"
// clang-format on

namespace mok::cpu {

const KernelTable& portable_table() {
    return portable::table("portable");
}

}  // namespace mok::cpu
