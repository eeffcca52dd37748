// The product once per instruction set; matrix_multiply.cpp picks.
#pragma once

#include "csrc/emu/matrix_multiply.h"

namespace mok::emu {

extern const MultiplyFunction kMultiplyPortable;
#if defined(__x86_64__)
extern const MultiplyFunction kMultiplyAvx2, kMultiplyAvx512;
#endif

}  // namespace mok::emu
