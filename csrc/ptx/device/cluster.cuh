// Thread block clusters and distributed shared memory.
#pragma once

#include "csrc/ptx/device/shared.cuh"

namespace mok::ptx {

/// %cluster_ctarank: this block's index in its cluster (sm_90).
MOK_DEVICE uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/// %cluster_nctarank: blocks in this cluster (sm_90).
MOK_DEVICE uint32_t cluster_blocks() {
    uint32_t blocks;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}

/// barrier.cluster.arrive.release: this thread's earlier writes are seen by those who wait (sm_90).
MOK_DEVICE void cluster_arrive_release() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

/// barrier.cluster.arrive.relaxed: orders nothing, as after fence_mbarrier_init_release_cluster (sm_90).
MOK_DEVICE void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

/// barrier.cluster.wait.acquire: until all threads of all blocks of the cluster have arrived (sm_90).
MOK_DEVICE void cluster_wait_acquire() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/// Arrive and wait; also the last thing before a block exits that others still write to (sm_90).
MOK_DEVICE void sync_cluster() {
    cluster_arrive_release();
    cluster_wait_acquire();
}

/// mapa: the shared::cluster address of `address` (own shared memory) in block `rank` of the cluster (sm_90).
MOK_DEVICE uint32_t cluster_address(uint32_t address, uint32_t rank) {
    uint32_t mapped;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

/// ld.shared::cluster.b32 from a cluster_address (sm_90).
MOK_DEVICE uint32_t load_shared_cluster(uint32_t mapped) {
    uint32_t value;
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(value) : "r"(mapped) : "memory");
    return value;
}

/// st.async: 16 bytes to another block's shared memory, completing 16 bytes on a barrier beside them; cheaper
/// than a store with a release and an acquire at cluster scope (sm_90).
MOK_DEVICE void store_async_cluster(uint32_t mapped, const uint32_t (&words)[4], uint32_t mapped_barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::
            "r"(mapped),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(mapped_barrier)
        : "memory");
}

}  // namespace mok::ptx
