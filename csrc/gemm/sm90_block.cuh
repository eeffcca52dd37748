// How a block of an sm_90a GEMM kernel begins and ends.
#pragma once

#include "csrc/gemm/sm90_shared.cuh"

namespace mok::sm90 {

/// All threads: barriers are ready. False, in all of them, where a wait of this or an earlier kernel of the
/// workspace has expired or it was told to end: then the kernel leaves at once.
MOK_DEVICE bool begin_block(const Shared& shared, const ptx::WaitLimits& limits) {
    if (ptx::thread_idx() == 0) shared.init_barriers();
    return !ptx::sync_block_or(ptx::ld_relaxed_gpu(limits.expired) != 0);
}

/// All threads, outside the branches with registers of their own: traps where a wait of this kernel ran out
/// of time. Without a record the workspace was told to end, which is no error of this kernel.
MOK_DEVICE void end_block(const ptx::WaitLimits& limits, bool is_expired) {
    if (!ptx::sync_block_or(is_expired)) return;
    if (ptx::thread_idx() == 0 && ptx::ld_relaxed_sys(&limits.record->complete) != 0) ptx::trap();
}

}  // namespace mok::sm90
