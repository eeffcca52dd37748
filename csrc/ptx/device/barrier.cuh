// Barriers among the threads of one block. Ids 1 to 15 are free for kernels, which name them in an enum.
#pragma once

#include "csrc/ptx/device/base.cuh"

namespace mok::ptx {

/// bar.sync 0: all threads of the block are here and see each other's earlier writes (all architectures).
MOK_DEVICE void sync_block() {
    __syncthreads();
}

/// bar.red.or: sync_block that also says whether any thread came with `condition` (sm_20).
MOK_DEVICE bool sync_block_or(bool condition) {
    return __syncthreads_or(condition) != 0;
}

/// bar.sync: waits until `threads` threads (a multiple of 32) have arrived at barrier `id` (sm_20).
MOK_DEVICE void named_barrier_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// bar.arrive: counts as arrived and goes on; what was written before is seen by those who sync (sm_20).
MOK_DEVICE void named_barrier_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace mok::ptx
