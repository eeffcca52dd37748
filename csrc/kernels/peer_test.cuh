// Kernels for tests and benchmarks of the windows and barriers between ranks.
#pragma once

#include "csrc/comm/device/peer_barrier.cuh"

namespace mok {

struct CopyWordsParams {
    uint64_t* to;  // either may lie in any rank's window
    const uint64_t* from;
    int64_t words;
};

__global__ void copy_words_kernel(const __grid_constant__ CopyWordsParams params) {
    const int64_t threads = int64_t{ptx::num_blocks()} * ptx::block_threads();
    int64_t word = int64_t{ptx::block_idx()} * ptx::block_threads() + ptx::thread_idx();
    for (; word < params.words; word += threads) {
        ptx::store_global(params.to + word, ptx::load_global(params.from + word));
    }
}

struct PeerRoundsParams {
    PeerGroup group;        // of block 0's rank
    bool blocks_are_ranks;  // virtual ranks: block b is rank b, and group is rank 0's
    uint32_t rounds;
    int64_t data_offset;  // in each window: a word for each rank
    uint64_t first;       // value of the first round
    uint32_t* wrong;      // [blocks]: counts words that were not those of the round
    uint32_t* passed;     // [blocks]: rounds that both barriers let pass
};

/// Each round every rank writes to all, all meet, each reads what it was sent, and all meet again.
__global__ void peer_rounds_kernel(const __grid_constant__ PeerRoundsParams params) {
    const uint32_t thread = ptx::thread_idx(), block = ptx::block_idx();
    PeerGroup group = params.group;
    if (params.blocks_are_ranks) {
        group.rank = static_cast<int32_t>(block);
        group.window += block * group.stride;
        group.record += block;
    }
    const bool is_rank = thread < static_cast<uint32_t>(group.num_ranks);
    PeerOutcome outcome = PeerOutcome::kPassed;
    for (uint32_t round = 0; round < params.rounds; ++round) {
        const uint64_t value = params.first + round;
        if (is_rank) {
            char* window = window_of(group, thread) + params.data_offset;
            ptx::store_global(reinterpret_cast<uint64_t*>(window) + group.rank, value);
        }
        outcome = peer_barrier(group, PeerPhase::kInputs);
        if (outcome != PeerOutcome::kPassed) break;
        if (is_rank) {
            const auto* received = reinterpret_cast<const uint64_t*>(group.window + params.data_offset);
            if (ptx::load_global(received + thread) != value)
                ptx::red_relaxed_gpu_add(params.wrong + block, 1u);
        }
        outcome = peer_barrier(group, PeerPhase::kOutputs);
        if (outcome != PeerOutcome::kPassed) break;
        if (thread == 0) ptx::store_global(params.passed + block, round + 1);
    }
    if (outcome == PeerOutcome::kExpired && thread == 0) ptx::trap();
}

}  // namespace mok
