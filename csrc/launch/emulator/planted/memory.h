// Ordinary memory: bounds, what nobody wrote, and accesses that nothing orders. Two blocks of two warps;
// cooperative but for one bug.
#pragma once

#include "csrc/comm/device/grid_barrier.cuh"
#include "csrc/launch/emulator/planted/bugs.h"

namespace mok::planted {

namespace memory {

constexpr uint32_t kSum = 256, kBarrier = 272, kStaging = 512, kBytes = 1024;

MOK_DEVICE void reach_out(const Params& p, uint32_t shared) {
    if (p.has(Bug::kSharedOutOfBounds)) ptx::store_shared(shared + kBytes, 1u);
    if (p.has(Bug::kSharedMisaligned)) ptx::load_shared<uint64_t>(shared + 4);
    if (p.has(Bug::kGlobalOutOfBounds)) ptx::store_global(p.out + 4096, 1.0f);
    if (p.has(Bug::kGlobalMisaligned)) ptx::load_global_v4_hint(p.in + 1, ptx::kEvictFirst);
    if (p.has(Bug::kNullPointer)) ptx::load_global(static_cast<const float*>(nullptr));
    if (p.has(Bug::kWritesConstant)) ptx::store_global(const_cast<float*>(p.in), 1.0f);
}

/// Both blocks add to the same floats, one after the other.
MOK_DEVICE void reduce(const Params& p, uint32_t shared, ptx::Deadline& deadline) {
    if (ptx::block_idx() == 1 && !p.has(Bug::kTwoReductions)) {
        ptx::wait_reached_acquire_gpu(p.words + 8, 1, deadline);
        ptx::fence_proxy_async_global();
    }
    ptx::bulk_reduce_add_f32(p.out + 512, shared + kStaging, 256);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
    ptx::red_release_gpu_add(p.words + 8, 1u);
}

}  // namespace memory

__global__ void memory_kernel(const __grid_constant__ Params p) {
    using namespace memory;
    const uint32_t shared = ptx::dynamic_shared(), thread = ptx::thread_idx(), block = ptx::block_idx();
    ptx::Deadline deadline(p.limits);
    if (thread == 3 && block == 0) reach_out(p, shared);

    if (thread == 0 && !p.has(Bug::kReadsUnwrittenShared)) ptx::store_shared(shared + kSum, 0u);
    ptx::store_shared(shared + 4 * thread, thread);
    ptx::store_shared(shared + kStaging + 4 * thread, 1.0f);
    ptx::fence_proxy_async_shared();
    if (!p.has(Bug::kNoBlockSync)) ptx::sync_block();
    const uint32_t other = ptx::load_shared<uint32_t>(shared + 4 * (63 - thread));
    if (p.has(Bug::kPlainAdd)) {
        ptx::store_shared(shared + kSum, ptx::load_shared<uint32_t>(shared + kSum) + other);
    } else {
        ptx::red_relaxed_cta_shared_add(shared + kSum, other);
    }
    ptx::sync_block();
    float weights[4];
    for (uint32_t i = 0; i < 4; ++i) {
        if (!p.has(Bug::kReadsUninitialisedLocal) || i + thread != 9) weights[i] = 0.25f;
    }
    const float weight = weights[0] + weights[1] + weights[2] + weights[3];
    const uint32_t sum = ptx::load_shared<uint32_t>(shared + kSum);
    ptx::store_global(p.out + 64 * block + thread, weight * static_cast<float>(sum + other));
    if (p.has(Bug::kSameWordTwice)) ptx::store_global(p.out + 300, 1.0f);

    if (p.has(Bug::kPollsPlainly) && thread == 0) {
        if (block == 0) {
            ptx::store_global(p.words + 16, 1u);
        } else {
            while (ptx::load_global(p.words + 16) == 0) ptx::sleep_ns(100);
        }
    }
    if (thread == 0) reduce(p, shared, deadline);
    grid_barrier(p.words, ptx::num_blocks(), deadline);
    const float theirs = ptx::load_global(p.out + 64 * (1 - block) + thread);
    ptx::store_global(p.out + 128 + 64 * block + thread, theirs);
}

}  // namespace mok::planted
