// Test kernels of csrc/ptx inside one block: lanes, shared memory, barriers, deadlines, matrices,
// conversions. tests/ptx_cases/block.py has what they must give.
#pragma once

#include "csrc/kernels/ptx_test_params.cuh"

namespace mok {

namespace ptx_test_detail {

enum NamedBarrier : uint32_t { kFilled = 1, kDrained = 2 };
enum Place : uint32_t { kWaitPlace = 7 };

}  // namespace ptx_test_detail

/// One row of results per instruction and one column per thread.
__global__ void ptx_warp_kernel(const __grid_constant__ PtxTestParams params) {
    const uint32_t thread = ptx::thread_idx(), threads = ptx::block_threads(), lane = ptx::lane_idx();
    const uint32_t value = params.get(0, thread);
    uint32_t row = 0;
    const auto put = [&](uint32_t result) { params.put(0, row++ * threads + thread, result); };
    put(lane);
    put(ptx::warp_idx());
    put(ptx::lanes_before());
    put(ptx::reduce_add(ptx::elect_one() ? 1 : 0));
    put(ptx::ballot((value & 1) != 0));
    put(ptx::all_lanes(value != 5) ? 1 : 0);
    put(ptx::any_lane(value == 5) ? 1 : 0);
    put(ptx::shuffle(value, (lane + 5) % ptx::kWarpThreads));
    put(ptx::shuffle_up(value, 3));
    put(ptx::shuffle_xor(value, 9));
    put(ptx::match_any(value % 4));
    put(ptx::reduce_add(value));
    put(ptx::inclusive_sum(value, lane));
    put(ptx::popcount(value));
}

/// Every width of shared memory access, written by one thread and read by its neighbour.
__global__ void ptx_shared_kernel(const __grid_constant__ PtxTestParams params) {
    const uint32_t thread = ptx::thread_idx(), threads = ptx::block_threads(), shared = ptx::dynamic_shared();
    const uint32_t words4 = shared, words2 = words4 + 16 * threads, words = words2 + 8 * threads;
    const uint32_t halves = words + 4 * threads, sum = halves + 2 * threads;
    if (thread == 0) ptx::store_shared(sum, 0u);
    ptx::sync_block();
    ptx::store_shared(words4 + 16 * thread,
                      ptx::Words4{{thread, thread + 1000, thread + 2000, thread + 3000}});
    ptx::store_shared(words2 + 8 * thread, static_cast<uint64_t>(thread) << 32 | 0xabcdu);
    ptx::store_shared(words + 4 * thread, static_cast<float>(thread));
    ptx::store_shared(halves + 2 * thread, static_cast<uint16_t>(60000 + thread));
    ptx::red_relaxed_cta_shared_add(sum, thread);
    ptx::sync_block();
    const uint32_t next = (thread + 1) % threads;
    const auto four = ptx::load_shared<ptx::Words4>(words4 + 16 * next);
    const auto two = ptx::load_shared<uint64_t>(words2 + 8 * next);
    for (uint32_t i = 0; i < 4; ++i) params.put(0, i * threads + thread, four.word[i]);
    params.put(0, 4 * threads + thread, static_cast<uint32_t>(two));
    params.put(0, 5 * threads + thread, static_cast<uint32_t>(two >> 32));
    params.put(0, 6 * threads + thread, static_cast<uint32_t>(ptx::load_shared<float>(words + 4 * next)));
    params.put(0, 7 * threads + thread, ptx::load_shared<uint16_t>(halves + 2 * next));
    params.put(0, 8 * threads + thread, ptx::load_shared<uint32_t>(sum));
    params.put(0, 9 * threads + thread, ptx::sync_block_or(thread == threads - 1) ? 1 : 0);
    params.put(0, 10 * threads + thread, ptx::sync_block_or(thread == threads) ? 1 : 0);
}

/// Two warps fill 64 words, a third adds them up, so many rounds; numbers: rounds.
__global__ void ptx_named_barrier_kernel(const __grid_constant__ PtxTestParams params) {
    using namespace ptx_test_detail;
    constexpr uint32_t kThreads = 96;
    const uint32_t thread = ptx::thread_idx(), lane = ptx::lane_idx(), shared = ptx::dynamic_shared();
    const uint32_t rounds = static_cast<uint32_t>(params.numbers[0]);
    if (ptx::warp_idx() < 2) {
        for (uint32_t round = 0; round < rounds; ++round) {
            ptx::store_shared(shared + 4 * thread, round * 1000 + thread);
            ptx::named_barrier_arrive(kFilled, kThreads);
            ptx::named_barrier_sync(kDrained, kThreads);
        }
    } else {
        for (uint32_t round = 0; round < rounds; ++round) {
            ptx::named_barrier_sync(kFilled, kThreads);
            const uint32_t sum = ptx::load_shared<uint32_t>(shared + 4 * lane) +
                                 ptx::load_shared<uint32_t>(shared + 128 + 4 * lane);
            ptx::named_barrier_arrive(kDrained, kThreads);
            params.put(0, round * ptx::kWarpThreads + lane, sum);
        }
    }
}

/// A ring of three stages from one warp to four; numbers: rounds.
__global__ void ptx_mbarrier_kernel(const __grid_constant__ PtxTestParams params) {
    constexpr uint32_t kStages = 3, kConsumers = 128;
    const uint32_t thread = ptx::thread_idx(), lane = ptx::lane_idx(), shared = ptx::dynamic_shared();
    const uint32_t full = shared, empty = full + 8 * kStages, data = shared + 64;
    const uint32_t rounds = static_cast<uint32_t>(params.numbers[0]);
    if (thread == 0) {
        for (uint32_t stage = 0; stage < kStages; ++stage) {
            ptx::mbar_init(full + 8 * stage, ptx::kWarpThreads);
            ptx::mbar_init(empty + 8 * stage, kConsumers);
        }
        ptx::fence_mbarrier_init_release_cluster();
        params.put(1, 0, ptx::mbar_test(full, 0) ? 1 : 0);
        params.put(1, 1, ptx::mbar_test(full, 1) ? 1 : 0);
    }
    ptx::sync_block();
    ptx::Deadline deadline(params.limits);
    const bool produces = ptx::warp_idx() == kConsumers / ptx::kWarpThreads;
    for (uint32_t round = 0; round < rounds && !deadline.expired; ++round) {
        const uint32_t stage = round % kStages, parity = round / kStages & 1;
        const uint32_t stage_data = data + 4 * kConsumers * stage;
        if (produces) {
            if (!ptx::mbar_wait(empty + 8 * stage, parity ^ 1, deadline)) break;
            const uint32_t first = round * 1000 + 4 * lane;
            ptx::store_shared(stage_data + 16 * lane, ptx::Words4{{first, first + 1, first + 2, first + 3}});
            ptx::mbar_arrive(full + 8 * stage);
        } else {
            if (!ptx::mbar_wait(full + 8 * stage, parity, deadline)) break;
            params.put(0, round * kConsumers + thread, ptx::load_shared<uint32_t>(stage_data + 4 * thread));
            ptx::mbar_arrive(empty + 8 * stage);
        }
    }
    ptx::sync_block();
    if (thread == 0) {
        for (uint32_t stage = 0; stage < kStages; ++stage) ptx::mbar_invalidate(full + 8 * stage);
    }
}

/// Two warps signal at their own pace, a third listens to both; numbers: signals of each.
__global__ void ptx_mbarrier_any_kernel(const __grid_constant__ PtxTestParams params) {
    const uint32_t lane = ptx::lane_idx(), warp = ptx::warp_idx(), shared = ptx::dynamic_shared();
    const uint32_t full = shared, empty = shared + 16;
    const uint32_t signals = static_cast<uint32_t>(params.numbers[0]);
    if (ptx::thread_idx() == 0) {
        for (uint32_t i = 0; i < 4; ++i) ptx::mbar_init(shared + 8 * i, 1);
        ptx::fence_mbarrier_init_release_cluster();
    }
    ptx::sync_block();
    ptx::Deadline deadline(params.limits);
    if (warp < 2) {
        if (lane == 0) {
            for (uint32_t i = 0; i < signals; ++i) {
                if (!ptx::mbar_wait(empty + 8 * warp, (i & 1) ^ 1, deadline)) break;
                ptx::sleep_ns(warp == 0 ? 100 : 700);
                ptx::mbar_arrive(full + 8 * warp);
            }
        }
        return;
    }
    uint32_t heard[2] = {0, 0};
    while (heard[0] < signals || heard[1] < signals) {
        const uint32_t done = ptx::mbar_wait_any(full, heard[0] & 1, full + 8, heard[1] & 1, deadline);
        if (done == 0) break;
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            if ((done >> i & 1) == 0) continue;
            ++heard[i];
            if (lane == 0) ptx::mbar_arrive(empty + 8 * i);
        }
    }
    if (lane < 2) params.put(0, lane, lane == 0 ? heard[0] : heard[1]);
}

