// Loads and stores of global memory with cache hints. They order nothing: flags do (flag.cuh).
#pragma once

#include <cstring>

#include "csrc/ptx/device/base.cuh"

namespace mok::ptx {

/// 16 bytes in registers.
struct Words4 {
    uint32_t word[4];
};

// L2 policies as createpolicy.fractional encodes them for all of an access.
inline constexpr uint64_t kEvictNormal = 0x1000000000000000u;
inline constexpr uint64_t kEvictFirst = 0x12f0000000000000u;
inline constexpr uint64_t kEvictLast = 0x14f0000000000000u;

/// ld.global.v4, 16-byte aligned, kept out of L1, with an L2 policy (sm_80).
MOK_DEVICE Words4 load_global_v4_hint(const void* address, uint64_t policy) {
    Words4 value;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
                 : "l"(address), "l"(policy));
    return value;
}

/// st.global.v4, 16-byte aligned (all architectures).
MOK_DEVICE void store_global_v4(void* address, const Words4& value) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.word[0]),
                 "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
                 : "memory");
}

/// ld.global of an array that other blocks or kernels wrote before; for single values (all architectures).
template <typename T>
MOK_DEVICE T load_global(const T* address) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    T value;
    if constexpr (sizeof(T) == 4) {
        uint32_t bits;
        asm volatile("ld.global.b32 %0, [%1];" : "=r"(bits) : "l"(address) : "memory");
        memcpy(&value, &bits, 4);
    } else {
        uint64_t bits;
        asm volatile("ld.global.b64 %0, [%1];" : "=l"(bits) : "l"(address) : "memory");
        memcpy(&value, &bits, 8);
    }
    return value;
}

/// st.global (all architectures).
template <typename T>
MOK_DEVICE void store_global(T* address, T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    if constexpr (sizeof(T) == 4) {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(bits) : "memory");
    } else {
        uint64_t bits;
        memcpy(&bits, &value, 8);
        asm volatile("st.global.b64 [%0], %1;" ::"l"(address), "l"(bits) : "memory");
    }
}

}  // namespace mok::ptx
