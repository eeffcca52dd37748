// Bulk copies of contiguous bytes: addresses and sizes are multiples of 16. Stores and reductions form groups
// of the issuing thread; only that thread can wait for them.
#pragma once

#include "csrc/ptx/device/base.cuh"

namespace mok::ptx {

/// cp.async.bulk global to shared: completes `bytes` on an mbarrier of this block (sm_90).
MOK_DEVICE void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

/// The same with an L2 policy (sm_90).
MOK_DEVICE void bulk_load_hint(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                               uint64_t policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], "
        "%4;" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

/// cp.async.bulk shared to global, also to a peer's memory (sm_90).
MOK_DEVICE void bulk_store(void* destination, uint32_t source, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination),
                 "r"(source), "r"(bytes)
                 : "memory");
}

/// cp.reduce.async.bulk.add.f32: adds to global memory; element order among blocks is free, so the sum is
/// deterministic only where each element has one adder at a time (sm_90).
MOK_DEVICE void bulk_reduce_add_f32(void* destination, uint32_t source, uint32_t bytes) {
    asm volatile(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
        "r"(source), "r"(bytes)
        : "memory");
}

/// cp.async.bulk.commit_group: what this thread issued since the last one becomes a group (sm_90).
MOK_DEVICE void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// cp.async.bulk.wait_group: at most kGroups of this thread's newest groups are unfinished; the writes of the
/// others are complete, as a flag for another reader needs (sm_90).
template <int kGroups>
MOK_DEVICE void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}

/// cp.async.bulk.wait_group.read: only their sources have been read and may be overwritten (sm_90).
template <int kGroups>
MOK_DEVICE void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

/// cp.async.bulk.prefetch.L2 (sm_90).
MOK_DEVICE void bulk_prefetch_l2(const void* source, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
}

}  // namespace mok::ptx
