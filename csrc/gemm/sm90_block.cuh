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
    if (ptx::thread_idx() == 0 && ptx::ld_relaxed_sys(&limits.record->complete) != 0) {
        ptx::trap_recorded(limits);
    }
}

/// A kernel's whole block, from its start to its end. Each role is a function that the whole warp calls,
/// `loader` one thread of it; it returns whether a wait has expired, and in either case once no copy that it
/// has started uses shared memory any more. `consumer` takes the index of the consumer warp.
template <typename Loader, typename Scheduler, typename Store, typename Pull, typename Consumer>
MOK_DEVICE void run_block(const Shared& shared, const ptx::WaitLimits& limits, const Loader& loader,
                          const Scheduler& scheduler, const Store& store, const Pull& pull,
                          const Consumer& consumer) {
    const uint32_t warp = ptx::warp_idx();
    if (!begin_block(shared, limits)) return;
    bool is_expired = false;
    if (warp < kFirstConsumerWarp) {
        ptx::registers_decrease<kServingRegisters>();
        if (warp == kLoaderWarp) {
            if (ptx::elect_one()) is_expired = loader();
        } else if (warp == kSchedulerWarp) {
            is_expired = scheduler();
        } else if (warp == kStoreWarp) {
            is_expired = store();
        } else {
            is_expired = pull();
        }
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        is_expired = consumer(warp - kFirstConsumerWarp);
    }
    end_block(limits, is_expired);
}

}  // namespace mok::sm90
