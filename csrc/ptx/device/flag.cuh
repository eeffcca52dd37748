// Flags and counters in global memory, exchanged between blocks (gpu scope) or between GPUs and processes
// (sys scope; gpu scope never orders anything for another GPU). A red never acquires: whoever adds and must
// also see what others wrote uses an atom.
#pragma once

#include "csrc/ptx/device/base.cuh"

namespace mok::ptx {

// One definition per scope and width: T, PTX's width, the register constraint.
#define MOK_FLAG_WRAPPERS(SCOPE, T, BITS, REG)                                                               \
    /** ld.relaxed: sees the newest value, orders nothing (sm_70). */                                        \
    MOK_DEVICE T ld_relaxed_##SCOPE(const T* flag) {                                                         \
        T value;                                                                                             \
        asm volatile("ld.relaxed." #SCOPE ".global.b" BITS " %0, [%1];"                                      \
                     : "=" REG(value)                                                                        \
                     : "l"(flag)                                                                             \
                     : "memory");                                                                            \
        return value;                                                                                        \
    }                                                                                                        \
    /** ld.acquire: what its writer released is seen from here on (sm_70). */                                \
    MOK_DEVICE T ld_acquire_##SCOPE(const T* flag) {                                                         \
        T value;                                                                                             \
        asm volatile("ld.acquire." #SCOPE ".global.b" BITS " %0, [%1];"                                      \
                     : "=" REG(value)                                                                        \
                     : "l"(flag)                                                                             \
                     : "memory");                                                                            \
        return value;                                                                                        \
    }                                                                                                        \
    /** st.relaxed: orders nothing; a release fence before it makes it a release (sm_70). */                 \
    MOK_DEVICE void st_relaxed_##SCOPE(T* flag, T value) {                                                   \
        asm volatile("st.relaxed." #SCOPE ".global.b" BITS " [%0], %1;" ::"l"(flag), REG(value) : "memory"); \
    }                                                                                                        \
    /** st.release: everything this thread wrote or has seen is seen by who acquires it (sm_70). */          \
    MOK_DEVICE void st_release_##SCOPE(T* flag, T value) {                                                   \
        asm volatile("st.release." #SCOPE ".global.b" BITS " [%0], %1;" ::"l"(flag), REG(value) : "memory"); \
    }                                                                                                        \
    /** red.relaxed.add: counts, orders nothing (sm_70). */                                                  \
    MOK_DEVICE void red_relaxed_##SCOPE##_add(T* flag, T value) {                                            \
        asm volatile("red.relaxed." #SCOPE ".global.add.u" BITS " [%0], %1;" ::"l"(flag), REG(value)         \
                     : "memory");                                                                            \
    }                                                                                                        \
    /** red.release.add: counts, and releases what this thread wrote or has seen (sm_70). */                 \
    MOK_DEVICE void red_release_##SCOPE##_add(T* flag, T value) {                                            \
        asm volatile("red.release." #SCOPE ".global.add.u" BITS " [%0], %1;" ::"l"(flag), REG(value)         \
                     : "memory");                                                                            \
    }                                                                                                        \
    /** atom.relaxed.add: the value before, orders nothing (sm_70). */                                       \
    MOK_DEVICE T atom_relaxed_##SCOPE##_add(T* flag, T value) {                                              \
        T before;                                                                                            \
        asm volatile("atom.relaxed." #SCOPE ".global.add.u" BITS " %0, [%1], %2;"                            \
                     : "=" REG(before)                                                                       \
                     : "l"(flag), REG(value)                                                                 \
                     : "memory");                                                                            \
        return before;                                                                                       \
    }                                                                                                        \
    /** atom.acq_rel.add: the value before; releases, and acquires what the adders before released (sm_70).  \
     */                                                                                                      \
    MOK_DEVICE T atom_acq_rel_##SCOPE##_add(T* flag, T value) {                                              \
        T before;                                                                                            \
        asm volatile("atom.acq_rel." #SCOPE ".global.add.u" BITS " %0, [%1], %2;"                            \
                     : "=" REG(before)                                                                       \
                     : "l"(flag), REG(value)                                                                 \
                     : "memory");                                                                            \
        return before;                                                                                       \
    }                                                                                                        \
    /** atom.relaxed.exch: the value before (sm_70). */                                                      \
    MOK_DEVICE T atom_relaxed_##SCOPE##_exchange(T* flag, T value) {                                         \
        T before;                                                                                            \
        asm volatile("atom.relaxed." #SCOPE ".global.exch.b" BITS " %0, [%1], %2;"                           \
                     : "=" REG(before)                                                                       \
                     : "l"(flag), REG(value)                                                                 \
                     : "memory");                                                                            \
        return before;                                                                                       \
    }

MOK_FLAG_WRAPPERS(gpu, uint32_t, "32", "r")
MOK_FLAG_WRAPPERS(gpu, uint64_t, "64", "l")
MOK_FLAG_WRAPPERS(sys, uint32_t, "32", "r")
MOK_FLAG_WRAPPERS(sys, uint64_t, "64", "l")

#undef MOK_FLAG_WRAPPERS

}  // namespace mok::ptx
