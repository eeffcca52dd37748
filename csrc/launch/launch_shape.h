// What a launch looks like, on the device and in the emulator.
#pragma once

#include <cstdint>

namespace mok::launch {

struct LaunchShape {
    uint32_t blocks;
    uint32_t threads;
    uint32_t shared_bytes = 0;  // dynamic; kernels have no other
    uint32_t cluster = 1;       // blocks of a cluster; divides `blocks`
    bool cooperative = false;   // all blocks are resident at once, or the launch fails
};

/// Multiprocessors of the current device, or of every emulated one.
uint32_t num_multiprocessors();

}  // namespace mok::launch
