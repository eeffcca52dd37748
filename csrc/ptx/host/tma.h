// csrc/ptx/device/tma.cuh on the emulated machine.
#pragma once

#include <cstdint>

#include "csrc/emu/machine.h"
#include "csrc/emu/tensor_map_copy.h"
#include "csrc/ptx/tensor_map_type.h"

namespace mok::ptx {

/// prefetch.tensormap: a hint, also for a map that no copy uses.
inline void prefetch_tensormap(const TensorMap*, emu::Site site = emu::Site::current()) {
    emu::enter("prefetch_tensormap", site);
}

/// cp.async.bulk.tensor.2d global to shared.
inline void tma_load_2d(uint32_t destination, const TensorMap* map, int32_t x, int32_t y, uint32_t barrier,
                        emu::Site site = emu::Site::current()) {
    emu::enter("tma_load_2d", site);
    const int32_t at[] = {x, y};
    emu::issue_tensor_load("tma_load_2d", map, 2, at, destination, barrier);
}

/// The same with an L2 policy.
inline void tma_load_2d_hint(uint32_t destination, const TensorMap* map, int32_t x, int32_t y,
                             uint32_t barrier, uint64_t, emu::Site site = emu::Site::current()) {
    emu::enter("tma_load_2d_hint", site);
    const int32_t at[] = {x, y};
    emu::issue_tensor_load("tma_load_2d_hint", map, 2, at, destination, barrier);
}

/// cp.async.bulk.tensor.3d.
inline void tma_load_3d(uint32_t destination, const TensorMap* map, int32_t x, int32_t y, int32_t z,
                        uint32_t barrier, emu::Site site = emu::Site::current()) {
    emu::enter("tma_load_3d", site);
    const int32_t at[] = {x, y, z};
    emu::issue_tensor_load("tma_load_3d", map, 3, at, destination, barrier);
}

/// The 2d load into every block in `blocks`.
inline void tma_load_2d_multicast(uint32_t destination, const TensorMap* map, int32_t x, int32_t y,
                                  uint32_t barrier, uint16_t blocks, emu::Site site = emu::Site::current()) {
    emu::enter("tma_load_2d_multicast", site);
    if (blocks == 0) emu::fail(emu::ErrorKind::kUsage, "names no block");
    const int32_t at[] = {x, y};
    emu::issue_tensor_load("tma_load_2d_multicast", map, 2, at, destination, barrier, blocks);
}

/// cp.async.bulk.tensor.2d shared to global, in the thread's bulk group.
inline void tma_store_2d(const TensorMap* map, int32_t x, int32_t y, uint32_t source,
                         emu::Site site = emu::Site::current()) {
    emu::enter("tma_store_2d", site);
    const int32_t at[] = {x, y};
    emu::issue_tensor_store("tma_store_2d", map, 2, at, source, /* add */ false);
}

/// The same in three dimensions.
inline void tma_store_3d(const TensorMap* map, int32_t x, int32_t y, int32_t z, uint32_t source,
                         emu::Site site = emu::Site::current()) {
    emu::enter("tma_store_3d", site);
    const int32_t at[] = {x, y, z};
    emu::issue_tensor_store("tma_store_3d", map, 3, at, source, /* add */ false);
}

/// cp.reduce.async.bulk.tensor.2d.add of the map's type.
inline void tma_reduce_add_2d(const TensorMap* map, int32_t x, int32_t y, uint32_t source,
                              emu::Site site = emu::Site::current()) {
    emu::enter("tma_reduce_add_2d", site);
    const int32_t at[] = {x, y};
    emu::issue_tensor_store("tma_reduce_add_2d", map, 2, at, source, /* add */ true);
}

}  // namespace mok::ptx
