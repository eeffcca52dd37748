// csrc/ptx/device/shared.cuh on the emulated machine.
#pragma once

#include <type_traits>

#include "csrc/ptx/host/base.h"

namespace mok::ptx {

/// The address of this block's dynamic shared memory.
MOK_DEVICE uint32_t dynamic_shared() {
    return emu::kDynamicShared;
}

/// ld.shared.
template <typename T>
MOK_DEVICE T load_shared(uint32_t address, Site site = Site::current()) {
    static_assert(std::is_trivially_copyable_v<T>);
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    emu::enter("load_shared", site);
    T value;
    memcpy(&value, emu::shared_access(address, sizeof(T), emu::kRead), sizeof(T));
    return value;
}

/// st.shared.
template <typename T>
MOK_DEVICE void store_shared(uint32_t address, const T& value, Site site = Site::current()) {
    static_assert(std::is_trivially_copyable_v<T>);
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    emu::enter("store_shared", site);
    memcpy(emu::shared_access(address, sizeof(T), emu::kWrite), &value, sizeof(T));
}

/// red.relaxed.cta.shared.add.u32.
MOK_DEVICE void red_relaxed_cta_shared_add(uint32_t address, uint32_t value, Site site = Site::current()) {
    emu::enter("red_relaxed_cta_shared_add", site);
    uint8_t* place = emu::shared_access(address, sizeof(value), {true, true, emu::Scope::kBlock});
    uint32_t sum;
    memcpy(&sum, place, sizeof(sum));
    sum += value;
    memcpy(place, &sum, sizeof(sum));
}

}  // namespace mok::ptx
