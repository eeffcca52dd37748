// in -> bulk load -> ring of stages -> a warp doubles it -> staging -> bulk store -> flag -> another block.
//
// Block 0: warp 0 loads, warp 1 computes, warp 2 stores. Block 1: warp 0 loads the result and copies it to
// the second half of `out`.
#pragma once

#include "csrc/launch/emulator/planted/bugs.h"

namespace mok::planted {

namespace ring {

constexpr uint32_t kRounds = 6, kStages = 2, kChunk = 128;  // floats a round
constexpr uint32_t kChunkBytes = 4 * kChunk;
constexpr uint32_t kFull = 0, kEmpty = 16, kStaged = 32, kFree = 40, kResult = 48, kUnused = 56;
constexpr uint32_t kData = 128, kStaging = kData + kStages * kChunkBytes, kBytes = kStaging + 2 * kChunkBytes;

MOK_DEVICE void load(const Params& p, uint32_t shared, ptx::Deadline& deadline) {
    for (uint32_t round = 0; round < kRounds; ++round) {
        const uint32_t stage = round % kStages, parity = round / kStages & 1;
        const uint32_t full = shared + kFull + 8 * stage;
        if (!p.has(Bug::kRefillsWithoutEmpty)) {
            ptx::mbar_wait(shared + kEmpty + 8 * stage, parity ^ 1, deadline);
        }
        uint32_t bytes = kChunkBytes;
        if (p.has(Bug::kExpectsTooFewBytes)) bytes -= 16;
        if (p.has(Bug::kExpectsTooManyBytes)) bytes += 16;
        ptx::mbar_arrive_expect(full, bytes);
        const uint32_t moved = kChunkBytes - (p.has(Bug::kUnalignedBulk) ? 8 : 0);
        ptx::bulk_load(shared + kData + stage * kChunkBytes, p.in + round * kChunk, moved,
                       p.has(Bug::kUsesNoMbarrier) ? shared + kUnused : full);
    }
    if (p.has(Bug::kLeavesUnawaitedLoad)) {
        ptx::mbar_arrive_expect(shared + kResult, kChunkBytes);
        ptx::bulk_load(shared + kStaging + kChunkBytes, p.in, kChunkBytes, shared + kResult);
    }
    if (p.has(Bug::kLeavesHalfAPhase)) {  // nobody arrives, so nobody can know that the load has landed
        ptx::mbar_expect(shared + kResult, kChunkBytes);
        ptx::bulk_load(shared + kStaging + kChunkBytes, p.in, kChunkBytes, shared + kResult);
    }
    if (p.has(Bug::kOverwritesMbarrier)) ptx::store_shared(shared + kResult, 0u);
}

MOK_DEVICE void compute(const Params& p, uint32_t shared, ptx::Deadline& deadline) {
    const uint32_t lane = ptx::lane_idx();
    for (uint32_t round = 0; round < kRounds; ++round) {
        const uint32_t stage = round % kStages;
        const uint32_t parity = (round / kStages & 1) ^ (p.has(Bug::kWrongParity) && round == 3 ? 1 : 0);
        if (!p.has(Bug::kReadsWithoutFull)) {
            ptx::mbar_wait(shared + kFull + 8 * stage, parity, deadline);
        }
        ptx::Words4 words = ptx::load_shared<ptx::Words4>(shared + kData + stage * kChunkBytes + 16 * lane);
        if (!p.has(Bug::kNoProxyFenceBeforeRefill)) ptx::fence_proxy_async_shared();
        ptx::sync_warp();
        if (lane == 0) ptx::mbar_arrive(shared + kEmpty + 8 * stage);
        if (lane == 0 && round == 1 && p.has(Bug::kArrivesTwice)) {
            ptx::mbar_arrive(shared + kEmpty + 8 * stage);
        }
        for (uint32_t& word : words.word) word = ptx::float_bits(2 * ptx::bits_float(word));
        ptx::mbar_wait(shared + kFree, (round & 1) ^ 1, deadline);
        ptx::store_shared(shared + kStaging + 16 * lane, words);
        if (!p.has(Bug::kNoProxyFenceBeforeStore)) ptx::fence_proxy_async_shared();
        if (!p.has(Bug::kNoWarpSyncBeforeHandOver)) ptx::sync_warp();
        if (lane == 0) ptx::mbar_arrive(shared + kStaged);
    }
}

MOK_DEVICE void store(const Params& p, uint32_t shared, ptx::Deadline& deadline) {
    for (uint32_t round = 0; round < kRounds; ++round) {
        ptx::mbar_wait(shared + kStaged, round & 1, deadline);
        ptx::bulk_store(p.out + round * kChunk, shared + kStaging, kChunkBytes);
        if (!p.has(Bug::kForgetsCommit)) ptx::bulk_commit();
        if (!p.has(Bug::kOverwritesStaging)) ptx::bulk_wait_read<0>();
        ptx::mbar_arrive(shared + kFree);
    }
    if (!p.has(Bug::kFlagsAfterReadOnly)) ptx::bulk_wait<0>();
    ptx::red_release_gpu_add(p.words, 1u);
    if (p.has(Bug::kLeavesUnreadStore)) {
        ptx::bulk_store(p.out + 2048, shared + kStaging, kChunkBytes);
        ptx::bulk_commit();
    }
}

MOK_DEVICE void follow(const Params& p, uint32_t shared, ptx::Deadline& deadline) {
    ptx::wait_reached_acquire_gpu(p.words, 1, deadline);
    if (!p.has(Bug::kNoGlobalProxyFence)) ptx::fence_proxy_async_global();
    ptx::mbar_arrive_expect(shared + kResult, kChunkBytes);
    ptx::bulk_load(shared + kData, p.out + 2 * kChunk, kChunkBytes, shared + kResult);
    ptx::mbar_wait(shared + kResult, 0, deadline);
    for (uint32_t i = 0; i < kChunk; ++i) {
        ptx::store_global(p.out + 1024 + i, ptx::load_shared<float>(shared + kData + 4 * i));
    }
}

}  // namespace ring

__global__ void ring_kernel(const __grid_constant__ Params p) {
    using namespace ring;
    const uint32_t shared = ptx::dynamic_shared(), warp = ptx::warp_idx(), lane = ptx::lane_idx();
    if (ptx::thread_idx() == 0) {
        for (uint32_t stage = 0; stage < kStages; ++stage) {
            ptx::mbar_init(shared + kFull + 8 * stage, 1);
            ptx::mbar_init(shared + kEmpty + 8 * stage, 1);
        }
        ptx::mbar_init(shared + kStaged, 1);
        ptx::mbar_init(shared + kFree, 1);
        ptx::mbar_init(shared + kResult, 1);
        if (!p.has(Bug::kNoInitFence)) ptx::fence_mbarrier_init_release_cluster();
    }
    if (!p.has(Bug::kNoBarrierAfterInit)) ptx::sync_block();
    ptx::Deadline deadline(p.limits);
    if (ptx::block_idx() == 1) {
        if (warp == 0 && lane == 0) follow(p, shared, deadline);
    } else if (warp == 0) {
        if (lane == 0) load(p, shared, deadline);
    } else if (warp == 1) {
        compute(p, shared, deadline);
    } else if (lane == 0) {
        store(p, shared, deadline);
    }
}

}  // namespace mok::planted
