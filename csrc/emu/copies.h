// Asynchronous operations in flight. For the machine's own files.
#pragma once

#include "csrc/emu/state.h"

namespace mok::emu {

struct PendingCopy {
    enum class Kind : uint8_t { kLoad, kStore, kMessage };

    Kind kind;
    std::unique_ptr<Copy> copy;
    Thread* issuer;
    CopyPlace place;
    uint32_t barrier = 0;               // loads: its offset, the same in each target
    std::vector<Block*> targets;        // loads: whose shared memory is written
    std::vector<AsyncRecord*> records;  // loads: one a target; stores: source, destination
    uint64_t group = 0;                 // stores
    bool has_read = false;
    std::vector<uint8_t> source;  // stores: what was read; messages: what is sent
};

bool has_active_copies();
/// Moves one of them (or one warp's wgmma) a step on.
void step_copies();
/// One that was held back may complete from now on. False if none is.
bool let_held_copy_go();
/// A trapped launch's copies vanish.
void drop_copies(const LaunchState& launch);
/// Fails unless the block's copies are done and waited for.
void check_copies_at_exit(Block& block);

/// Executes the oldest queued wgmma of a warp.
void step_wgmma(Warp& warp);

}  // namespace mok::emu
