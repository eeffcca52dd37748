// Shared memory by 32-bit address. A kernel lays out its dynamic shared memory in one struct of offsets from
// dynamic_shared(); there is no other shared memory.
#pragma once

#include <cstring>
#include <type_traits>

#include "csrc/ptx/device/base.cuh"

namespace mok::ptx {

// 1024: the period of the 128-byte swizzle, so that a layout's offsets can be aligned to it.
extern __shared__ __align__(1024) uint8_t mok_dynamic_shared[];

/// The shared::cta address of this block's dynamic shared memory (all architectures).
MOK_DEVICE uint32_t dynamic_shared() {
    return static_cast<uint32_t>(__cvta_generic_to_shared(mok_dynamic_shared));
}

/// ld.shared of 2, 4, 8 or 16 bytes, aligned to its size (all architectures).
template <typename T>
MOK_DEVICE T load_shared(uint32_t address) {
    static_assert(std::is_trivially_copyable_v<T>);
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    T value;
    if constexpr (sizeof(T) == 2) {
        uint16_t bits;
        asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
        memcpy(&value, &bits, 2);
    } else if constexpr (sizeof(T) == 4) {
        uint32_t bits;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
        memcpy(&value, &bits, 4);
    } else if constexpr (sizeof(T) == 8) {
        uint64_t bits;
        asm volatile("ld.shared.b64 %0, [%1];" : "=l"(bits) : "r"(address) : "memory");
        memcpy(&value, &bits, 8);
    } else {
        uint32_t bits[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                     : "r"(address)
                     : "memory");
        memcpy(&value, bits, 16);
    }
    return value;
}

/// st.shared of 2, 4, 8 or 16 bytes, aligned to its size (all architectures).
template <typename T>
MOK_DEVICE void store_shared(uint32_t address, const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
    if constexpr (sizeof(T) == 2) {
        uint16_t bits;
        memcpy(&bits, &value, 2);
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(bits) : "memory");
    } else if constexpr (sizeof(T) == 4) {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
    } else if constexpr (sizeof(T) == 8) {
        uint64_t bits;
        memcpy(&bits, &value, 8);
        asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(bits) : "memory");
    } else {
        uint32_t bits[4];
        memcpy(bits, &value, 16);
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(bits[0]), "r"(bits[1]),
                     "r"(bits[2]), "r"(bits[3])
                     : "memory");
    }
}

/// red.relaxed.cta.shared.add.u32: an integer sum whose order does not matter (all architectures).
MOK_DEVICE void red_relaxed_cta_shared_add(uint32_t address, uint32_t value) {
    asm volatile("red.relaxed.cta.shared::cta.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

}  // namespace mok::ptx
