// Fences. Proxy fences stand between ordinary accesses and those of TMA, bulk copies and tensor cores to the
// same memory; ordering fences make a relaxed access before or after them a release or an acquire.
#pragma once

#include "csrc/ptx/device/base.cuh"

namespace mok::ptx {

/// fence.acq_rel.cta (sm_70).
MOK_DEVICE void fence_acq_rel_cta() {
    asm volatile("fence.acq_rel.cta;" ::: "memory");
}

/// fence.acq_rel.cluster (sm_90).
MOK_DEVICE void fence_acq_rel_cluster() {
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
}

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

/// fence.proxy.async: between ordinary and asynchronous accesses, all state spaces (sm_90).
MOK_DEVICE void fence_proxy_async() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

/// The same for shared memory of this block only (sm_90).
MOK_DEVICE void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// The same for shared memory of the cluster: the reader is another block's or a multicast refill (sm_90).
MOK_DEVICE void fence_proxy_async_shared_cluster() {
    asm volatile("fence.proxy.async.shared::cluster;" ::: "memory");
}

/// The same for global memory: between acquiring what others wrote and loading it by TMA (sm_90).
MOK_DEVICE void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace mok::ptx
