// What every wrapper header of this folder starts from. One inline function per instruction; scope and
// ordering are in its name, and its comment says since which architecture it exists. Kernels touch
// instructions, thread indices and shared memory only through these names, so that csrc/ptx/host can stand in
// for them on a CPU.
#pragma once

#include <cstdint>

#define MOK_DEVICE __device__ __forceinline__

namespace mok::ptx {

inline constexpr uint32_t kWarpThreads = 32;
inline constexpr uint32_t kWarpgroupThreads = 128;
inline constexpr uint32_t kAllLanes = 0xffffffffu;

}  // namespace mok::ptx
