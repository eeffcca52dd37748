// csrc/ptx/device/cluster.cuh on the emulated machine.
#pragma once

#include "csrc/ptx/host/shared.h"

namespace mok::ptx {

/// %cluster_ctarank.
MOK_DEVICE uint32_t cluster_rank() {
    return emu::cluster_rank();
}

/// %cluster_nctarank.
MOK_DEVICE uint32_t cluster_blocks() {
    return emu::cluster_blocks();
}

/// barrier.cluster.arrive.release.
MOK_DEVICE void cluster_arrive_release(Site site = Site::current()) {
    if (emu::is_left_out("cluster_arrive_release", site)) return;
    emu::cluster_arrive(true, site);
}

/// barrier.cluster.arrive.relaxed.
MOK_DEVICE void cluster_arrive_relaxed(Site site = Site::current()) {
    if (emu::is_left_out("cluster_arrive_relaxed", site)) return;
    emu::cluster_arrive(false, site);
}

/// barrier.cluster.wait.acquire.
MOK_DEVICE void cluster_wait_acquire(Site site = Site::current()) {
    if (emu::is_left_out("cluster_wait_acquire", site)) return;
    emu::cluster_wait(site);
}

/// Arrive and wait.
MOK_DEVICE void sync_cluster(Site site = Site::current()) {
    if (emu::is_left_out("sync_cluster", site)) return;
    emu::cluster_arrive(true, site);
    emu::cluster_wait(site);
}

/// mapa.
MOK_DEVICE uint32_t cluster_address(uint32_t address, uint32_t rank) {
    return emu::cluster_address(address, rank);
}

/// ld.shared::cluster.b32.
MOK_DEVICE uint32_t load_shared_cluster(uint32_t mapped, Site site = Site::current()) {
    emu::enter("load_shared_cluster", site);
    uint32_t value;
    memcpy(&value, emu::shared_access(mapped, sizeof(value), emu::kRead), sizeof(value));
    return value;
}

/// st.async.
MOK_DEVICE void store_async_cluster(uint32_t mapped, const uint32_t (&words)[4], uint32_t mapped_barrier,
                                    Site site = Site::current()) {
    emu::enter("store_async_cluster", site);
    emu::store_async(mapped, words, mapped_barrier);
}

}  // namespace mok::ptx
