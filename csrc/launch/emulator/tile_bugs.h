// One tile's way through a kernel, D [64, 64] = A [64, 64] B [64, 64]^T by TMA, wgmma, stmatrix and TMA, with
// a bug planted on demand: what the emulator has to find in tensor copies and tensor cores.
#pragma once

#include <string>
#include <vector>

#include "csrc/launch/emulator/launch.h"
#include "csrc/ptx/wait_record.h"

namespace mok::launch {

/// BF16 [64, 64] each.
struct TileBuffers {
    void* a;
    void* b;
    void* d;
};
constexpr int64_t kTileBufferBytes = 64 * 64 * 2;

/// The bugs by name; "none" is among them.
std::vector<std::string> tile_bugs();

/// Throws std::invalid_argument for an unknown bug.
void launch_tile(const std::string& bug, const TileBuffers& buffers, const ptx::WaitLimits& limits,
                 EmulatorStream& stream);

}  // namespace mok::launch
