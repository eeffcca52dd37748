// What a rank tells its peers through the process group's store so that they can fetch its window.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

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

    std::string text() const;
    /// Throws HeapError naming the rank whose address cannot be read.
    static HeapAddress parse(const std::string& text, int rank);
};

/// This process, without a socket yet.
HeapAddress local_address(int rank, int num_ranks, int64_t fixed_bytes, int64_t arena_bytes);

/// Reads one address per rank and checks that they make one group. Throws PeersNotLocal if any two ranks run
/// on other hosts or in other network namespaces (the same on every rank), HeapError if sizes, ranks or users
/// differ.
std::vector<HeapAddress> parse_group(const std::vector<std::string>& texts, const HeapAddress& mine);

/// 32 hexadecimal digits from the kernel's random numbers.
std::string random_name();

}  // namespace mok