/// Waits for what never comes: an mbarrier in warp 0, a flag in warp 1.
__global__ void ptx_deadline_kernel(const __grid_constant__ PtxTestParams params) {
    const uint32_t barrier = ptx::dynamic_shared();
    const uint32_t* flag = static_cast<const uint32_t*>(params.out[1]);
    if (ptx::thread_idx() == 0) {
        ptx::mbar_init(barrier, 1);
        ptx::fence_mbarrier_init_release_cluster();
    }
    ptx::sync_block();
    ptx::Deadline deadline(params.limits, ptx_test_detail::kWaitPlace);
    deadline.peer = 3;
    const uint32_t warp = ptx::warp_idx();
    if (ptx::lane_idx() == 0) {
        const uint64_t begin = ptx::timer_ns();
        const bool in_time = warp == 0 ? ptx::mbar_wait(barrier, 0, deadline)
                                       : ptx::wait_reached_acquire_gpu(flag, 41, deadline);
        const uint64_t first = ptx::timer_ns() - begin;
        params.put(0, 4 * warp, in_time ? 1 : 0);
        params.put(0, 4 * warp + 1, deadline.expired ? 1 : 0);
        params.put(0, 4 * warp + 2, ptx::mbar_wait(barrier, 0, deadline) ? 1 : 0);
        params.put(0, 4 * warp + 3, static_cast<uint32_t>(first / 1000));
    }
}

