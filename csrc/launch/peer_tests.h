// Launches of csrc/kernels/peer_test.cuh, for tests and benchmarks.
#pragma once

#include <cstdint>

#include "csrc/layout/peer_record.h"

namespace mok::launch {

/// Copies bytes (a multiple of 8) on `stream` by ordinary loads and stores of the current device.
void launch_copy_words(void* to, const void* from, int64_t bytes, void* stream);

struct PeerRounds {
    PeerGroup group;
    bool blocks_are_ranks;  // one launch plays all ranks, a block each; group is rank 0's
    uint32_t rounds;
    int64_t data_offset;
    uint64_t first;
    uint32_t* wrong;   // device memory, one word per block
    uint32_t* passed;  // the same
};

/// Rounds of two barriers each inside one kernel, with data passed between all ranks.
void launch_peer_rounds(const PeerRounds& rounds, void* stream);

}  // namespace mok::launch
