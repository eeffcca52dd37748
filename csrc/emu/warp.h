// Warp-wide instructions. For the machine's own files.
#pragma once

#include "csrc/emu/state.h"

namespace mok::emu {

/// The current lane comes to an instruction that waits for all lanes. True in the last one, which acts for
/// all (warp.exchange has the operands) and then calls depart; the others return false once they are ready.
bool meet(const char* instruction, const void* operands, size_t bytes, bool uniform, Site site,
          const Wait& wait = {WaitKind::kLanes});
/// The lanes that have met, for the last one: the instruction is over, and `wakes` makes the others ready.
uint32_t depart(Warp& warp, bool wakes);

}  // namespace mok::emu
