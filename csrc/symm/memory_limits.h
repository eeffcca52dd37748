// How much memory this process could get at most, for an error before the kernel kills something.
#pragma once

#include <cstdint>
#include <string>

namespace mok {

struct MemoryLimits {
    int64_t machine_bytes;    // memory and swap
    int64_t available_bytes;  // now, by the kernel's estimate
    int64_t cgroup_bytes;     // the container's limit; INT64_MAX if there is none
    int64_t file_bytes;       // ulimit -f, which binds memfds as well

    int64_t hard_limit() const;
    std::string text() const;
};

MemoryLimits read_memory_limits();

}  // namespace mok
