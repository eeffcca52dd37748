// The backward pass of one rank's experts in one persistent kernel, BF16 with FP32 sums over ascending K. Per
// row with weight w and gradient dout (rn: to BF16; what forward did not save is made again first):
//   a = dout Wd;  dg = rn(w a dp/dg), du = rn(w a dp/du), h' = rn(w p), sums of p a over 64 columns   dhidden
//   dx = rn(dg Wg + du Wu) to its home rank; dw = the sums in order, + dout . b_d                     dx
//   dWg = dg^T x, dWu = du^T x, dWd = dout^T h' over the rows of an expert in order                   wgrad
// and the same for the shared expert over the rank's own rows; csrc/schedule has order and counters. Operands
// are read as they lie: B of dhidden and dx, A and B of wgrad are MN-major.
//
//   warp    role                                          waits for                     signals
//   0       loader: operands, chunks of epilogues         task_full, stage_empty        stage_full, claim
//   1       scheduler: claims, decodes, waits, publishes  claim, task_empty, counters   task_full
//   2       store warp: staged tiles, chunks in stages;   task_full, staged             staging_empty,
//             w of dhidden's rows                          stage_empty (chunks), weights_staged, counters
//   3       pull warp: dout, and x, of all ranks -> ring  pulled, kDxRead kSpanRead     kDout kX
//   4-7     consumers of rows 0-63: products, epilogues   task_full, stage_full,        stage_empty, staged
//   8-11    consumers of rows 64-127                        staging_empty, weights_staged
//
// Order, besides the forward kernel's. A chunk: TMA load, stage_full; ldmatrix, stmatrix in place,
// fence.proxy.async, staged; TMA store, the next chunk's, wait_group.read, stage_empty. Partial sums, weights
// and bias gradients are ordinary stores before staged, whose red.release by the store warp is cumulative.
// dout read by ordinary loads: fence.proxy.async before kDxRead. Everything stored is complete (wait_group)
// before its counter.
#pragma once

#include "csrc/gemm/sm90_block.cuh"
#include "csrc/kernels/sm90_bf16_moe_backward_consumer.cuh"
#include "csrc/kernels/sm90_bf16_moe_backward_loader.cuh"
#include "csrc/kernels/sm90_bf16_moe_backward_scheduler.cuh"
#include "csrc/kernels/sm90_bf16_moe_backward_store.cuh"
#include "csrc/kernels/sm90_bf16_moe_pull.cuh"

namespace mok {

template <ActivationForm kForm, bool kTimeline>
__global__ void __launch_bounds__(sm90::kThreads, 1)
    sm90_bf16_moe_backward_kernel(const __grid_constant__ MoeBackwardParams params) {
    using namespace moe_backward_detail;
    const Shared shared{ptx::dynamic_shared()};
    if (ptx::thread_idx() == 0) {  // run_block's fence is behind it
        for (uint32_t part = 0; part < kParts; ++part) ptx::mbar_init(weights_staged(shared, part), 1);
    }
    run_block(
        shared, params.limits, [&] { return run_loader(params, shared); },
        [&] { return run_scheduler<BackwardPass, kTimeline>(params, shared); },
        [&] { return run_store_warp(params, shared); },
        [&] { return run_pull_warp<true, kTimeline>(params, shared); },
        [&](uint32_t consumer_warp) {
            return run_consumer<kForm, kTimeline>(params, shared, consumer_warp);
        });
}

}  // namespace mok
