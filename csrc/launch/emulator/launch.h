// Launches on the emulated machine. A `void* stream` is an EmulatorStream: launches are collected there and
// run together with those of the other ranks.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "csrc/emu/launch.h"
#include "csrc/launch/launch_shape.h"

namespace mok::launch {

/// What reports call a kernel's shared memory and warps.
struct KernelNames {
    std::vector<emu::SharedName> shared;
    std::vector<emu::WarpRole> roles;
};

/// One rank's stream.
struct EmulatorStream {
    int rank = 0;
    std::vector<emu::Launch> launches;
    std::map<std::string, KernelNames> names;  // by the launch's name
};

/// Puts `kernel(params)` on `stream` (an EmulatorStream).
template <typename Params>
void launch(const char* name, void (*kernel)(Params), const LaunchShape& shape, void* stream,
            const Params& params) {
    EmulatorStream& target = *static_cast<EmulatorStream*>(stream);
    emu::Launch& added = target.launches.emplace_back();
    added.name = name;
    added.rank = target.rank;
    added.blocks = shape.blocks;
    added.threads = shape.threads;
    added.cluster = shape.cluster;
    added.shared_bytes = shape.shared_bytes;
    added.cooperative = shape.cooperative;
    const KernelNames& names = target.names[added.name];
    added.shared_names = names.shared;
    added.roles = names.roles;
    emu::set_kernel(added, kernel, params);
}

template <typename Params>
void load_kernel(const char*, void (*)(Params)) {}

/// Multiprocessors of each emulated device. Few: every block is as many fibers as it has threads.
uint32_t num_multiprocessors();
void set_num_multiprocessors(uint32_t count);

/// One: more blocks than multiprocessors would only take time.
template <typename Params>
uint32_t blocks_per_multiprocessor(const char*, void (*)(Params), uint32_t, uint32_t) {
    return 1;
}

}  // namespace mok::launch
