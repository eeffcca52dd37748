// wgmma: D[64, N] (+)= A[64, 16] B[N, 16]^T, BF16 operands from shared memory, FP32 accumulators in
// registers.
//
// Register i of thread t: row 16 (t / 32) + (t % 32) / 4 + 8 ((i / 2) % 2), column 8 (i / 4) + 2 (t % 4) + i
// % 2. Order: wgmma_fence, the wgmmas of one batch, wgmma_commit, wgmma_wait; between fence and wait nothing
// touches the accumulators. Accumulators are arrays with constant indices, all of it inlined, one basic block
// from fence to commit; otherwise ptxas serialises (its messages C7510 to C7520).
#pragma once

#include "csrc/ptx/device/base.cuh"
#include "csrc/ptx/wgmma_descriptor.h"

namespace mok::ptx {

/// wgmma.fence: registers written by ordinary code are ready for wgmma (sm_90a).
MOK_DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/// wgmma.commit_group (sm_90a).
MOK_DEVICE void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// wgmma.wait_group: at most kGroups groups are unfinished; accumulators and operands of the others are free
/// (sm_90a).
template <int kGroups>
MOK_DEVICE void wgmma_wait() {
    static_assert(kGroups >= 0 && kGroups <= 7);
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

/// No instruction: ordinary code that touches the accumulators stays on its side of this place. Around a loop
/// of wgmmas it keeps ptxas from copying them while they are in flight, which it would serialise (C7514,
/// C7520).
template <int N>
MOK_DEVICE void wgmma_pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Operand lists of N / 2 registers: their numbers in the text, and the array elements behind them.
#define MOK_TEN(T) \
    "%" T "0, %" T "1, %" T "2, %" T "3, %" T "4, %" T "5, %" T "6, %" T "7, %" T "8, %" T "9, "
#define MOK_TEXT_4 "%0, %1, %2, %3"
#define MOK_TEXT_8 MOK_TEXT_4 ", %4, %5, %6, %7"
#define MOK_TEXT_16 MOK_TEN("") "%10, %11, %12, %13, %14, %15"
#define MOK_TEXT_32 MOK_TEN("") MOK_TEN("1") MOK_TEN("2") "%30, %31"
#define MOK_TEXT_48 \
    MOK_TEN("") MOK_TEN("1") MOK_TEN("2") MOK_TEN("3") "%40, %41, %42, %43, %44, %45, %46, %47"
#define MOK_TENS_TO_60 MOK_TEN("") MOK_TEN("1") MOK_TEN("2") MOK_TEN("3") MOK_TEN("4") MOK_TEN("5")
#define MOK_TEXT_64 MOK_TENS_TO_60 "%60, %61, %62, %63"
#define MOK_TENS_TO_90 MOK_TENS_TO_60 MOK_TEN("6") MOK_TEN("7") MOK_TEN("8")
#define MOK_TEXT_96 MOK_TENS_TO_90 "%90, %91, %92, %93, %94, %95"
#define MOK_TENS_TO_120 MOK_TENS_TO_90 MOK_TEN("9") MOK_TEN("10") MOK_TEN("11")
#define MOK_TEXT_128 MOK_TENS_TO_120 "%120, %121, %122, %123, %124, %125, %126, %127"

#define MOK_D4(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define MOK_D8(I) MOK_D4(I), MOK_D4(I + 4)
#define MOK_D16(I) MOK_D8(I), MOK_D8(I + 8)
#define MOK_D32(I) MOK_D16(I), MOK_D16(I + 16)
#define MOK_D48(I) MOK_D32(I), MOK_D16(I + 32)
#define MOK_D64(I) MOK_D32(I), MOK_D32(I + 32)
#define MOK_D96(I) MOK_D64(I), MOK_D32(I + 64)
#define MOK_D128(I) MOK_D64(I), MOK_D64(I + 64)

// A to TB are the numbers of the operands after the R accumulators.
#define MOK_WGMMA_BF16(N, R, A, B, ACCUMULATE, TA, TB)                                           \
    asm volatile(                                                                                \
        "{\n.reg .pred p;\n"                                                                     \
        "setp.ne.b32 p, %" ACCUMULATE                                                            \
        ", 0;\n"                                                                                 \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MOK_TEXT_##R                \
        "}, %" A ", %" B ", p, 1, 1, %" TA ", %" TB ";\n}"                                       \
        : MOK_D##R(0)                                                                            \
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(accumulate)), "n"(static_cast<int>(kMajorA)), \
          "n"(static_cast<int>(kMajorB)))

/// wgmma.mma_async.m64nNk16.f32.bf16.bf16 of the descriptors a and b; without `accumulate` d is overwritten.
/// N is 8, 16, 32, 64, 96, 128, 192 or 256 (sm_90a).
template <int N, Major kMajorA, Major kMajorB>
MOK_DEVICE void wgmma_bf16(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 96 || N == 128 || N == 192 || N == 256,
                  "add the operand list of this N above");
    if constexpr (N == 8) {
        MOK_WGMMA_BF16(8, 4, "4", "5", "6", "7", "8");
    } else if constexpr (N == 16) {
        MOK_WGMMA_BF16(16, 8, "8", "9", "10", "11", "12");
    } else if constexpr (N == 32) {
        MOK_WGMMA_BF16(32, 16, "16", "17", "18", "19", "20");
    } else if constexpr (N == 64) {
        MOK_WGMMA_BF16(64, 32, "32", "33", "34", "35", "36");
    } else if constexpr (N == 96) {
        MOK_WGMMA_BF16(96, 48, "48", "49", "50", "51", "52");
    } else if constexpr (N == 128) {
        MOK_WGMMA_BF16(128, 64, "64", "65", "66", "67", "68");
    } else if constexpr (N == 192) {
        MOK_WGMMA_BF16(192, 96, "96", "97", "98", "99", "100");
    } else {
        MOK_WGMMA_BF16(256, 128, "128", "129", "130", "131", "132");
    }
}

#undef MOK_WGMMA_BF16
#undef MOK_D128
#undef MOK_D96
#undef MOK_D64
#undef MOK_D48
#undef MOK_D32
#undef MOK_D16
#undef MOK_D8
#undef MOK_D4
#undef MOK_TEXT_128
#undef MOK_TENS_TO_120
#undef MOK_TEXT_96
#undef MOK_TENS_TO_90
#undef MOK_TEXT_64
#undef MOK_TENS_TO_60
#undef MOK_TEXT_48
#undef MOK_TEXT_32
#undef MOK_TEXT_16
#undef MOK_TEXT_8
#undef MOK_TEXT_4
#undef MOK_TEN

}  // namespace mok::ptx
