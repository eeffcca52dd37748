// Two blocks of a cluster, a warp each: a word by DSMEM, one by a released arrival, a stage that both free.
#pragma once

#include "csrc/launch/emulator/planted/bugs.h"

namespace mok::planted {

namespace cluster {

constexpr uint32_t kLate = 0, kFreed = 8, kWord = 64, kLetter = 256, kTile = 1024, kBytes = 4096;

}  // namespace cluster

__global__ void cluster_kernel(const __grid_constant__ Params p) {
    using namespace cluster;
    const uint32_t shared = ptx::dynamic_shared(), thread = ptx::thread_idx();
    const uint32_t rank = ptx::cluster_rank(), peer = rank ^ 1;
    if (thread == 0) {
        ptx::mbar_init(shared + kLate, 1);
        ptx::mbar_init(shared + kFreed, 2);
        ptx::fence_mbarrier_init_release_cluster();
    }
    ptx::store_shared(shared + kWord + 4 * thread, 100 * rank + thread);
    ptx::sync_warp();
    if (p.has(Bug::kRelaxedClusterArrive)) {
        ptx::cluster_arrive_relaxed();
        ptx::cluster_wait_acquire();
    } else if (!p.has(Bug::kNoClusterSync)) {
        ptx::sync_cluster();
    }
    ptx::Deadline deadline(p.limits);
    const uint32_t theirs = ptx::load_shared_cluster(ptx::cluster_address(shared + kWord + 4 * thread, peer));
    ptx::store_global(p.out + 64 * rank + thread, static_cast<float>(theirs));
    if (thread == 0) {
        ptx::store_shared(shared + kLetter, 7000 + rank);
        const uint32_t late = ptx::cluster_address(shared + kLate, peer);
        if (p.has(Bug::kPublishesWithPlainArrive)) {
            ptx::mbar_arrive_cluster(late);
        } else {
            ptx::mbar_arrive_cluster_release(late);
        }
        if (p.has(Bug::kWaitsAtBlockScope)) {
            ptx::mbar_wait(shared + kLate, 0, deadline);
        } else {
            ptx::mbar_wait_acquire_cluster(shared + kLate, 0, deadline);
        }
        const uint32_t letter = ptx::load_shared_cluster(ptx::cluster_address(shared + kLetter, peer));
        ptx::store_global(p.out + 64 * rank + 32, static_cast<float>(letter));
        ptx::mbar_arrive(shared + kFreed);
        if (!p.has(Bug::kForgetsPeerRelease))
            ptx::mbar_arrive_cluster(ptx::cluster_address(shared + kFreed, peer));
        ptx::mbar_wait(shared + kFreed, 0, deadline);
    }
    ptx::sync_warp();
    if (!p.has(Bug::kLeavesCluster)) ptx::sync_cluster();
}

}  // namespace mok::planted
