// Test kernels of csrc/ptx and csrc/comm between blocks: flags, counters, the grid barrier.
// tests/ptx_cases/grid.py has what they must give.
#pragma once

#include "csrc/comm/device/grid_barrier.cuh"
#include "csrc/kernels/ptx_test_params.cuh"

namespace mok {

enum class FlagTestMode : int64_t {
    kStoreGpu = 0,
    kAddGpu = 1,
    kStoreSys = 2,
    kAddSys = 3,
    kStoreSys64 = 4,
    kAddSys64 = 5,
    kFenceGpu = 6,
    kFenceSys = 7,
    kAtomGpu = 8,
};

namespace ptx_test_detail {

/// Raises `flag` to `round` (from round - 1), with a release.
MOK_DEVICE void raise_flag(FlagTestMode mode, uint32_t* flag, uint32_t round) {
    uint64_t* flag64 = reinterpret_cast<uint64_t*>(flag);
    switch (mode) {
        case FlagTestMode::kStoreGpu:
            return ptx::st_release_gpu(flag, round);
        case FlagTestMode::kAddGpu:
            return ptx::red_release_gpu_add(flag, 1u);
        case FlagTestMode::kStoreSys:
            return ptx::st_release_sys(flag, round);
        case FlagTestMode::kAddSys:
            return ptx::red_release_sys_add(flag, 1u);
        case FlagTestMode::kStoreSys64:
            return ptx::st_release_sys(flag64, uint64_t{round});
        case FlagTestMode::kAddSys64:
            return ptx::red_release_sys_add(flag64, uint64_t{1});
        case FlagTestMode::kFenceGpu:
            ptx::fence_acq_rel_gpu();
            return ptx::st_relaxed_gpu(flag, round);
        case FlagTestMode::kFenceSys:
            ptx::fence_acq_rel_sys();
            return ptx::st_relaxed_sys(flag, round);
        case FlagTestMode::kAtomGpu:
            ptx::atom_acq_rel_gpu_add(flag, 1u);
            return;
    }
}

MOK_DEVICE bool wait_flag(FlagTestMode mode, const uint32_t* flag, uint32_t round, ptx::Deadline& deadline) {
    switch (mode) {
        case FlagTestMode::kStoreSys:
        case FlagTestMode::kAddSys:
        case FlagTestMode::kFenceSys:
            return ptx::wait_reached_acquire_sys(flag, round, deadline);
        case FlagTestMode::kStoreSys64:
        case FlagTestMode::kAddSys64:
            return ptx::wait_reached_acquire_sys(reinterpret_cast<const uint64_t*>(flag), round, deadline);
        default:
            return ptx::wait_reached_acquire_gpu(flag, round, deadline);
    }
}

}  // namespace ptx_test_detail

/// Block 0 hands 64 words to block 1, so many rounds, through flags in out[1] (words 64 and 96; the data
/// before them); block 1 writes what it saw to out[0]. numbers: rounds, mode.
__global__ void ptx_flag_kernel(const __grid_constant__ PtxTestParams params) {
    const uint32_t thread = ptx::thread_idx(), threads = ptx::block_threads();
    const uint32_t rounds = static_cast<uint32_t>(params.numbers[0]);
    const FlagTestMode mode = static_cast<FlagTestMode>(params.numbers[1]);
    uint32_t* data = static_cast<uint32_t*>(params.out[1]);
    uint32_t *ping = data + 64, *pong = data + 96;
    ptx::Deadline deadline(params.limits);
    for (uint32_t round = 1; round <= rounds; ++round) {
        bool in_time = true;
        if (ptx::block_idx() == 0) {
            ptx::store_global(data + thread, round * 1000 + thread);
            ptx::sync_block();
            if (thread == 0) {
                ptx_test_detail::raise_flag(mode, ping, round);
                in_time = ptx_test_detail::wait_flag(mode, pong, round, deadline);
            }
        } else {
            if (thread == 0) in_time = ptx_test_detail::wait_flag(mode, ping, round, deadline);
            ptx::sync_block();
            params.put(0, (round - 1) * threads + thread, ptx::load_global(data + thread));
            ptx::sync_block();
            if (thread == 0) ptx_test_detail::raise_flag(mode, pong, round);
        }
        if (ptx::sync_block_or(!in_time)) return;
    }
}

/// Every thread takes a ticket and signs its place in out[0]; sums of 32 and 64 bits in out[1].
__global__ void ptx_ticket_kernel(const __grid_constant__ PtxTestParams params) {
    uint32_t* counters = static_cast<uint32_t*>(params.out[1]);
    const uint32_t thread = ptx::block_idx() * ptx::block_threads() + ptx::thread_idx();
    const uint32_t ticket = ptx::atom_relaxed_gpu_add(counters, 1u);
    params.put(0, ticket, thread + 1);
    ptx::red_relaxed_gpu_add(counters + 2, thread);
    ptx::red_relaxed_sys_add(reinterpret_cast<uint64_t*>(counters + 4), uint64_t{thread} << 20);
}

/// Each block writes, all meet, each adds up what all wrote; numbers: rounds, blocks that take part.
/// out[0] [rounds, blocks]; out[1]: the barrier's word, then from word 32 on a word a block.
__global__ void ptx_grid_barrier_kernel(const __grid_constant__ PtxTestParams params) {
    const uint32_t rounds = static_cast<uint32_t>(params.numbers[0]);
    const uint32_t blocks = static_cast<uint32_t>(params.numbers[1]);
    const uint32_t thread = ptx::thread_idx(), block = ptx::block_idx();
    if (block >= blocks) return;
    uint32_t* word = static_cast<uint32_t*>(params.out[1]);
    uint32_t* slots = word + 32;
    ptx::Deadline deadline(params.limits);
    for (uint32_t round = 1; round <= rounds; ++round) {
        if (thread == 0) ptx::store_global(slots + block, round * (block + 1));
        if (!grid_barrier(word, blocks, deadline)) return;
        if (ptx::warp_idx() == 0) {
            uint32_t sum = 0;
            for (uint32_t other = thread; other < blocks; other += ptx::kWarpThreads) {
                sum += ptx::load_global(slots + other);
            }
            sum = ptx::reduce_add(sum);
            if (thread == 0) params.put(0, (round - 1) * blocks + block, sum);
        }
        if (!grid_barrier(word, blocks, deadline)) return;
    }
}

}  // namespace mok
