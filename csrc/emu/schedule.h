// Who runs next. For the machine's own files.
#pragma once

#include "csrc/emu/state.h"

namespace mok::emu {

/// Thrown through a fiber to its start.
struct RunStopped {};
struct KernelTrapped {};

uint32_t random_bits();
/// True in `of_1024` of 1024 cases.
bool chance(uint32_t of_1024);
void choose_character(Policy policy, uint64_t seed);
/// How often a warp of a new block runs.
uint32_t choose_weight(bool starved_block);

void make_ready(Thread& thread);
void make_ready(Warp& warp, uint32_t lanes);
/// The current thread waits; others wake it by make_ready. Returns why.
Wake block_current(const Wait& wait);
/// The same in a wait that an idle machine looks at.
Wake block_bounded(const Wait& wait);
void yield_current();
/// The main context: runs threads until all is done or has failed.
void run_threads();
/// Where a fiber begins.
void thread_main();
/// Something happened that others may wait for.
inline void note_progress() {
    ++machine->progress;
}
/// Ends the run with this text, from any context.
[[noreturn]] void stop_run(const std::string& error);

}  // namespace mok::emu
