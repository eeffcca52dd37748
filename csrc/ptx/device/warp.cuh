// Warp-wide instructions. All 32 lanes call them, in warp-uniform branches. They synchronise lanes; only
// sync_warp also orders memory.
#pragma once

#include "csrc/ptx/device/base.cuh"

namespace mok::ptx {

/// bar.warp.sync: all lanes are here and see each other's earlier writes (sm_30).
MOK_DEVICE void sync_warp() {
    __syncwarp(kAllLanes);
}

/// elect.sync: true in exactly one lane, which one is not said (sm_90).
MOK_DEVICE bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n.reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(elected)::"memory");
    return elected != 0;
}

/// vote.sync.ballot: bit i is lane i's predicate (sm_30).
MOK_DEVICE uint32_t ballot(bool predicate) {
    return __ballot_sync(kAllLanes, predicate);
}

/// vote.sync.all (sm_30).
MOK_DEVICE bool all_lanes(bool predicate) {
    return __all_sync(kAllLanes, predicate);
}

/// vote.sync.any (sm_30).
MOK_DEVICE bool any_lane(bool predicate) {
    return __any_sync(kAllLanes, predicate);
}

/// shfl.sync.idx: the value of lane `source` (sm_30).
template <typename T>
MOK_DEVICE T shuffle(T value, uint32_t source) {
    return __shfl_sync(kAllLanes, value, static_cast<int>(source));
}

/// shfl.sync.up: the value of the lane `distance` before this one; the own value in the first lanes (sm_30).
template <typename T>
MOK_DEVICE T shuffle_up(T value, uint32_t distance) {
    return __shfl_up_sync(kAllLanes, value, distance);
}

/// shfl.sync.bfly: the value of lane (own ^ mask) (sm_30).
template <typename T>
MOK_DEVICE T shuffle_xor(T value, uint32_t mask) {
    return __shfl_xor_sync(kAllLanes, value, static_cast<int>(mask));
}

/// match.any.sync: the lanes that hold the same value as this one (sm_70).
MOK_DEVICE uint32_t match_any(uint32_t value) {
    return __match_any_sync(kAllLanes, value);
}

/// redux.sync.add: the sum over all lanes, modulo 2^32 (sm_80).
MOK_DEVICE uint32_t reduce_add(uint32_t value) {
    return __reduce_add_sync(kAllLanes, value);
}

/// popc: the number of set bits (all architectures).
MOK_DEVICE uint32_t popcount(uint32_t value) {
    return static_cast<uint32_t>(__popc(value));
}

/// Inclusive prefix sum over the lanes, by five shuffles (sm_30).
MOK_DEVICE uint32_t inclusive_sum(uint32_t value, uint32_t lane) {
#pragma unroll
    for (uint32_t distance = 1; distance < kWarpThreads; distance *= 2) {
        const uint32_t before = shuffle_up(value, distance);
        if (lane >= distance) value += before;
    }
    return value;
}

}  // namespace mok::ptx