/// Nanoseconds and cycles that numbers[0] shuffles take, each of what the last one gave.
__global__ void ptx_clock_kernel(const __grid_constant__ PtxTestParams params) {
    const uint64_t begin_ns = ptx::timer_ns(), begin_cycles = ptx::clock_cycles();
    uint32_t value = 0;
    for (int64_t i = 0; i < params.numbers[0]; ++i) {
        value = ptx::shuffle(value + 1, static_cast<uint32_t>(i) % ptx::kWarpThreads);
    }
    const uint64_t cycles = ptx::clock_cycles() - begin_cycles, ns = ptx::timer_ns() - begin_ns;
    if (ptx::thread_idx() != 0) return;
    params.put(0, 0, static_cast<uint32_t>(ns));
    params.put(0, 1, static_cast<uint32_t>(cycles));
    params.put(0, 2, value);
}

/// stmatrix of the registers in[0] and ldmatrix of the bytes in[1]; numbers: transposed.
__global__ void ptx_matrix_kernel(const __grid_constant__ PtxTestParams params) {
    const uint32_t lane = ptx::lane_idx(), stored = ptx::dynamic_shared(), loaded = stored + 512;
    const bool transposed = params.numbers[0] != 0;
    uint32_t matrices[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) matrices[i] = params.get(0, 4 * lane + i);
    if (transposed) {
        ptx::store_matrix_x4_transposed(stored + 16 * lane, matrices);
    } else {
        ptx::store_matrix_x4(stored + 16 * lane, matrices);
    }
    for (uint32_t i = 0; i < 4; ++i) {
        ptx::store_shared(loaded + 16 * lane + 4 * i, params.get(1, 4 * lane + i));
    }
    ptx::sync_warp();
    for (uint32_t i = 0; i < 4; ++i) {
        params.put(0, 4 * lane + i, ptx::load_shared<uint32_t>(stored + 16 * lane + 4 * i));
    }
    if (transposed) {
        ptx::load_matrix_x4_transposed(loaded + 16 * lane, matrices);
    } else {
        ptx::load_matrix_x4(loaded + 16 * lane, matrices);
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) params.put(1, 4 * lane + i, matrices[i]);
}

/// Rows of results over the floats in[0] and in[1]; numbers: how many.
__global__ void ptx_convert_kernel(const __grid_constant__ PtxTestParams params) {
    const uint32_t count = static_cast<uint32_t>(params.numbers[0]);
    for (uint32_t i = ptx::thread_idx(); i < count; i += ptx::block_threads()) {
        const float a = ptx::bits_float(params.get(0, i)), b = ptx::bits_float(params.get(1, i));
        const uint32_t packed = ptx::pack_bf16(a, b);
        params.put(0, i, packed);
        params.put(0, count + i, ptx::float_bits(ptx::low_bf16(packed)));
        params.put(0, 2 * count + i, ptx::float_bits(ptx::high_bf16(packed)));
        params.put(0, 3 * count + i, ptx::float_bits(ptx::exp2_approx(a)));
        params.put(0, 4 * count + i, ptx::float_bits(ptx::reciprocal_approx(b)));
        params.put(0, 5 * count + i, ptx::float_bits(ptx::fused_multiply_add(a, b, a)));
        const ptx::Sigmoid sigmoid = ptx::sigmoid(a);
        params.put(0, 6 * count + i, ptx::float_bits(sigmoid.value));
        params.put(0, 7 * count + i, ptx::float_bits(sigmoid.complement));
    }
}

}  // namespace mok
