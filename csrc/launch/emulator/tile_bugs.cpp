#include "csrc/launch/emulator/tile_bugs.h"

#include <iterator>

#include "csrc/launch/launch.cuh"
#include "csrc/launch/tensor_map.h"
#include "csrc/layout/check.h"
#include "csrc/ptx/ptx.h"

namespace mok::launch {

namespace {

enum class Bug : int {
    kNone,
    kLoadNotAwaited,
    kBytesMissing,
    kTileMisaligned,
    kLoadBetweenPieces,
    kWrongRank,
    kMapNotMade,
    kMulticastToNobody,
    kStepPastLine,
    kBaseOffset,
    kStridePastEnd,
    kLanesDiffer,
    kWrittenByThreads,
    kNoWgmmaFence,
    kNoWgmmaWait,
    kAccumulatorTouched,
    kRefilledTooEarly,
    kMatrixMisaligned,
    kMatrixPastEnd,
    kNoProxyFence,
    kNoBarrierBeforeStore,
    kStoreBeforeZero,
    kSumOfBytes,
    kStagingReusedTooEarly,
};

constexpr const char* kBugs[] = {
    "none",
    "load not awaited",
    "bytes missing",
    "tile misaligned",
    "load between pieces",
    "wrong rank",
    "map not made",
    "multicast to nobody",
    "step past line",
    "base offset",
    "stride past end",
    "lanes differ",
    "written by threads",
    "no wgmma fence",
    "no wgmma wait",
    "accumulator touched",
    "refilled too early",
    "matrix misaligned",
    "matrix past end",
    "no proxy fence",
    "no barrier before store",
    "store before zero",
    "sum of bytes",
    "staging reused too early",
};

struct Params {
    ptx::TensorMap a, b, d, bytes, empty;
    ptx::WaitLimits limits;
    Bug bug;

