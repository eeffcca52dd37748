// Test kernels of csrc/ptx that only sm_90a has: wgmma and setmaxnreg. tests/ptx_cases/wgmma.py has what they
// must give.
#pragma once

#include "csrc/kernels/ptx_test_params.cuh"

namespace mok {

struct WgmmaTestParams {
    ptx::TensorMap a, b;  // BF16; boxes of one panel
    ptx::Swizzle swizzle_a, swizzle_b;
    int32_t passes;  // the whole product is added up so often
    PtxTestParams common;
};

namespace ptx_test_detail {

constexpr uint32_t kTestK = 64;  // depth of the operand tiles

/// An operand tile of `lines_mn` rows or columns and depth 64, in panels as TMA wrote them.
template <ptx::Major kMajor>
struct OperandTile {
    uint32_t address;
    uint32_t extent;  // M or N
    ptx::Swizzle swizzle;

    /// Elements of a line, which is one panel's width.
    MOK_DEVICE uint32_t panel() const { return ptx::swizzle_width(swizzle) / 2; }
    MOK_DEVICE uint32_t panels() const { return (kMajor == ptx::Major::kK ? kTestK : extent) / panel(); }
    MOK_DEVICE uint32_t panel_bytes() const {
        return (kMajor == ptx::Major::kK ? extent : kTestK) * ptx::swizzle_width(swizzle);
    }
    MOK_DEVICE uint32_t bytes() const { return extent * kTestK * 2; }

    MOK_DEVICE void load(const ptx::TensorMap* map, uint32_t barrier) const {
        for (uint32_t i = 0; i < panels(); ++i) {
            ptx::tma_load_2d(address + i * panel_bytes(), map, static_cast<int32_t>(i * panel()), 0, barrier);
        }
    }

    /// The descriptor of k16 step `step`.
    MOK_DEVICE uint64_t descriptor(uint32_t step) const {
        const uint32_t step_bytes = ptx::k16_step_bytes(kMajor, swizzle);
        if constexpr (kMajor == ptx::Major::kK) {
            const uint32_t steps = panel() / 16;
            const uint64_t first = ptx::k_major_descriptor(address, swizzle);
            return ptx::advanced(first, step / steps * panel_bytes() + step % steps * step_bytes);
        } else {
            return ptx::advanced(ptx::mn_major_descriptor(address, panel_bytes(), swizzle),
                                 step * step_bytes);
        }
    }
};

}  // namespace ptx_test_detail

/// A [64, 64] times B [N, 64]^T; out[0]: each thread's N / 2 accumulators as they lie.
template <int N, ptx::Major kMajorA, ptx::Major kMajorB>
__global__ void __launch_bounds__(ptx::kWarpgroupThreads)
    ptx_wgmma_kernel(const __grid_constant__ WgmmaTestParams params) {
    using namespace ptx_test_detail;
    const uint32_t thread = ptx::thread_idx(), shared = ptx::dynamic_shared();
    const OperandTile<kMajorA> a{shared, 64, params.swizzle_a};
    const OperandTile<kMajorB> b{shared + a.bytes(), N, params.swizzle_b};
    const uint32_t barrier = b.address + b.bytes();
    if (thread == 0) {
        ptx::mbar_init(barrier, 1);
        ptx::fence_mbarrier_init_release_cluster();
    }
    ptx::sync_block();
    if (thread == 0) {
        ptx::mbar_arrive_expect(barrier, a.bytes() + b.bytes());
        a.load(&params.a, barrier);
        b.load(&params.b, barrier);
    }
    ptx::Deadline deadline(params.common.limits);
    const bool in_time = ptx::mbar_wait(barrier, 0, deadline);
    if (ptx::sync_block_or(!in_time)) return;

    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = ptx::bits_float(0x7fc00000u);  // NaN: the first wgmma overwrites
    for (int32_t pass = 0; pass < params.passes; ++pass) {
        ptx::wgmma_fence();
#pragma unroll
        for (uint32_t step = 0; step < kTestK / 16; ++step) {
            ptx::wgmma_bf16<N, kMajorA, kMajorB>(d, a.descriptor(step), b.descriptor(step),
                                                 pass > 0 || step > 0);
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        params.common.put(0, thread * (N / 2) + i, ptx::float_bits(d[i]));
    }
}

/// Three warpgroups: the first gives registers away, the others take them and hold 184 words each at a time.
/// out[0][thread] = a sum over in[0] that depends on all of them.
__global__ void __launch_bounds__(384, 1)
    ptx_setmaxnreg_kernel(const __grid_constant__ PtxTestParams params) {
    // Launched with 168 each: 384 x 168 = 128 x (40 + 2 x 232).
    constexpr int kFew = 40, kMany = 232;
    constexpr uint32_t kWords = 184;
    const uint32_t thread = ptx::thread_idx();
    if (ptx::warp_idx() < 4) {
        ptx::registers_decrease<kFew>();
        params.put(0, thread, params.get(0, thread) + 1);
    } else {
        ptx::registers_increase<kMany>();
        uint32_t words[kWords];
#pragma unroll
        for (uint32_t i = 0; i < kWords; ++i) words[i] = params.get(0, thread + i);
        // Last first, so that all of them are alive at once.
        uint32_t sum = 0;
#pragma unroll
        for (uint32_t i = kWords; i-- > 0;) sum = 3 * sum + words[i];
        params.put(0, thread, sum);
    }
}

}  // namespace mok
