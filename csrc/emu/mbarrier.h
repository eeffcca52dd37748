// mbarriers, for the machine's own files.
#pragma once

#include "csrc/emu/state.h"

namespace mok::emu {

/// The mbarrier at an offset of a block's shared memory, for an ordinary or an asynchronous use.
Mbarrier& find_mbarrier(Block& block, uint32_t offset);
Mbarrier& find_mbarrier_for_async(Block& block, uint32_t offset);
/// complete_tx.
void complete_bytes(Block& block, Mbarrier& barrier, uint32_t bytes);

}  // namespace mok::emu
