// csrc/ptx/device/tma.cuh on the emulated machine.
#pragma once

#include <cstdint>

#include "csrc/emu/tensor_map_copy.h"
#include "csrc/ptx/host/base.h"
#include "csrc/ptx/tensor_map_type.h"

namespace mok::ptx {

/// prefetch.tensormap: a hint, also for a map that no copy uses.
MOK_DEVICE void prefetch_tensormap(const TensorMap*, Site site = Site::current()) {
    emu::enter("prefetch_tensormap", site);
}

/// cp.async.bulk.tensor.2d global to shared.
MOK_DEVICE void tma_load_2d(uint32_t destination, const TensorMap* map, int32_t x, int32_t y,
                            uint32_t barrier, Site site = Site::current()) {
    emu::enter("tma_load_2d", site);
    const int32_t at[] = {x, y};
    emu::issue_tensor_load("tma_load_2d", map, 2, at, destination, barrier);
}

/// The same with an L2 policy.
MOK_DEVICE void tma_load_2d_hint(uint32_t destination, const TensorMap* map, int32_t x, int32_t y,
                                 uint32_t barrier, uint64_t, Site site = Site::current()) {
    emu::enter("tma_load_2d_hint", site);
    const int32_t at[] = {x, y};
    emu::issue_tensor_load("tma_load_2d_hint", map, 2, at, destination, barrier);
}

/// cp.async.bulk.tensor.3d.
MOK_DEVICE void tma_load_3d(uint32_t destination, const TensorMap* map, int32_t x, int32_t y, int32_t z,
                            uint32_t barrier, Site site = Site::current()) {
    emu::enter("tma_load_3d", site);
    const int32_t at[] = {x, y, z};
    emu::issue_tensor_load("tma_load_3d", map, 3, at, destination, barrier);
}

/// cp.async.bulk.prefetch.tensor.3d: a hint, but what it names must be there.
MOK_DEVICE void tma_prefetch_3d(const TensorMap* map, int32_t x, int32_t y, int32_t z,
                                Site site = Site::current()) {
    emu::enter("tma_prefetch_3d", site);
    const int32_t at[] = {x, y, z};
    emu::check_tensor_prefetch(map, 3, at);
}

/// The 2d load into every block in `blocks`.
MOK_DEVICE void tma_load_2d_multicast(uint32_t destination, const TensorMap* map, int32_t x, int32_t y,
                                      uint32_t barrier, uint16_t blocks, Site site = Site::current()) {
    emu::enter("tma_load_2d_multicast", site);
    if (blocks == 0) emu::fail(emu::ErrorKind::kUsage, "names no block");
    const int32_t at[] = {x, y};
    emu::issue_tensor_load("tma_load_2d_multicast", map, 2, at, destination, barrier, blocks);
}

/// cp.async.bulk.tensor.2d shared to global, in the thread's bulk group.
MOK_DEVICE void tma_store_2d(const TensorMap* map, int32_t x, int32_t y, uint32_t source,
                             Site site = Site::current()) {
    emu::enter("tma_store_2d", site);
    const int32_t at[] = {x, y};
    emu::issue_tensor_store("tma_store_2d", map, 2, at, source, /* add */ false);
}

/// The same in three dimensions.
MOK_DEVICE void tma_store_3d(const TensorMap* map, int32_t x, int32_t y, int32_t z, uint32_t source,
                             Site site = Site::current()) {
    emu::enter("tma_store_3d", site);
    const int32_t at[] = {x, y, z};
    emu::issue_tensor_store("tma_store_3d", map, 3, at, source, /* add */ false);
}

/// cp.reduce.async.bulk.tensor.2d.add of the map's type.
MOK_DEVICE void tma_reduce_add_2d(const TensorMap* map, int32_t x, int32_t y, uint32_t source,
                                  Site site = Site::current()) {
    emu::enter("tma_reduce_add_2d", site);
    const int32_t at[] = {x, y};
    emu::issue_tensor_store("tma_reduce_add_2d", map, 2, at, source, /* add */ true);
}

}  // namespace mok::ptx
