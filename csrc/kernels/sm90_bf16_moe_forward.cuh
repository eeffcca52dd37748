// The forward pass of one rank's experts in one persistent kernel, BF16 with FP32 sums over ascending K:
//   x row of (peer, token) -> its rows in the ring                                   pull warps
//   h = rn(act(g, u)), g = rn(x Wg^T + b_g), u = rn(x Wu^T + b_u)                    gate_up tasks
//   y = rn(h Wd^T + b_d), each row to its slot on its home rank                      down tasks
// and the same for the shared expert over the rank's own rows; csrc/schedule has order and counters.
//
//   warp    role                                              waits for                signals
//   0       loader: operands of a task's K steps; before      preview, task_full,      stage_full, claim
//           the first tile's rows are there, its weights        stage_empty
//   1       scheduler: claims, decodes, waits, publishes      claim, task_empty,       preview (first task),
//                                                               kX kGateUp kHiddenRead   task_full
//   2       store warp: staging -> ring, context, home ranks  task_full, staged        staging_empty,
//                                                                                        kGateUp kHiddenRead
//   3       pull warp: rows of all ranks -> ring              pulled, kGateUp          kX
//   4-7     consumers of rows 0-63: products, activation      task_full, stage_full,   stage_empty, staged
//   8-11    consumers of rows 64-127                            staging_empty
//
// Order. A row: bulk load (pulled), bulk store, wait_group, fence.acq_rel.gpu, red kX | acquire by a
// scheduler lane, task_full, loader, fence.proxy.async, TMA. h: stmatrix, fence.proxy.async, staged, TMA
// store, wait_group, red.release kGateUp | the same. A ring slot is written again after its readers' tiles: x
// after kGateUp, h after kHiddenRead (y is staged: h has been multiplied). y: bulk stores, wait_group,
// fence.acq_rel.sys at the end; the barrier kernel behind this one releases them to the home ranks. Nothing
// waits for a peer; tasks and pulls are claimed in order, so any number of resident blocks finishes
// (docs/schedule.md). A wait that expires ends all roles; each waits for the copies that it has started, and
// the block traps after they have met.
#pragma once

#include "csrc/gemm/sm90_block.cuh"
#include "csrc/kernels/sm90_bf16_moe_consumer.cuh"
#include "csrc/kernels/sm90_bf16_moe_pull.cuh"
#include "csrc/kernels/sm90_bf16_moe_scheduler.cuh"
#include "csrc/kernels/sm90_bf16_moe_store.cuh"

namespace mok {

template <ActivationForm kForm, bool kTimeline>
__global__ void __launch_bounds__(sm90::kThreads, 1)
    sm90_bf16_moe_forward_kernel(const __grid_constant__ MoeForwardParams params) {
    using namespace moe_forward_detail;
    const Shared shared{ptx::dynamic_shared()};
    run_block(
        shared, params.limits, [&] { return run_loader(params, shared); },
        [&] { return run_scheduler<ForwardPass, kTimeline>(params, shared); },
        [&] { return run_store_warp(params, shared); },
        [&] { return run_pull_warp<false, kTimeline>(params, shared); },
        [&](uint32_t consumer_warp) {
            return run_consumer<kForm, kTimeline>(params, shared, consumer_warp);
        });
}

}  // namespace mok
