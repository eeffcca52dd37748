// csrc/ptx/device/fence.cuh on the emulated machine.
#pragma once

#include "csrc/ptx/host/base.h"

namespace mok::ptx {

namespace fence_detail {

inline void fence(const char* wrapper, emu::Scope scope, Site site) {
    if (emu::is_left_out(wrapper, site)) return;
    emu::enter(wrapper, site);
    emu::fence(scope);
}

inline void fence_proxy(const char* wrapper, bool shared, bool global, Site site) {
    if (emu::is_left_out(wrapper, site)) return;
    emu::enter(wrapper, site);
    emu::fence_proxy(shared, global);
}

}  // namespace fence_detail

/// fence.acq_rel.gpu.
MOK_DEVICE void fence_acq_rel_gpu(Site site = Site::current()) {
    fence_detail::fence("fence_acq_rel_gpu", emu::Scope::kGpu, site);
}

/// fence.acq_rel.sys.
MOK_DEVICE void fence_acq_rel_sys(Site site = Site::current()) {
    fence_detail::fence("fence_acq_rel_sys", emu::Scope::kSys, site);
}

/// fence.mbarrier_init.
MOK_DEVICE void fence_mbarrier_init_release_cluster(Site site = Site::current()) {
    if (emu::is_left_out("fence_mbarrier_init_release_cluster", site)) return;
    emu::enter("fence_mbarrier_init_release_cluster", site);
    emu::fence_mbarrier_init();
}

/// fence.proxy.async.shared::cta.
MOK_DEVICE void fence_proxy_async_shared(Site site = Site::current()) {
    fence_detail::fence_proxy("fence_proxy_async_shared", true, false, site);
}

/// fence.proxy.async.global.
MOK_DEVICE void fence_proxy_async_global(Site site = Site::current()) {
    fence_detail::fence_proxy("fence_proxy_async_global", false, true, site);
}

}  // namespace mok::ptx
