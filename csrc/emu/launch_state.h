// The life of launches, blocks and threads. For the machine's own files.
#pragma once

#include "csrc/emu/state.h"

namespace mok::emu {

void start_due_streams();
/// Starts a rank that was to be late. False if all have begun.
bool start_waiting_stream();
void exit_thread(Thread& thread);
void trap_launch(LaunchState& launch);
/// Called when a copy of the launch has completed.
void copy_done(LaunchState& launch);
/// Gives back the stacks and the shared memory of blocks that have ended. On the main context only.
void reap_blocks();

/// sync_block, cluster barriers and warp-wide instructions no longer wait for a thread that has exited.
void forget_exited(Thread& thread);
void check_barriers_at_exit(Block& block);
void check_wgmmas_at_exit(Block& block);
uint32_t registers_at_launch(const Launch& launch);

}  // namespace mok::emu
