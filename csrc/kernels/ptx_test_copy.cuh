// Test kernels of csrc/ptx: bulk copies and tensor copies. tests/ptx_cases/copies.py has what they must give.
#pragma once

#include "csrc/kernels/ptx_test_params.cuh"

namespace mok {

/// Each block takes its chunk of in[0] by a bulk load, adds 1 to every float, stores it to out[0] and adds it
/// twice to out[1]; numbers: bytes of a chunk, whether loads carry a cache hint.
__global__ void ptx_bulk_kernel(const __grid_constant__ PtxTestParams params) {
    const uint32_t thread = ptx::thread_idx(), shared = ptx::dynamic_shared();
    const uint32_t bytes = static_cast<uint32_t>(params.numbers[0]);
    const uint32_t barrier = shared, chunk = shared + 128;
    const int64_t offset = static_cast<int64_t>(ptx::block_idx()) * bytes;
    const char* source = static_cast<const char*>(params.in[0]) + offset;
    if (thread == 0) {
        ptx::mbar_init(barrier, 1);
        ptx::fence_mbarrier_init_release_cluster();
    }
    ptx::sync_block();
    if (thread == 0) {
        ptx::bulk_prefetch_l2(source, bytes);
        if (params.numbers[1] != 0) {
            ptx::mbar_arrive_expect(barrier, bytes);
            ptx::bulk_load_hint(chunk, source, bytes, barrier, ptx::kEvictFirst);
        } else {
            ptx::mbar_expect(barrier, bytes);
            ptx::bulk_load(chunk, source, bytes, barrier);
            ptx::mbar_arrive(barrier);
        }
    }
    ptx::Deadline deadline(params.limits);
    const bool in_time = ptx::mbar_wait(barrier, 0, deadline);
    if (ptx::sync_block_or(!in_time)) return;
    for (uint32_t at = chunk + 4 * thread; at < chunk + bytes; at += 4 * ptx::block_threads()) {
        ptx::store_shared(at, ptx::load_shared<float>(at) + 1.0f);
    }
    ptx::fence_proxy_async_shared();
    ptx::sync_block();
    if (thread == 0) {
        ptx::bulk_store(static_cast<char*>(params.out[0]) + offset, chunk, bytes);
        ptx::bulk_commit();
        ptx::bulk_reduce_add_f32(static_cast<char*>(params.out[1]) + offset, chunk, bytes);
        ptx::bulk_commit();
        ptx::bulk_wait<0>();
        ptx::bulk_reduce_add_f32(static_cast<char*>(params.out[1]) + offset, chunk, bytes);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        ptx::bulk_wait<0>();
    }
}

enum class TmaTestMode : int64_t { kPlain = 0, kHint = 1, kReduce = 2 };

struct TmaTestParams {
    ptx::TensorMap load;
    ptx::TensorMap store;
    int32_t load_at[3];
    int32_t store_at[3];
    int32_t rank;
    TmaTestMode mode;
    uint32_t bytes;  // of the box
    PtxTestParams common;
};

/// One box from a tensor to shared memory, its raw bytes to out[0], and from there to another tensor.
__global__ void ptx_tma_kernel(const __grid_constant__ TmaTestParams params) {
    const uint32_t thread = ptx::thread_idx(), tile = ptx::dynamic_shared();
    const uint32_t barrier = tile + (params.bytes + 127) / 128 * 128;
    if (thread == 0) {
        ptx::prefetch_tensormap(&params.load);
        ptx::mbar_init(barrier, 1);
        ptx::fence_mbarrier_init_release_cluster();
    }
    ptx::sync_block();
    const int32_t(&at)[3] = params.load_at;
    if (thread == 0) {
        ptx::mbar_arrive_expect(barrier, params.bytes);
        if (params.rank == 3) {
            ptx::tma_prefetch_3d(&params.load, at[0], at[1], at[2]);
            ptx::tma_load_3d(tile, &params.load, at[0], at[1], at[2], barrier);
        } else if (params.mode == TmaTestMode::kHint) {
            ptx::tma_load_2d_hint(tile, &params.load, at[0], at[1], barrier, ptx::kEvictLast);
        } else {
            ptx::tma_load_2d(tile, &params.load, at[0], at[1], barrier);
        }
    }
    ptx::Deadline deadline(params.common.limits);
    const bool in_time = ptx::mbar_wait(barrier, 0, deadline);
    if (ptx::sync_block_or(!in_time)) return;
    for (uint32_t word = thread; word < params.bytes / 4; word += ptx::block_threads()) {
        params.common.put(0, word, ptx::load_shared<uint32_t>(tile + 4 * word));
    }
    if (thread == 0) {
        const int32_t(&to)[3] = params.store_at;
        if (params.rank == 3) {
            ptx::tma_store_3d(&params.store, to[0], to[1], to[2], tile);
        } else if (params.mode == TmaTestMode::kReduce) {
            ptx::tma_reduce_add_2d(&params.store, to[0], to[1], tile);
        } else {
            ptx::tma_store_2d(&params.store, to[0], to[1], tile);
        }
        ptx::bulk_commit();
        ptx::bulk_wait<0>();
    }
}

struct ClusterTestParams {
    ptx::TensorMap map;  // BF16 [64 * clusters, 64], box 64 x 64, no swizzle
    PtxTestParams common;
};

/// Two blocks of a cluster read each other's shared memory, signal each other and get one tile by multicast.
/// out[0]: 256 words a block, out[1]: the tile a block.
__global__ void __launch_bounds__(128) ptx_cluster_kernel(const __grid_constant__ ClusterTestParams params) {
    constexpr uint32_t kTileBytes = 8192, kThreads = 128;
    const uint32_t thread = ptx::thread_idx(), block = ptx::block_idx(), tile = ptx::dynamic_shared();
    const uint32_t words = tile + kTileBytes, mail = words + 4 * kThreads, late = mail + 16;
    const uint32_t barriers = late + 16;
    const uint32_t tile_barrier = barriers, mail_barrier = barriers + 8, late_barrier = barriers + 16,
                   plain_barrier = barriers + 24;
    const uint32_t rank = ptx::cluster_rank(), peer = rank ^ 1;
    const PtxTestParams& common = params.common;
    if (thread == 0) {
        for (uint32_t i = 0; i < 4; ++i) ptx::mbar_init(barriers + 8 * i, 1);
        ptx::fence_mbarrier_init_release_cluster();
        ptx::mbar_arrive_expect(tile_barrier, kTileBytes);
    }
    ptx::store_shared(words + 4 * thread, block * 1000 + thread);
    ptx::sync_warp();
    ptx::sync_cluster();

    common.put(0, 256 * block + thread,
               ptx::load_shared_cluster(ptx::cluster_address(words + 4 * ((thread + 1) % kThreads), peer)));
    ptx::Deadline deadline(common.limits);
    if (thread == 0) {
        if (rank == 0) {
            const int32_t row = static_cast<int32_t>(block / 2 * 64);
            ptx::tma_load_2d_multicast(tile, &params.map, 0, row, tile_barrier, 3);
        }
        const uint32_t mapped_mail = ptx::cluster_address(mail_barrier, peer);
        ptx::mbar_arrive_expect_cluster(mapped_mail, 16);
        const uint32_t letter[4] = {block, block + 10, block + 20, block + 30};
        ptx::store_async_cluster(ptx::cluster_address(mail, peer), letter, mapped_mail);

        ptx::store_shared(late, 7000 + block);
        ptx::mbar_arrive_cluster_release(ptx::cluster_address(late_barrier, peer));
        ptx::mbar_arrive_cluster(ptx::cluster_address(plain_barrier, peer));
        if (ptx::mbar_wait_acquire_cluster(late_barrier, 0, deadline)) {
            common.put(0, 256 * block + kThreads, ptx::load_shared_cluster(ptx::cluster_address(late, peer)));
        }
        if (ptx::mbar_wait(mail_barrier, 0, deadline)) {
            for (uint32_t i = 0; i < 4; ++i) {
                common.put(0, 256 * block + kThreads + 1 + i, ptx::load_shared<uint32_t>(mail + 4 * i));
            }
        }
        common.put(0, 256 * block + kThreads + 5, ptx::mbar_wait(plain_barrier, 0, deadline) ? 1 : 0);
        common.put(0, 256 * block + kThreads + 6, rank);
        common.put(0, 256 * block + kThreads + 7, ptx::cluster_blocks());
    }
    if (ptx::mbar_wait(tile_barrier, 0, deadline)) {
        for (uint32_t word = thread; word < kTileBytes / 4; word += kThreads) {
            common.put(1, kTileBytes / 4 * block + word, ptx::load_shared<uint32_t>(tile + 4 * word));
        }
    }
    ptx::sync_warp();
    ptx::sync_cluster();
}

}  // namespace mok
