// Small kernels with switchable bugs, one for each kind of thing that the emulator's checker is to find
// (those of tensor copies and tensor cores are csrc/bindings/emulator/tile_bugs.cpp's). With Bug::kNone each
// is right.
#pragma once

#include "csrc/ptx/ptx.h"

namespace mok::planted {

enum class Bug : uint32_t {
    kNone,
    // ring.h
    kRefillsWithoutEmpty,
    kReadsWithoutFull,
    kNoProxyFenceBeforeStore,
    kNoWarpSyncBeforeHandOver,
    kExpectsTooFewBytes,
    kExpectsTooManyBytes,
    kOverwritesStaging,
    kFlagsAfterReadOnly,
    kNoGlobalProxyFence,
    kNoProxyFenceBeforeRefill,
    kArrivesTwice,
    kNoInitFence,
    kNoBarrierAfterInit,
    kLeavesUnreadStore,
    kLeavesUnawaitedLoad,
    kLeavesHalfAPhase,
    kWrongParity,
    kOverwritesMbarrier,
    kUsesNoMbarrier,
    kUnalignedBulk,
    kForgetsCommit,
    // memory.h
    kSharedOutOfBounds,
    kSharedMisaligned,
    kGlobalOutOfBounds,
    kGlobalMisaligned,
    kNullPointer,
    kWritesConstant,
    kNoBlockSync,
    kReadsUnwrittenShared,
    kReadsUninitialisedLocal,
    kPlainAdd,
    kSameWordTwice,
    kTwoReductions,
    kNotCooperative,
    kPollsPlainly,
    // lanes.h
    kSkipsShuffle,
    kOtherInstruction,
    kLaneLeaves,
    kNamedCount,
    kNamedAlone,
    kNamedOnceMore,
    kReadsBeforeWarpSync,
    kRegistersExceeded,
    kRegistersWrongWay,
    // ranks.h
    kReleasesAtGpuScope,
    kAcquiresAtGpuScope,
    kRelaxedStore,
    kRelaxedLoad,
    kNoFlag,
    kPlainFlag,
    kReadsPeerTooEarly,
    kTouchesPrivate,
    kEndsBeforePeer,
    kWaitsForNothing,
    kTraps,
    kTrapsAtOnce,
    // cluster.h
    kLeavesCluster,
    kPublishesWithPlainArrive,
    kWaitsAtBlockScope,
    kNoClusterSync,
    kRelaxedClusterArrive,
    kForgetsPeerRelease,
};

struct Params {
    Bug bug;
    const float* in;       // [1024] of this rank, constant
    float* out;            // [4096] of this rank, zeros, read by the host
    uint32_t* words;       // [64] zeros of this rank: flags
    uint32_t* peer_words;  // the other rank's
    float* window;         // [1024] of this rank, peer-visible, filled by the host before the launch
    float* peer_window;
    uint32_t* flags;  // [64] zeros of this rank, peer-visible
    uint32_t* peer_flags;
    int32_t rank;
    ptx::WaitLimits limits;

    MOK_DEVICE bool has(Bug candidate) const { return bug == candidate; }
};

}  // namespace mok::planted