    bool has(Bug which) const { return bug == which; }
};

constexpr uint32_t kThreads = 128, kTile = 64, kTileBytes = kTile * kTile * 2;
constexpr uint32_t kA = 0, kB = kTileBytes, kStaging = 2 * kTileBytes, kBarrier = 3 * kTileBytes;
constexpr uint32_t kSharedBytes = kBarrier + 64;
using Accumulators = float[kTile / 2];

void load_tiles(const Params& params, uint32_t shared) {
    const uint32_t barrier = shared + kBarrier;
    const uint32_t a = shared + kA + (params.has(Bug::kTileMisaligned) ? 64 : 0);
    ptx::mbar_arrive_expect(barrier, 2 * kTileBytes - (params.has(Bug::kBytesMissing) ? 16 : 0));
    if (params.has(Bug::kWrongRank)) {
        ptx::tma_load_3d(a, &params.a, 0, 0, 0, barrier);
    } else if (params.has(Bug::kMapNotMade)) {
        ptx::tma_load_2d(a, &params.empty, 0, 0, barrier);
    } else if (params.has(Bug::kMulticastToNobody)) {
        ptx::tma_load_2d_multicast(a, &params.a, 0, 0, barrier, 0);
    } else {
        ptx::tma_load_2d(a, &params.a, params.has(Bug::kLoadBetweenPieces) ? 4 : 0, 0, barrier);
    }
    ptx::tma_load_2d(shared + kB, &params.b, 0, 0, barrier);
}

void multiply(const Params& params, uint32_t shared, Accumulators& d) {
    using ptx::Swizzle;
    const uint64_t a = ptx::k_major_descriptor(shared + kA, Swizzle::k128B);
    uint64_t b = ptx::k_major_descriptor(shared + kB, Swizzle::k128B);
    if (params.has(Bug::kStridePastEnd)) {
        b = ptx::wgmma_descriptor(shared + kB, 0, kTileBytes, Swizzle::k128B);
    }
    if (params.has(Bug::kBaseOffset)) b |= uint64_t{1} << 49;
    if (params.has(Bug::kLanesDiffer)) b = ptx::advanced(b, ptx::lane_idx() == 7 ? 1024 : 0);
    if (!params.has(Bug::kNoWgmmaFence)) ptx::wgmma_fence();
    for (uint32_t step = 0; step < kTile / 16; ++step) {
        const uint32_t bytes = 32 * step + (params.has(Bug::kStepPastLine) && step == 3 ? 16 : 0);
        ptx::wgmma_bf16<kTile, ptx::Major::kK, ptx::Major::kK>(d, ptx::advanced(a, bytes),
                                                               ptx::advanced(b, bytes), step > 0);
        if (params.has(Bug::kAccumulatorTouched) && step == 2) d[5] = 0.0f;
    }
    ptx::wgmma_commit();
    if (params.has(Bug::kRefilledTooEarly) && ptx::thread_idx() == 0) {
        ptx::mbar_arrive_expect(shared + kBarrier, kTileBytes);
        ptx::tma_load_2d(shared + kA, &params.a, 0, 0, shared + kBarrier);
    }
    if (!params.has(Bug::kNoWgmmaWait)) ptx::wgmma_wait<0>();
}

/// Rows of 128 bytes without a swizzle.
void stage(const Params& params, uint32_t staging, const Accumulators& d) {
    const uint32_t lane = ptx::lane_idx(), row = 16 * ptx::warp_idx() + lane % 16;
    for (uint32_t column = 0; column < kTile; column += 16) {
        // Matrices: rows 0-7 and 8-15 of the first 8 columns, then of the next 8.
        uint32_t matrices[4];
        for (uint32_t i = 0; i < 4; ++i) {
            matrices[i] = ptx::pack_bf16(d[column / 2 + 2 * i], d[column / 2 + 2 * i + 1]);
        }
        uint32_t address = staging + row * 2 * kTile + 2 * (column + lane / 16 * 8);
        if (params.has(Bug::kMatrixMisaligned)) address += 8;
        if (params.has(Bug::kMatrixPastEnd) && lane == 31) address += kTileBytes;
        ptx::store_matrix_x4(address, matrices);
    }
}

void store_tile(const Params& params, uint32_t staging) {
    if (params.has(Bug::kSumOfBytes)) {
        ptx::tma_reduce_add_2d(&params.bytes, 0, 0, staging);
    } else {
        ptx::tma_store_2d(&params.d, 0, params.has(Bug::kStoreBeforeZero) ? -1 : 0, staging);
    }
    ptx::bulk_commit();
    if (params.has(Bug::kStagingReusedTooEarly)) ptx::store_shared(staging, 0u);
    ptx::bulk_wait<0>();
}

__global__ void tile_kernel(const __grid_constant__ Params params) {
    const uint32_t shared = ptx::dynamic_shared(), thread = ptx::thread_idx();
    if (thread == 0) {
        ptx::mbar_init(shared + kBarrier, 1);
        ptx::fence_mbarrier_init_release_cluster();
    }
    ptx::sync_block();
    if (thread == 0) load_tiles(params, shared);
    ptx::Deadline deadline(params.limits);
    if (!params.has(Bug::kLoadNotAwaited)) ptx::mbar_wait(shared + kBarrier, 0, deadline);
    if (params.has(Bug::kWrittenByThreads)) {
        ptx::store_shared(shared + kA + 16 * thread, ptx::Words4{{0, 0, 0, 0}});
        ptx::sync_block();
    }
    Accumulators d;
    multiply(params, shared, d);
    stage(params, shared + kStaging, d);
    if (!params.has(Bug::kNoProxyFence)) ptx::fence_proxy_async_shared();
    if (!params.has(Bug::kNoBarrierBeforeStore)) ptx::sync_block();
    if (thread == 0) store_tile(params, shared + kStaging);
}

TensorMapSpec tile_spec(void* base, TensorSwizzle swizzle) {
    TensorMapSpec spec{};
    spec.type = TensorType::kBFloat16;
    spec.rank = 2;
    spec.base = base;
    spec.sizes[0] = spec.sizes[1] = spec.box[0] = spec.box[1] = kTile;
    spec.stride_bytes[0] = 2 * kTile;
    spec.swizzle = swizzle;
    return spec;
}

Bug bug_named(const std::string& name) {
    for (size_t i = 0; i < std::size(kBugs); ++i) {
        if (name == kBugs[i]) return static_cast<Bug>(i);
    }
    MOK_CHECK(false, "bug is '", name, "'; TILE_BUGS lists them.");
    __builtin_unreachable();
}

}  // namespace

std::vector<std::string> tile_bugs() {
    return {std::begin(kBugs), std::end(kBugs)};
}

void launch_tile(const std::string& bug, const TileBuffers& buffers, const ptx::WaitLimits& limits,
                 EmulatorStream& stream) {
    Params params{};
    params.bug = bug_named(bug);
    params.a = make_tensor_map(tile_spec(buffers.a, TensorSwizzle::k128B));
    params.b = make_tensor_map(tile_spec(buffers.b, TensorSwizzle::k128B));
    params.d = make_tensor_map(tile_spec(buffers.d, TensorSwizzle::kNone));
    TensorMapSpec bytes = tile_spec(buffers.d, TensorSwizzle::kNone);
    bytes.type = TensorType::kUint8;
    bytes.sizes[0] = bytes.box[0] = 2 * kTile;
    params.bytes = make_tensor_map(bytes);
    params.limits = limits;
    stream.names["tile"].shared = {{kA, kTileBytes, kTileBytes, "tile a"},
                                   {kB, kTileBytes, kTileBytes, "tile b"},
                                   {kStaging, kTileBytes, kTileBytes, "staging"},
                                   {kBarrier, 8, 8, "full barrier"}};
    launch("tile", tile_kernel, {1, kThreads, kSharedBytes}, &stream, params);
}

}  // namespace mok::launch
