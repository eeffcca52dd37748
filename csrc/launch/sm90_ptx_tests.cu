#include "csrc/kernels/sm90_ptx_test.cuh"
#include "csrc/launch/launch.cuh"
#include "csrc/launch/ptx_test_arguments.h"
#include "csrc/launch/tensor_map.h"

namespace mok::launch {

namespace {

using ptx::Major;
using ptx::Swizzle;

/// A row-major BF16 matrix whose boxes are `box_rows` lines of the swizzle's width.
ptx::TensorMap operand_map(void* base, int64_t rows, int64_t columns, int64_t box_rows, Swizzle swizzle) {
    TensorMapSpec spec{};
    spec.type = TensorType::kBFloat16;
    spec.rank = 2;
    spec.base = base;
    spec.sizes[0] = static_cast<uint64_t>(columns);
    spec.sizes[1] = static_cast<uint64_t>(rows);
    spec.stride_bytes[0] = static_cast<uint64_t>(columns) * 2;
    spec.box[0] = ptx::swizzle_width(swizzle) / 2;
    spec.box[1] = static_cast<uint32_t>(box_rows);
    spec.swizzle = swizzle == Swizzle::k128B  ? TensorSwizzle::k128B
                   : swizzle == Swizzle::k64B ? TensorSwizzle::k64B
                                              : TensorSwizzle::k32B;
    return make_tensor_map(spec);
}

template <int N, Major kMajorA, Major kMajorB>
void run_wgmma(const PtxTest& test) {
    constexpr int64_t kDepth = ptx_test_detail::kTestK;
    WgmmaTestParams params{};
    params.common = test_params(test);
    params.swizzle_a = static_cast<Swizzle>(number(test, 3));
    params.swizzle_b = static_cast<Swizzle>(number(test, 4));
    params.passes = static_cast<int32_t>(number(test, 5));
    const auto operand = [&](size_t index, int64_t extent, Major major, Swizzle swizzle) {
        void* base = input(test, index, extent * kDepth * 2);
        return major == Major::kK ? operand_map(base, extent, kDepth, extent, swizzle)
                                  : operand_map(base, kDepth, extent, kDepth, swizzle);
    };
    params.a = operand(0, 64, kMajorA, params.swizzle_a);
    params.b = operand(1, N, kMajorB, params.swizzle_b);
    output(test, 0, 64 * N * 4);
    const uint32_t shared = static_cast<uint32_t>((64 + N) * kDepth * 2 + 64);
    launch("ptx_wgmma", ptx_wgmma_kernel<N, kMajorA, kMajorB>, {1, ptx::kWarpgroupThreads, shared},
           test.stream, params);
}

// The shapes of the table have a kernel: every N K-major, and what a panel of 16 columns or more allows.
using WgmmaRun = void (*)(const PtxTest&);
struct WgmmaShape {
    int64_t n, major_a, major_b;
    WgmmaRun run;
};
#define MOK_SHAPE(N, A, B) \
    { N, static_cast<int64_t>(Major::A), static_cast<int64_t>(Major::B), run_wgmma<N, Major::A, Major::B> }
constexpr WgmmaShape kShapes[] = {
    MOK_SHAPE(8, kK, kK),     MOK_SHAPE(16, kK, kK),   MOK_SHAPE(32, kK, kK),   MOK_SHAPE(64, kK, kK),
    MOK_SHAPE(96, kK, kK),    MOK_SHAPE(128, kK, kK),  MOK_SHAPE(192, kK, kK),  MOK_SHAPE(256, kK, kK),
    MOK_SHAPE(64, kMN, kK),   MOK_SHAPE(128, kK, kMN), MOK_SHAPE(64, kMN, kMN), MOK_SHAPE(256, kK, kMN),
    MOK_SHAPE(256, kMN, kMN),
};
#undef MOK_SHAPE

/// numbers: N, major of a, of b, swizzle of a, of b (as ptx::Swizzle), passes.
void run_wgmma_test(const PtxTest& test) {
    for (const WgmmaShape& shape : kShapes) {
        if (shape.n == number(test, 0) && shape.major_a == number(test, 1) &&
            shape.major_b == number(test, 2)) {
            return shape.run(test);
        }
    }
    MOK_CHECK(false, "wgmma test: no kernel for N = ", number(test, 0), " with these majors.");
}

}  // namespace

void run_sm90_ptx_test(const std::string& name, const PtxTest& test) {
    if (name == "wgmma") return run_wgmma_test(test);
    MOK_CHECK(name == "setmaxnreg", "there is no sm_90a test named '", name, "'.");
    input(test, 0, 4 * (384 + 184));
    output(test, 0, 4 * 384);
    launch("ptx_setmaxnreg", ptx_setmaxnreg_kernel, {1, 384}, test.stream, test_params(test));
}

}  // namespace mok::launch
