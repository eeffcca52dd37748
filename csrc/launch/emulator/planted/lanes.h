// Warp-wide instructions, named barriers, registers. One block of eight warps.
#pragma once

#include "csrc/launch/emulator/planted/bugs.h"

namespace mok::planted {

namespace lanes {

enum NamedBarrier : uint32_t { kReady = 1, kDone = 2, kAlone = 3 };

constexpr uint32_t kBytes = 4096;

/// Warp 0 hands 32 words to warp 1.
MOK_DEVICE uint32_t hand_over(const Params& p, uint32_t shared, uint32_t warp, uint32_t value) {
    const uint32_t word = shared + 4 * ptx::lane_idx();
    const uint32_t threads = p.has(Bug::kNamedCount) && warp == 1 ? 96 : 64;
    if (warp == 0) {
        ptx::store_shared(word, value);
        ptx::named_barrier_arrive(kReady, 64);
        ptx::named_barrier_sync(kDone, 64);
        return value;
    }
    ptx::named_barrier_sync(kReady, threads);
    value = ptx::load_shared<uint32_t>(word);
    ptx::named_barrier_arrive(kDone, 64);
    return value;
}

}  // namespace lanes

__global__ void lanes_kernel(const __grid_constant__ Params p) {
    using namespace lanes;
    const uint32_t shared = ptx::dynamic_shared(), thread = ptx::thread_idx();
    const uint32_t warp = ptx::warp_idx(), lane = ptx::lane_idx();
    // 248 registers a thread at launch.
    if (warp < 4) {
        if (p.has(Bug::kRegistersWrongWay)) ptx::registers_increase<40>();
        if (!p.has(Bug::kRegistersExceeded)) ptx::registers_decrease<216>();
    } else {
        ptx::registers_increase<256>();
    }
    uint32_t value = thread;
    if (!(p.has(Bug::kSkipsShuffle) && lane == 7 && warp == 2)) value = ptx::shuffle(value, 5);
    if (p.has(Bug::kOtherInstruction) && lane == 3) {
        value += ptx::ballot(true);
    } else {
        value += ptx::reduce_add(1u);
    }
    if (p.has(Bug::kLaneLeaves) && warp == 3 && lane == 4) return;
    if (warp == 3) {
        uint32_t matrices[4] = {value, value, value, value};
        ptx::store_matrix_x4(shared + 1024 + 16 * lane, matrices);
        if (!p.has(Bug::kReadsBeforeWarpSync)) ptx::sync_warp();
        value += ptx::load_shared<uint32_t>(shared + 1024 + 16 * (lane ^ 9)) & 1;
    }
    if (warp < 2) value = hand_over(p, shared, warp, value);
    if (p.has(Bug::kNamedOnceMore) && warp == 2) ptx::named_barrier_arrive(kReady, 64);
    if (p.has(Bug::kNamedAlone) && warp == 2) ptx::named_barrier_sync(kAlone, 64);
    ptx::store_global(p.out + thread, static_cast<float>(value));
    // Threads that have left are missed by nobody.
    if (warp == 5 || lane == 9) return;
    const uint32_t words = shared + 2048;
    ptx::store_shared(words + 4 * thread, thread);
    ptx::sync_block();
    if (warp == 7) return;
    ptx::store_global(p.out + 512 + thread,
                      static_cast<float>(ptx::load_shared<uint32_t>(words + 4 * (thread ^ 64))));
}

}  // namespace mok::planted
