// csrc/ptx/device/bulk.cuh on the emulated machine.
#pragma once

#include "csrc/emu/bulk_copy.h"
#include "csrc/ptx/host/base.h"

namespace mok::ptx {

/// cp.async.bulk global to shared.
MOK_DEVICE void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                          Site site = Site::current()) {
    emu::enter("bulk_load", site);
    emu::issue_bulk_load("bulk_load", destination, source, bytes, barrier);
}

/// The same with an L2 policy.
MOK_DEVICE void bulk_load_hint(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                               uint64_t, Site site = Site::current()) {
    emu::enter("bulk_load_hint", site);
    emu::issue_bulk_load("bulk_load_hint", destination, source, bytes, barrier);
}

/// cp.async.bulk shared to global.
MOK_DEVICE void bulk_store(void* destination, uint32_t source, uint32_t bytes, Site site = Site::current()) {
    emu::enter("bulk_store", site);
    emu::issue_bulk_store("bulk_store", destination, source, bytes, false);
}

/// cp.reduce.async.bulk.add.f32.
MOK_DEVICE void bulk_reduce_add_f32(void* destination, uint32_t source, uint32_t bytes,
                                    Site site = Site::current()) {
    emu::enter("bulk_reduce_add_f32", site);
    emu::issue_bulk_store("bulk_reduce_add_f32", destination, source, bytes, true);
}

/// cp.async.bulk.commit_group.
MOK_DEVICE void bulk_commit(Site site = Site::current()) {
    if (emu::is_left_out("bulk_commit", site)) return;
    emu::enter("bulk_commit", site);
    emu::bulk_commit();
}

/// cp.async.bulk.wait_group.
template <int kGroups>
MOK_DEVICE void bulk_wait(Site site = Site::current()) {
    if (emu::is_left_out("bulk_wait", site)) return;
    emu::enter("bulk_wait", site);
    emu::bulk_wait(kGroups, false);
}

/// cp.async.bulk.wait_group.read.
template <int kGroups>
MOK_DEVICE void bulk_wait_read(Site site = Site::current()) {
    if (emu::is_left_out("bulk_wait_read", site)) return;
    emu::enter("bulk_wait_read", site);
    emu::bulk_wait(kGroups, true);
}

/// cp.async.bulk.prefetch.L2: its range must exist.
MOK_DEVICE void bulk_prefetch_l2(const void* source, uint32_t bytes, Site site = Site::current()) {
    emu::enter("bulk_prefetch_l2", site);
    emu::check_bulk_prefetch(source, bytes);
}

}  // namespace mok::ptx
