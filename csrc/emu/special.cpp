// Special registers.

#include "csrc/emu/report.h"
#include "csrc/emu/state.h"

namespace mok::emu {

uint32_t thread_idx() {
    return machine->current->idx();
}

uint32_t lane_idx() {
    return machine->current->lane;
}

uint32_t warp_idx() {
    return machine->current->warp->idx;
}

uint32_t block_threads() {
    return machine->current->block().num_threads;
}

uint32_t block_idx() {
    return machine->current->block().idx;
}

uint32_t num_blocks() {
    return machine->current->block().launch->launch->blocks;
}

uint32_t cluster_rank() {
    return machine->current->block().rank_in_cluster;
}

uint32_t cluster_blocks() {
    return static_cast<uint32_t>(machine->current->block().cluster->blocks.size());
}

}  // namespace mok::emu
