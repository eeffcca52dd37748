// A barrier among the first blocks of a cooperative grid.
//
// One word, zero in fresh memory and never reset: every block adds 1, block 0 adds what is missing to 2^31,
// so that the top bit flips when all have arrived and the lower bits are 0 again. A block that is late in
// looking still sees the flip, because the next one needs its own arrival. Launches in stream order may use
// one word with different numbers of blocks, and graph replays need nothing; within a launch the blocks stay
// the same.
#pragma once

#include "csrc/ptx/ptx.h"

namespace mok {

/// All threads of blocks 0 to num_blocks - 1 call it; afterwards they see each other's earlier writes. False,
/// in all threads of the block, when the time is up: then nothing may be read that others were to write.
MOK_DEVICE bool grid_barrier(uint32_t* word, uint32_t num_blocks, ptx::Deadline& deadline) {
    constexpr uint32_t kFlip = 0x80000000u;
    bool in_time = true;
    ptx::sync_block();
    if (ptx::thread_idx() == 0) {
        const uint32_t arrival = ptx::block_idx() == 0 ? kFlip - (num_blocks - 1) : 1;
        const uint32_t before = ptx::atom_acq_rel_gpu_add(word, arrival);
        in_time = ptx::wait_changed_acquire_gpu(word, before, kFlip, deadline);
    }
    return !ptx::sync_block_or(!in_time);
}

}  // namespace mok
