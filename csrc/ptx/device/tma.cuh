// Tensor copies by TMA. Coordinates are elements, innermost first; what lies outside the tensor is read as
// zero and not written. A load completes the bytes of its whole box.
// The innermost coordinate is a multiple of 16 bytes. Any coordinate of a load may be negative, none of a
// store or reduction. Hardware answers a breach with an illegal instruction, which ends the CUDA context.
#pragma once

#include "csrc/ptx/device/base.cuh"
#include "csrc/ptx/tensor_map_type.h"

namespace mok::ptx {

/// prefetch.tensormap (sm_90).
MOK_DEVICE void prefetch_tensormap(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// cp.async.bulk.tensor.2d global to shared, completing on an mbarrier of this block (sm_90).
MOK_DEVICE void tma_load_2d(uint32_t destination, const TensorMap* map, int32_t x, int32_t y,
                            uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
        "%3}], "
        "[%4];" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

/// The same with an L2 policy (sm_90).
MOK_DEVICE void tma_load_2d_hint(uint32_t destination, const TensorMap* map, int32_t x, int32_t y,
                                 uint32_t barrier, uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
        : "memory");
}

/// cp.async.bulk.tensor.3d, for stacks of matrices: rows of one never run into the next (sm_90).
MOK_DEVICE void tma_load_3d(uint32_t destination, const TensorMap* map, int32_t x, int32_t y, int32_t z,
                            uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
        "%3, "
        "%4}], [%5];" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

/// cp.async.bulk.prefetch.tensor.3d: the box into L2, what lies outside the tensor left out (sm_90).
MOK_DEVICE void tma_prefetch_3d(const TensorMap* map, int32_t x, int32_t y, int32_t z) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x),
                 "r"(y), "r"(z)
                 : "memory");
}

/// The 2d load into the same place of every block in `blocks` (bit = cluster rank), each of which expects the
/// bytes on its own barrier (sm_90).
MOK_DEVICE void tma_load_2d_multicast(uint32_t destination, const TensorMap* map, int32_t x, int32_t y,
                                      uint32_t barrier, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
        : "memory");
}

/// cp.async.bulk.tensor.2d shared to global, in the thread's bulk group (sm_90).
MOK_DEVICE void tma_store_2d(const TensorMap* map, int32_t x, int32_t y, uint32_t source) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x),
        "r"(y), "r"(source)
        : "memory");
}

/// The same in three dimensions (sm_90).
MOK_DEVICE void tma_store_3d(const TensorMap* map, int32_t x, int32_t y, int32_t z, uint32_t source) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(map),
        "r"(x), "r"(y), "r"(z), "r"(source)
        : "memory");
}

/// cp.reduce.async.bulk.tensor.2d.add of the map's type: one adder per element, or the order is free (sm_90).
MOK_DEVICE void tma_reduce_add_2d(const TensorMap* map, int32_t x, int32_t y, uint32_t source) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(
            map),
        "r"(x), "r"(y), "r"(source)
        : "memory");
}

}  // namespace mok::ptx
