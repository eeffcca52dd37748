// One kernel table per instruction set. Taking a table is always allowed; calling into one needs the
// processor.
#pragma once

#include "csrc/cpu/kernels.h"

namespace mok::cpu {

const KernelTable& portable_table();

/// The AVX-512 code path (tile shape, BF16 pairs, packing) over 16 lanes of plain C++: what tests run where
/// the processor has no AVX-512. Never chosen by `kernels()`.
const KernelTable& emulated_table();

#if defined(__x86_64__)
const KernelTable& avx2_table();
const KernelTable& avx512_table();
#endif

/// Whether this processor (and its operating system) runs the instruction set of that name.
bool has_isa(const char* name);

}  // namespace mok::cpu
