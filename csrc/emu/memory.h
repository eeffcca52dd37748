// Addresses. For the machine's own files.
#pragma once

#include "csrc/emu/state.h"

namespace mok::emu {

/// A shared address as the current thread means it.
struct SharedPlace {
    Block* block;
    uint32_t offset;
};

/// Fails if the range does not lie in the block's dynamic shared memory, or the block has left.
SharedPlace locate(uint32_t address, uint32_t bytes, uint32_t alignment);
/// Remembers that another block's shared memory was used: that block must come after it before it leaves.
void use_remote(Block& block);
/// The region of a global range; fails if there is none or the current thread may not touch it.
RegionState& locate_global(const void* address, size_t bytes, bool writes);

}  // namespace mok::emu
