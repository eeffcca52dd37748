// Fences. Proxy fences stand between ordinary accesses and those of TMA, bulk copies and tensor cores to the
// same memory; ordering fences make a relaxed access before or after them a release or an acquire.
#pragma once

#include "csrc/ptx/device/base.cuh"

namespace mok::ptx {

/// fence.acq_rel.gpu (sm_70).
MOK_DEVICE void fence_acq_rel_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

/// fence.acq_rel.sys (sm_70).
MOK_DEVICE void fence_acq_rel_sys() {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

/// fence.mbarrier_init: this thread's mbar_init calls are seen by the cluster and by TMA (sm_90).
MOK_DEVICE void fence_mbarrier_init_release_cluster() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/// fence.proxy.async.shared::cta: between ordinary and asynchronous accesses to shared memory (sm_90).
MOK_DEVICE void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// The same for global memory: between acquiring what others wrote and loading it by TMA (sm_90).
MOK_DEVICE void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace mok::ptx
