// csrc/ptx/device/warp.cuh on the emulated machine. Lanes meet in each of them; only sync_warp orders memory.
#pragma once

#include <bit>

#include "csrc/ptx/host/base.h"

namespace mok::ptx {

namespace warp_detail {

struct Shuffle {
    uint64_t value;
    uint32_t source;  // a lane outside of 0 to 31: the own value
};

/// Every lane gets the value of the lane that it names; of one that has left, a wrong number.
inline void shuffle(const emu::Lanes<Shuffle>& lanes, uint64_t (&results)[emu::kLanes]) {
    for (uint32_t lane = 0; lane < emu::kLanes; ++lane) {
        if ((lanes.present >> lane & 1) == 0) continue;
        const uint32_t source = lanes[lane].source < emu::kLanes ? lanes[lane].source : lane;
        results[lane] = (lanes.present >> source & 1) != 0 ? lanes[source].value : ~uint64_t{0};
    }
}

inline void ballot(const emu::Lanes<uint32_t>& lanes, uint64_t (&results)[emu::kLanes]) {
    uint64_t mask = 0;
    for (uint32_t lane = 0; lane < emu::kLanes; ++lane) {
        if ((lanes.present >> lane & 1) != 0 && lanes[lane] != 0) mask |= uint64_t{1} << lane;
    }
    // The lanes that take part come with it, for votes.
    for (uint64_t& result : results) result = mask | uint64_t{lanes.present} << 32;
}

inline void match_any(const emu::Lanes<uint32_t>& lanes, uint64_t (&results)[emu::kLanes]) {
    for (uint32_t lane = 0; lane < emu::kLanes; ++lane) {
        if ((lanes.present >> lane & 1) == 0) continue;
        for (uint32_t other = 0; other < emu::kLanes; ++other) {
            const bool is_same = (lanes.present >> other & 1) != 0 && lanes[other] == lanes[lane];
            results[lane] |= uint64_t{is_same} << other;
        }
    }
}

inline void reduce_add(const emu::Lanes<uint32_t>& lanes, uint64_t (&results)[emu::kLanes]) {
    uint32_t sum = 0;
    for (uint32_t lane = 0; lane < emu::kLanes; ++lane) {
        if ((lanes.present >> lane & 1) != 0) sum += lanes[lane];
    }
    for (uint64_t& result : results) result = sum;
}

template <typename T>
T shuffle_from(const char* instruction, T value, uint32_t source, Site site) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
    Shuffle operands{0, source};
    memcpy(&operands.value, &value, sizeof(T));
    const uint64_t result = emu::exchange<Shuffle, shuffle>(instruction, operands, site);
    memcpy(&value, &result, sizeof(T));
    return value;
}

inline uint64_t vote(const char* instruction, bool predicate, Site site) {
    return emu::exchange<uint32_t, ballot>(instruction, predicate ? 1u : 0u, site);
}

}  // namespace warp_detail

/// bar.warp.sync.
MOK_DEVICE void sync_warp(Site site = Site::current()) {
    if (emu::is_left_out("sync_warp", site)) return;
    emu::sync_warp(site);
}

/// elect.sync: another lane with another seed.
MOK_DEVICE bool elect_one(Site site = Site::current()) {
    return emu::elect_one(site);
}

/// vote.sync.ballot.
MOK_DEVICE uint32_t ballot(bool predicate, Site site = Site::current()) {
    return static_cast<uint32_t>(warp_detail::vote("ballot", predicate, site));
}

/// vote.sync.all.
MOK_DEVICE bool all_lanes(bool predicate, Site site = Site::current()) {
    const uint64_t votes = warp_detail::vote("all_lanes", predicate, site);
    return static_cast<uint32_t>(votes) == votes >> 32;
}

/// vote.sync.any.
MOK_DEVICE bool any_lane(bool predicate, Site site = Site::current()) {
    return static_cast<uint32_t>(warp_detail::vote("any_lane", predicate, site)) != 0;
}

/// shfl.sync.idx.
template <typename T>
MOK_DEVICE T shuffle(T value, uint32_t source, Site site = Site::current()) {
    return warp_detail::shuffle_from("shuffle", value, source % kWarpThreads, site);
}

/// shfl.sync.up.
template <typename T>
MOK_DEVICE T shuffle_up(T value, uint32_t distance, Site site = Site::current()) {
    return warp_detail::shuffle_from("shuffle_up", value, emu::lane_idx() - distance, site);
}

/// shfl.sync.bfly.
template <typename T>
MOK_DEVICE T shuffle_xor(T value, uint32_t mask, Site site = Site::current()) {
    return warp_detail::shuffle_from("shuffle_xor", value, emu::lane_idx() ^ mask, site);
}

/// match.any.sync.
MOK_DEVICE uint32_t match_any(uint32_t value, Site site = Site::current()) {
    return static_cast<uint32_t>(emu::exchange<uint32_t, warp_detail::match_any>("match_any", value, site));
}

/// redux.sync.add.
MOK_DEVICE uint32_t reduce_add(uint32_t value, Site site = Site::current()) {
    return static_cast<uint32_t>(emu::exchange<uint32_t, warp_detail::reduce_add>("reduce_add", value, site));
}

/// popc.
MOK_DEVICE uint32_t popcount(uint32_t value) {
    return static_cast<uint32_t>(std::popcount(value));
}

/// Inclusive prefix sum over the lanes, by five shuffles.
MOK_DEVICE uint32_t inclusive_sum(uint32_t value, uint32_t lane, Site site = Site::current()) {
    for (uint32_t distance = 1; distance < kWarpThreads; distance *= 2) {
        const uint32_t before = shuffle_up(value, distance, site);
        if (lane >= distance) value += before;
    }
    return value;
}

}  // namespace mok::ptx
