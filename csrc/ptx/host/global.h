// csrc/ptx/device/global.cuh on the emulated machine.
#pragma once

#include "csrc/ptx/host/base.h"

namespace mok::ptx {

/// 16 bytes in registers.
struct Words4 {
    uint32_t word[4];
};

// L2 policies mean nothing here.
inline constexpr uint64_t kEvictNormal = 0x1000000000000000u;
inline constexpr uint64_t kEvictFirst = 0x12f0000000000000u;
inline constexpr uint64_t kEvictLast = 0x14f0000000000000u;

/// ld.global.v4.
MOK_DEVICE Words4 load_global_v4_hint(const void* address, uint64_t, Site site = Site::current()) {
    emu::enter("load_global_v4_hint", site);
    Words4 value;
    memcpy(&value, emu::global_access(address, sizeof(value), emu::kRead), sizeof(value));
    return value;
}

/// st.global.v4.
MOK_DEVICE void store_global_v4(void* address, const Words4& value, Site site = Site::current()) {
    emu::enter("store_global_v4", site);
    memcpy(emu::global_access(address, sizeof(value), emu::kWrite), &value, sizeof(value));
}

/// ld.global.
template <typename T>
MOK_DEVICE T load_global(const T* address, Site site = Site::current()) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    emu::enter("load_global", site);
    T value;
    memcpy(&value, emu::global_access(address, sizeof(T), emu::kRead), sizeof(T));
    return value;
}

/// st.global.
template <typename T>
MOK_DEVICE void store_global(T* address, T value, Site site = Site::current()) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    emu::enter("store_global", site);
    memcpy(emu::global_access(address, sizeof(T), emu::kWrite), &value, sizeof(T));
}

}  // namespace mok::ptx
