// What a rank publishes before the first barrier of a call, and that barrier: its ids as int32 (-1: no
// route), its header, and its x and dout where these do not lie in the heap.
//
// Blocks copy their parts; the last one to finish meets the peers, so that no other block waits, or holds a
// multiprocessor that a rank on the same GPU needs.
//
// Ordering: each block's writes happen before its arrival (a block barrier, then an acq_rel addition at gpu
// scope by one thread), all arrivals before the last block's peer barrier, whose release at system scope is
// cumulative over them. Peers read behind that barrier; the window is written again behind the second barrier
// of the call, when all have read it.
//
// A rank that has ended publishes nothing: it did not wait for peers, and one that is late may still read
// what the call before has published; it would count old ids and place new ones, outside of its arrays. What
// the host has copied or zeroed in the window ahead of this kernel (rows that are not aligned, weights, their
// gradients) are values: such a peer computes wrong numbers, in a call that fails there too.
#pragma once

#include "csrc/comm/device/peer_barrier.cuh"
#include "csrc/kernels/publish_params.h"

namespace mok {

inline constexpr uint32_t kPublishThreads = 512;

namespace publish_detail {

MOK_DEVICE void copy_rows(const PublishedRows& rows, int64_t num_rows, int64_t first, int64_t step) {
    if (rows.from == nullptr) return;
    const int64_t per_row = rows.row_bytes / static_cast<int64_t>(sizeof(ptx::Words4));
    // (row, word) advances by `step` words without a division.
    const int64_t row_step = step / per_row, word_step = step % per_row;
    int64_t row = first / per_row, word = first % per_row;
    while (row < num_rows) {
        constexpr int kAtATime = 4;
        ptx::Words4 words[kAtATime];
        char* to[kAtATime];
#pragma unroll
        for (int i = 0; i < kAtATime; ++i) {
            const int64_t offset = word * static_cast<int64_t>(sizeof(ptx::Words4));
            to[i] = row < num_rows ? rows.to + row * rows.row_bytes + offset : nullptr;
            if (to[i] != nullptr) {
                words[i] =
                    ptx::load_global_v4_hint(rows.from + row * rows.from_stride + offset, ptx::kEvictFirst);
            }
            row += row_step;
            word += word_step;
            if (word >= per_row) {
                word -= per_row;
                ++row;
            }
        }
#pragma unroll
        for (int i = 0; i < kAtATime; ++i) {
            if (to[i] != nullptr) ptx::store_global_v4(to[i], words[i]);
        }
    }
}

}  // namespace publish_detail

/// Everything of `inputs` into this rank's window, by the threads first, first + step, ... of a grid; nothing
/// where the rank has ended.
MOK_DEVICE void publish_inputs(const PeerGroup& group, const Published& inputs, int64_t first, int64_t step) {
    // Looked at by stores only, so that the first loads do not wait for it.
    const bool ended = ptx::ld_relaxed_gpu(&device_state(group)->expired) != 0;
    for (int64_t slot = first; slot < inputs.num_slots; slot += step) {
        const int64_t id = inputs.ids_are_int64
                               ? ptx::load_global(static_cast<const int64_t*>(inputs.topk_ids) + slot)
                               : ptx::load_global(static_cast<const int32_t*>(inputs.topk_ids) + slot);
        if (!ended) ptx::store_global(inputs.ids + slot, normalized_expert(id, inputs.num_experts));
    }
    if (ended) return;
    if (first < kHeaderWords) {
        const auto* words = reinterpret_cast<const int64_t*>(&inputs.header);
        auto* header = reinterpret_cast<int64_t*>(call_header(group, static_cast<uint32_t>(group.rank)));
        ptx::store_global(header + first, words[first]);
    }
    publish_detail::copy_rows(inputs.x, inputs.header.num_tokens, first, step);
    publish_detail::copy_rows(inputs.dout, inputs.header.num_tokens, first, step);
}

__global__ void __launch_bounds__(kPublishThreads)
    publish_kernel(const __grid_constant__ PublishParams params) {
    const uint32_t thread = ptx::thread_idx();
    publish_inputs(params.group, params.inputs,
                   static_cast<int64_t>(ptx::block_idx()) * kPublishThreads + thread,
                   static_cast<int64_t>(ptx::num_blocks()) * kPublishThreads);

    ptx::sync_block();
    DeviceState* state = device_state(params.group);
    bool is_last = false;
    if (thread == 0) {
        is_last = ptx::atom_acq_rel_gpu_add(&state->arrivals, 1u) == ptx::num_blocks() - 1;
        if (is_last) ptx::st_relaxed_gpu(&state->arrivals, 0u);  // for the next launch
    }
    if (!ptx::sync_block_or(is_last)) return;
    const PeerOutcome outcome = peer_barrier(params.group, PeerPhase::kInputs);
    if (outcome == PeerOutcome::kExpired && thread == 0) ptx::trap();
}

}  // namespace mok
