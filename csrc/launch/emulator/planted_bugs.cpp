#include "csrc/launch/emulator/planted_bugs.h"

#include <algorithm>

#include "csrc/launch/emulator/launch.h"
#include "csrc/launch/emulator/planted/cluster.h"
#include "csrc/launch/emulator/planted/lanes.h"
#include "csrc/launch/emulator/planted/memory.h"
#include "csrc/launch/emulator/planted/ranks.h"
#include "csrc/launch/emulator/planted/ring.h"
#include "csrc/layout/check.h"

namespace mok::launch {

namespace {

using planted::Bug;

struct PlantedKernel {
    const char* name;
    void (*kernel)(planted::Params);
    uint32_t blocks, threads, shared_bytes, cluster;
    bool cooperative;
    KernelNames names;
};

const PlantedKernel& ring() {
    using namespace planted::ring;
    static const PlantedKernel kernel{"ring",
                                      planted::ring_kernel,
                                      2,
                                      96,
                                      kBytes,
                                      1,
                                      true,
                                      {{{kFull, 16, 8, "full"},
                                        {kEmpty, 16, 8, "empty"},
                                        {kStaged, 8, 8, "staged"},
                                        {kFree, 8, 8, "staging free"},
                                        {kResult, 8, 8, "result"},
                                        {kData, kStages * kChunkBytes, kChunkBytes, "stage"},
                                        {kStaging, kChunkBytes, kChunkBytes, "staging"}},
                                       {{0, 1, "load"}, {1, 1, "compute"}, {2, 1, "store"}}}};
    return kernel;
}

const PlantedKernel& memory() {
    static const PlantedKernel kernel{
        "memory", planted::memory_kernel, 2, 64, planted::memory::kBytes, 1, true, {}};
    return kernel;
}

const PlantedKernel& lanes() {
    static const PlantedKernel kernel{
        "lanes", planted::lanes_kernel, 1, 256, planted::lanes::kBytes, 1, false, {}};
    return kernel;
}

const PlantedKernel& ranks() {
    static const PlantedKernel kernel{"ranks", planted::ranks_kernel, 1, 32, 0, 1, false, {}};
    return kernel;
}

const PlantedKernel& cluster() {
    using namespace planted::cluster;
    static const PlantedKernel kernel{
        "cluster",
        planted::cluster_kernel,
        2,
        32,
        kBytes,
        2,
        false,
        {{{kLate, 8, 8, "late"}, {kFreed, 8, 8, "freed"}, {kWord, 128, 4, "word"}, {kLetter, 4, 4, "letter"}},
         {}}};
    return kernel;
}

struct Planted {
    const char* name;
    const PlantedKernel& (*kernel)();
    Bug bug;
};

#define MOK_BUG(KERNEL, BUG) \
    { #BUG, KERNEL, Bug::BUG }
constexpr Planted kPlanted[] = {
    {"ring", ring, Bug::kNone},
    {"memory", memory, Bug::kNone},
    {"lanes", lanes, Bug::kNone},
    {"ranks", ranks, Bug::kNone},
    {"cluster", cluster, Bug::kNone},
    MOK_BUG(ring, kRefillsWithoutEmpty),
    MOK_BUG(ring, kReadsWithoutFull),
    MOK_BUG(ring, kNoProxyFenceBeforeStore),
    MOK_BUG(ring, kNoWarpSyncBeforeHandOver),
    MOK_BUG(ring, kExpectsTooFewBytes),
    MOK_BUG(ring, kExpectsTooManyBytes),
    MOK_BUG(ring, kOverwritesStaging),
    MOK_BUG(ring, kFlagsAfterReadOnly),
    MOK_BUG(ring, kNoGlobalProxyFence),
    MOK_BUG(ring, kNoProxyFenceBeforeRefill),
    MOK_BUG(ring, kArrivesTwice),
    MOK_BUG(ring, kNoInitFence),
    MOK_BUG(ring, kNoBarrierAfterInit),
    MOK_BUG(ring, kLeavesUnreadStore),
    MOK_BUG(ring, kLeavesUnawaitedLoad),
    MOK_BUG(ring, kLeavesHalfAPhase),
    MOK_BUG(ring, kWrongParity),
    MOK_BUG(ring, kOverwritesMbarrier),
    MOK_BUG(ring, kUsesNoMbarrier),
    MOK_BUG(ring, kUnalignedBulk),
    MOK_BUG(ring, kForgetsCommit),
    MOK_BUG(memory, kSharedOutOfBounds),
    MOK_BUG(memory, kSharedMisaligned),
    MOK_BUG(memory, kGlobalOutOfBounds),
    MOK_BUG(memory, kGlobalMisaligned),
    MOK_BUG(memory, kNullPointer),
    MOK_BUG(memory, kWritesConstant),
    MOK_BUG(memory, kNoBlockSync),
    MOK_BUG(memory, kReadsUnwrittenShared),
    MOK_BUG(memory, kReadsUninitialisedLocal),
    MOK_BUG(memory, kPlainAdd),
    MOK_BUG(memory, kSameWordTwice),
    MOK_BUG(memory, kTwoReductions),
    MOK_BUG(memory, kNotCooperative),
    MOK_BUG(memory, kPollsPlainly),
    MOK_BUG(lanes, kSkipsShuffle),
    MOK_BUG(lanes, kOtherInstruction),
    MOK_BUG(lanes, kLaneLeaves),
    MOK_BUG(lanes, kNamedCount),
    MOK_BUG(lanes, kNamedAlone),
    MOK_BUG(lanes, kNamedOnceMore),
    MOK_BUG(lanes, kReadsBeforeWarpSync),
    MOK_BUG(lanes, kRegistersExceeded),
    MOK_BUG(lanes, kRegistersWrongWay),
    MOK_BUG(ranks, kReleasesAtGpuScope),
    MOK_BUG(ranks, kAcquiresAtGpuScope),
    MOK_BUG(ranks, kRelaxedStore),
    MOK_BUG(ranks, kRelaxedLoad),
    MOK_BUG(ranks, kNoFlag),
    MOK_BUG(ranks, kPlainFlag),
    MOK_BUG(ranks, kReadsPeerTooEarly),
    MOK_BUG(ranks, kTouchesPrivate),
    MOK_BUG(ranks, kEndsBeforePeer),
    MOK_BUG(ranks, kWaitsForNothing),
    MOK_BUG(ranks, kTraps),
    MOK_BUG(ranks, kTrapsAtOnce),
    MOK_BUG(cluster, kLeavesCluster),
    MOK_BUG(cluster, kPublishesWithPlainArrive),
    MOK_BUG(cluster, kWaitsAtBlockScope),
    MOK_BUG(cluster, kNoClusterSync),
    MOK_BUG(cluster, kRelaxedClusterArrive),
    MOK_BUG(cluster, kForgetsPeerRelease),
};
#undef MOK_BUG

}  // namespace

std::vector<std::string> planted_bugs() {
    std::vector<std::string> names;
    for (const Planted& each : kPlanted) names.emplace_back(each.name);
    return names;
}

void launch_planted_bug(const std::string& name, const PlantedBuffers& buffers, int rank,
                        EmulatorStream& stream) {
    const Planted* planted = std::find_if(std::begin(kPlanted), std::end(kPlanted),
                                          [&](const Planted& each) { return name == each.name; });
    MOK_CHECK(planted != std::end(kPlanted), "bug is '", name,
              "', which is not planted; planted_bugs() lists them.");
    const PlantedKernel& kernel = planted->kernel();
    planted::Params params{};
    params.bug = planted->bug;
    params.in = static_cast<const float*>(buffers.in[rank]);
    params.out = static_cast<float*>(buffers.out[rank]);
    params.words = static_cast<uint32_t*>(buffers.words[rank]);
    params.peer_words = static_cast<uint32_t*>(buffers.words[1 - rank]);
    params.window = static_cast<float*>(buffers.window[rank]);
    params.peer_window = static_cast<float*>(buffers.window[1 - rank]);
    params.flags = static_cast<uint32_t*>(buffers.flags[rank]);
    params.peer_flags = static_cast<uint32_t*>(buffers.flags[1 - rank]);
    params.rank = rank;
    char* limits = static_cast<char*>(buffers.limits[rank]);
    params.limits = {1'000'000, reinterpret_cast<uint32_t*>(limits),
                     reinterpret_cast<ptx::WaitRecord*>(limits + 128), rank};
    stream.names[kernel.name] = kernel.names;
    const bool cooperative = kernel.cooperative && planted->bug != Bug::kNotCooperative;
    launch(kernel.name, kernel.kernel,
           {kernel.blocks, kernel.threads, kernel.shared_bytes, kernel.cluster, cooperative}, &stream,
           params);
}

}  // namespace mok::launch
