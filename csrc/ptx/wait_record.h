// What a bounded wait on the device leaves behind when its time is up. Plain structs for host and device.
#pragma once

#include <cstdint>

namespace mok::ptx {

/// Written by the first wait of a kernel that expires; `complete` is stored last.
struct WaitRecord {
    uint32_t complete;
    uint32_t place;  // which wait: a number the kernel names in an enum
    int32_t rank;
    int32_t peer;  // whom the wait was for; -1: nobody in particular
    uint32_t block;
    uint32_t thread;
    uint64_t expected;
    uint64_t seen;
    uint64_t waited_ns;
};

/// The part of a kernel's parameters that its waits need.
struct WaitLimits {
    uint64_t limit_ns;   // for each single wait
    uint32_t* expired;   // device memory, 0 before; non-zero once any wait expired: all others give up then
    WaitRecord* record;  // memory that the host can read without CUDA calls (pinned); may be device memory
    int32_t rank;
};

}  // namespace mok::ptx
