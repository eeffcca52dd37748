#include "csrc/bindings/emulator/block_names.h"

#include "csrc/gemm/sm90_shared.cuh"

namespace mok::emulator {

void name_gemm_block(launch::EmulatorStream& stream) {
    using namespace sm90;
    constexpr Shared kShared{0};
    constexpr uint32_t kBarrier = 8;
    launch::KernelNames names;
    names.shared = {
        {0, Shared::kStaging, kStageBytes, "stage"},
        {kShared.staging(0), kParts * kStagingBytes, kStagingBytes, "staging"},
        {kShared.pull(0), kPullSlots * kPullSlotBytes, kPullSlotBytes, "pulled piece"},
        {kShared.task(0), kTaskSlots * kTaskBytes, kTaskBytes, "task"},
        {kShared.stage_full(0), kStages * kBarrier, kBarrier, "stage full"},
        {kShared.stage_empty(0), kStages * kBarrier, kBarrier, "stage empty"},
        {kShared.staged(0), kParts * kBarrier, kBarrier, "staged"},
        {kShared.staging_empty(0), kParts * kBarrier, kBarrier, "staging empty"},
        {kShared.task_full(0), kTaskSlots * kBarrier, kBarrier, "task full"},
        {kShared.task_empty(0), kTaskSlots * kBarrier, kBarrier, "task empty"},
        {kShared.claim(), kBarrier, kBarrier, "claim"},
        {kShared.preview(), kBarrier, kBarrier, "preview"},
        {kShared.pulled(0), kPullSlots * kBarrier, kBarrier, "pulled"},
    };
    names.roles = {{kLoaderWarp, 1, "load"},
                   {kSchedulerWarp, 1, "schedule"},
                   {kStoreWarp, 1, "store"},
                   {kPullWarp, 1, "pull"},
                   {kFirstConsumerWarp, kPartWarps, "rows 0-63"},
                   {kFirstConsumerWarp + kPartWarps, kPartWarps, "rows 64-127"}};
    for (const char* kernel : {"mok's grouped GEMM", "mok's forward kernel", "mok's backward kernel"}) {
        stream.names[kernel] = names;
    }
}

}  // namespace mok::emulator
