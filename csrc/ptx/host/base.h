// What every wrapper header of this folder starts from: the words that CUDA adds to C++, as g++ may have
// them, and the machine. Names and signatures are those of csrc/ptx/device; each wrapper besides knows where
// it was called (`site`, a default argument), for reports and for mutation.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>

#include "csrc/emu/machine.h"
#include "csrc/emu/sync.h"

#define MOK_DEVICE inline
#define __global__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace mok::ptx {

inline constexpr uint32_t kWarpThreads = 32;
inline constexpr uint32_t kWarpgroupThreads = 128;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

using Site = emu::Site;

}  // namespace mok::ptx
