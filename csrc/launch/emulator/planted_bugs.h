// Launches of the small kernels with switchable bugs that test the emulator's checker.
#pragma once

#include <string>
#include <vector>

#include "csrc/launch/emulator/launch.h"

namespace mok::launch {

/// The memory of both ranks, as planted::Params has it.
struct PlantedBuffers {
    void* in[2];
    void* out[2];
    void* words[2];
    void* window[2];
    void* flags[2];
    void* limits[2];
};

/// Names of the bugs, and of the kernels without one.
std::vector<std::string> planted_bugs();

/// Puts rank `rank`'s kernel on its stream. Throws std::invalid_argument for a name that is not planted.
void launch_planted_bug(const std::string& name, const PlantedBuffers& buffers, int rank,
                        EmulatorStream& stream);

}  // namespace mok::launch
