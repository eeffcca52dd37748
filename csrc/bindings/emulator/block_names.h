// What reports call the shared memory and the warps of the sm_90a GEMM kernels.
#pragma once

#include "csrc/launch/emulator/launch.h"

namespace mok::emulator {

/// Names them for the kernels that are launched on `stream` from now on.
void name_gemm_block(launch::EmulatorStream& stream);

}  // namespace mok::emulator
