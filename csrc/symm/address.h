// What a rank tells its peers through the process group's store so that they can fetch its window.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/symm/device_mapping.h"

namespace mok {

struct HeapAddress {
    int rank = 0;
    int num_ranks = 0;
    int64_t fixed_bytes = 0;
    int64_t arena_bytes = 0;
    std::string host;     // identity of the running kernel
    std::string network;  // network namespace: abstract sockets do not cross it
    int64_t uid = 0;
    int64_t pid = 0;
    std::string socket;  // abstract UNIX socket name (visible to every user of the machine)
    std::string token;   // proves that the caller read this address
    DeviceOffer device;  // empty gpu: the window is host memory

    bool is_device() const { return !device.gpu.empty(); }
    std::string text() const;
    /// Throws HeapError naming the rank whose address cannot be read.
    static HeapAddress parse(const std::string& text, int rank);
};

/// This process, without a socket yet.
HeapAddress local_address(int rank, int num_ranks, int64_t fixed_bytes, int64_t arena_bytes);

/// How a group's windows are passed to the peers.
enum class Passing { kDescriptors, kFabric };

struct GroupAddresses {
    std::vector<HeapAddress> ranks;
    Passing passing = Passing::kDescriptors;
};

/// Reads one address per rank and checks that they make one group. Throws PeersNotLocal (the same on every
/// rank) if any two ranks run on other hosts or in other network namespaces and do not share an NVLink
/// domain, or if their GPUs cannot access each other; HeapError if sizes, ranks, users or settings differ.
GroupAddresses parse_group(const std::vector<std::string>& texts, const HeapAddress& mine);

/// 32 hexadecimal digits from the kernel's random numbers.
std::string random_name();

}  // namespace mok
