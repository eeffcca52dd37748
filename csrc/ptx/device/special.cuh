// Special registers. Grids and blocks are one-dimensional.
#pragma once

#include "csrc/ptx/device/base.cuh"

namespace mok::ptx {

/// %tid.x (all architectures).
MOK_DEVICE uint32_t thread_idx() {
    return threadIdx.x;
}

/// %ntid.x (all architectures).
MOK_DEVICE uint32_t block_threads() {
    return blockDim.x;
}

/// %ctaid.x (all architectures).
MOK_DEVICE uint32_t block_idx() {
    return blockIdx.x;
}

/// %nctaid.x (all architectures).
MOK_DEVICE uint32_t num_blocks() {
    return gridDim.x;
}

/// %laneid (all architectures).
MOK_DEVICE uint32_t lane_idx() {
    uint32_t lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

/// The warp's index in its block, from lane 0 by a shuffle, so that the compiler knows it to be the same in
/// all lanes and keeps what depends on it in uniform registers (sm_30).
MOK_DEVICE uint32_t warp_idx() {
    return __shfl_sync(kAllLanes, threadIdx.x / kWarpThreads, 0);
}

/// %lanemask_lt: the lanes before this one (all architectures).
MOK_DEVICE uint32_t lanes_before() {
    uint32_t mask;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(mask));
    return mask;
}

/// %globaltimer: nanoseconds, the same clock on all multiprocessors, in steps of up to a microsecond (sm_30).
MOK_DEVICE uint64_t timer_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    return now;
}

/// %clock64: cycles of this multiprocessor (all architectures).
MOK_DEVICE uint64_t clock_cycles() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
    return now;
}

/// nanosleep: suspends the thread for about so many nanoseconds, at most twice as long (sm_70).
MOK_DEVICE void sleep_ns(uint32_t nanoseconds) {
    asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds) : "memory");
}

/// trap: ends the kernel with an error, and the context perhaps before what was stored for the host is there:
/// trap_recorded waits for that. A setmaxnreg branch with a trap keeps its own number of registers, seen with
/// ptxas 13.0 (all architectures).
MOK_DEVICE void trap() {
    asm volatile("trap;");
}

}  // namespace mok::ptx
