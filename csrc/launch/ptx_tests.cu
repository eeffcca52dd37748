#include "csrc/kernels/ptx_test_block.cuh"
#include "csrc/kernels/ptx_test_copy.cuh"
#include "csrc/kernels/ptx_test_grid.cuh"
#include "csrc/launch/launch.cuh"
#include "csrc/launch/ptx_test_arguments.h"
#include "csrc/launch/ptx_tests.h"
#include "csrc/launch/tensor_map.h"

namespace mok::launch {

namespace {

using Kernel = void (*)(PtxTestParams);

void run(const char* name, Kernel kernel, const LaunchShape& shape, const PtxTest& test) {
    launch(name, kernel, shape, test.stream, test_params(test));
}

void run_warp(const PtxTest& test) {
    input(test, 0, 4 * 96);
    output(test, 0, 4 * 96 * 14);
    run("ptx_warp", ptx_warp_kernel, {1, 96}, test);
}

void run_shared(const PtxTest& test) {
    output(test, 0, 4 * 64 * 11);
    run("ptx_shared", ptx_shared_kernel, {1, 64, 64 * 30 + 16}, test);
}

void run_named_barrier(const PtxTest& test) {
    output(test, 0, 4 * 32 * number(test, 0));
    run("ptx_named_barrier", ptx_named_barrier_kernel, {1, 96, 256}, test);
}

void run_mbarrier(const PtxTest& test) {
    output(test, 0, 4 * 128 * number(test, 0));
    output(test, 1, 8);
    run("ptx_mbarrier", ptx_mbarrier_kernel, {1, 160, 64 + 3 * 512}, test);
}

void run_mbarrier_any(const PtxTest& test) {
    number(test, 0);
    output(test, 0, 8);
    run("ptx_mbarrier_any", ptx_mbarrier_any_kernel, {1, 96, 64}, test);
}

void run_deadline(const PtxTest& test) {
    output(test, 0, 32);
    output(test, 1, 4);
    const uint64_t limit_ns = static_cast<uint64_t>(number(test, 0));
    launch("ptx_deadline", ptx_deadline_kernel, {1, 64, 64}, test.stream, test_params(test, limit_ns));
}

void run_clock(const PtxTest& test) {
    number(test, 0);
    output(test, 0, 12);
    run("ptx_clock", ptx_clock_kernel, {1, 32}, test);
}

void run_matrix(const PtxTest& test) {
    for (size_t i = 0; i < 2; ++i) {
        input(test, i, 512);
        output(test, i, 512);
    }
    number(test, 0);
    run("ptx_matrix", ptx_matrix_kernel, {1, 32, 1024}, test);
}

void run_convert(const PtxTest& test) {
    const int64_t bytes = 4 * number(test, 0);
    input(test, 0, bytes);
    input(test, 1, bytes);
    output(test, 0, 8 * bytes);
    run("ptx_convert", ptx_convert_kernel, {1, 256}, test);
}

/// numbers: bytes of a chunk (a multiple of 16), whether with a hint; all of inputs[0] in chunks.
void run_bulk(const PtxTest& test) {
    const int64_t chunk = number(test, 0);
    number(test, 1);
    MOK_CHECK(chunk >= 16 && chunk % 16 == 0 && chunk <= 128 * 1024, "bulk test: chunk of ", chunk,
              " bytes.");
    input(test, 0, chunk);
    const int64_t bytes = test.inputs[0].bytes;
    MOK_CHECK(bytes % chunk == 0, "bulk test: ", bytes, " bytes are no multiple of ", chunk, ".");
    output(test, 0, bytes);
    output(test, 1, bytes);
    const LaunchShape shape{static_cast<uint32_t>(bytes / chunk), 128, static_cast<uint32_t>(chunk) + 128};
    run("ptx_bulk", ptx_bulk_kernel, shape, test);
}

/// Three numbers from `first` on, as `T`.
template <typename T, size_t kSize>
void read_three(const PtxTest& test, size_t first, T (&values)[kSize]) {
    for (size_t i = 0; i < 3; ++i) values[i] = static_cast<T>(number(test, first + i));
}

/// What hardware answers with an illegal instruction, and the process's context is lost.
void check_corner(const char* what, const int32_t (&at)[3], int64_t element_bytes, bool may_be_negative) {
    MOK_CHECK(at[0] * element_bytes % 16 == 0, "tma test ", what, " at ", at[0], ", ", at[1], ", ", at[2],
              ": the first must be a multiple of ", 16 / element_bytes, " elements (16 bytes).");
    MOK_CHECK(may_be_negative || (at[0] >= 0 && at[1] >= 0 && at[2] >= 0), "tma test ", what, " at ", at[0],
              ", ", at[1], ", ", at[2], ": a store must not begin before 0.");
}

/// numbers: element bytes (2: BF16, 4: FP32), dimensions, swizzle (as the tensor map has it), mode, then
/// three each, innermost first: sizes of inputs[0], box, where to load, sizes of outputs[1], where to store.
void run_tma(const PtxTest& test) {
    TmaTestParams params{};
    params.common = test_params(test);
    params.rank = static_cast<int32_t>(number(test, 1));
    params.mode = static_cast<TmaTestMode>(number(test, 3));
    const int64_t element_bytes = number(test, 0);
    const auto make = [&](void* base, size_t sizes_at) {
        TensorMapSpec spec{};
        spec.type = element_bytes == 2 ? TensorType::kBFloat16 : TensorType::kFloat32;
        spec.rank = static_cast<uint32_t>(params.rank);
        spec.base = base;
        read_three(test, sizes_at, spec.sizes);
        spec.stride_bytes[0] = spec.sizes[0] * element_bytes;
        spec.stride_bytes[1] = spec.stride_bytes[0] * spec.sizes[1];
        read_three(test, 7, spec.box);
        spec.swizzle = static_cast<TensorSwizzle>(number(test, 2));
        return make_tensor_map(spec);
    };
    const auto product = [&](size_t at) {
        return number(test, at) * number(test, at + 1) * number(test, at + 2);
    };
    params.load = make(input(test, 0, element_bytes * product(4)), 4);
    params.store = make(output(test, 1, element_bytes * product(13)), 13);
    params.bytes = static_cast<uint32_t>(element_bytes * product(7));
    output(test, 0, params.bytes);
    read_three(test, 10, params.load_at);
    read_three(test, 16, params.store_at);
    check_corner("loads", params.load_at, element_bytes, /* may_be_negative */ true);
    check_corner("stores", params.store_at, element_bytes, /* may_be_negative */ false);
    launch("ptx_tma", ptx_tma_kernel, {1, 128, params.bytes + 256}, test.stream, params);
}

/// numbers: clusters; inputs[0]: BF16 [64 * clusters, 64].
void run_cluster(const PtxTest& test) {
    const int64_t clusters = number(test, 0);
    ClusterTestParams params{};
    params.common = test_params(test);
    TensorMapSpec spec{};
    spec.type = TensorType::kBFloat16;
    spec.rank = 2;
    spec.base = input(test, 0, clusters * 64 * 64 * 2);
    spec.sizes[0] = 64;
    spec.sizes[1] = static_cast<uint64_t>(clusters) * 64;
    spec.stride_bytes[0] = 128;
    spec.box[0] = spec.box[1] = 64;
    params.map = make_tensor_map(spec);
    output(test, 0, clusters * 2 * 256 * 4);
    output(test, 1, clusters * 2 * 8192);
    LaunchShape shape{static_cast<uint32_t>(clusters) * 2, 128, 8192 + 512 + 64};
    shape.cluster = 2;
    launch("ptx_cluster", ptx_cluster_kernel, shape, test.stream, params);
}

void run_flag(const PtxTest& test) {
    number(test, 1);
    output(test, 0, 4 * 64 * number(test, 0));
    output(test, 1, 4 * 128);
    LaunchShape shape{2, 64};
    shape.cooperative = true;
    run("ptx_flag", ptx_flag_kernel, shape, test);
}

/// numbers: blocks of 256 threads.
void run_ticket(const PtxTest& test) {
    const int64_t blocks = number(test, 0);
    output(test, 0, 4 * 256 * blocks);
    output(test, 1, 24);
    run("ptx_ticket", ptx_ticket_kernel, {static_cast<uint32_t>(blocks), 256}, test);
}

void run_grid_barrier(const PtxTest& test) {
    const int64_t blocks = number(test, 1);
    MOK_CHECK(blocks >= 1 && blocks <= num_multiprocessors(), "grid barrier test: ", blocks, " blocks.");
    output(test, 0, 4 * number(test, 0) * blocks);
    output(test, 1, 4 * (32 + blocks));
    LaunchShape shape{num_multiprocessors(), 128};
    shape.cooperative = true;
    run("ptx_grid_barrier", ptx_grid_barrier_kernel, shape, test);
}

constexpr struct {
    const char* name;
    void (*run)(const PtxTest&);
} kTests[] = {
    {"warp", run_warp},
    {"shared", run_shared},
    {"named_barrier", run_named_barrier},
    {"mbarrier", run_mbarrier},
    {"mbarrier_any", run_mbarrier_any},
    {"deadline", run_deadline},
    {"clock", run_clock},
    {"matrix", run_matrix},
    {"convert", run_convert},
    {"bulk", run_bulk},
    {"tma", run_tma},
    {"cluster", run_cluster},
    {"flag", run_flag},
    {"ticket", run_ticket},
    {"grid_barrier", run_grid_barrier},
};

}  // namespace

void run_ptx_test(const std::string& name, const PtxTest& test) {
    for (const auto& each : kTests) {
        if (name == each.name) return each.run(test);
    }
    MOK_CHECK(false, "there is no test named '", name, "'.");
}

}  // namespace mok::launch
