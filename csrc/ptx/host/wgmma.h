// csrc/ptx/device/wgmma.cuh on the emulated machine: every N that is a multiple of 8.
#pragma once

#include <cstdint>

#include "csrc/emu/matrix_wgmma.h"
#include "csrc/ptx/host/base.h"
#include "csrc/ptx/wgmma_descriptor.h"

namespace mok::ptx {

/// wgmma.fence.
MOK_DEVICE void wgmma_fence(Site site = Site::current()) {
    if (emu::is_left_out("wgmma_fence", site)) return;
    emu::wgmma_fence(site);
}

/// wgmma.commit_group.
MOK_DEVICE void wgmma_commit(Site site = Site::current()) {
    if (emu::is_left_out("wgmma_commit", site)) return;
    emu::wgmma_commit(site);
}

/// wgmma.wait_group.
template <int kGroups>
MOK_DEVICE void wgmma_wait(Site site = Site::current()) {
    static_assert(kGroups >= 0 && kGroups <= 7);
    if (emu::is_left_out("wgmma_wait", site)) return;
    emu::wgmma_wait(kGroups, site);
}

/// No instruction: what it keeps the device's compiler from, the machine checks.
template <int N>
MOK_DEVICE void wgmma_pin(float (&)[N]) {}

/// wgmma.mma_async.m64nNk16.f32.bf16.bf16.
template <int N, Major kMajorA, Major kMajorB>
MOK_DEVICE void wgmma_bf16(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate,
                           Site site = Site::current()) {
    static_assert(N >= 8 && N <= 256 && N % 8 == 0);
    constexpr emu::WgmmaKind kKind{emu::MatrixElement::kBFloat16, emu::MatrixElement::kBFloat16,
                                   kMajorA == Major::kMN, kMajorB == Major::kMN};
    emu::wgmma_issue(emu::make_wgmma(a, b, N, accumulate, kKind), d, site);
}

}  // namespace mok::ptx
