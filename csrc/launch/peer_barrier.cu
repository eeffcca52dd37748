#include "csrc/comm/shared_memory.h"
#include "csrc/kernels/peer_barrier.cuh"
#include "csrc/kernels/peer_test.cuh"
#include "csrc/launch/launch.cuh"
#include "csrc/launch/peer_barrier.h"
#include "csrc/launch/peer_tests.h"
#include "csrc/layout/check.h"

namespace mok::launch {

namespace {

LaunchShape one_block(const PeerGroup& group) {
    return {1, round_up(static_cast<uint32_t>(group.num_ranks), ptx::kWarpThreads)};
}

}  // namespace

void load_peer_kernels() {
    load_kernel("loading mok's peer barrier", peer_barrier_kernel);
    load_kernel("loading mok's peer barrier", peer_end_kernel);
    load_kernel("loading mok's peer barrier", copy_words_kernel);
}

void launch_peer_barrier(const PeerGroup& group, PeerPhase phase, void* stream) {
    launch("mok's peer barrier", peer_barrier_kernel, one_block(group), stream,
           PeerBarrierParams{group, phase});
}

void launch_peer_end(const PeerGroup& group, const std::string& reason, void* stream) {
    PeerEndParams params{group, {}};
    shared::write_text(params.reason, reason);
    launch("mok's abort kernel", peer_end_kernel, one_block(group), stream, params);
}

void launch_copy_words(void* to, const void* from, int64_t bytes, void* stream) {
    MOK_CHECK(bytes >= 0 && bytes % 8 == 0, "bytes is ", bytes, ", but must be a multiple of 8.");
    if (bytes == 0) return;
    const CopyWordsParams params{static_cast<uint64_t*>(to), static_cast<const uint64_t*>(from), bytes / 8};
    constexpr int64_t kThreads = 256, kMostBlocks = 128;
    const int64_t blocks = ceil_div(params.words, kThreads);
    launch(
        "mok's copy kernel", copy_words_kernel,
        {static_cast<uint32_t>(blocks < kMostBlocks ? blocks : kMostBlocks), static_cast<uint32_t>(kThreads)},
        stream, params);
}

void launch_peer_rounds(const PeerRounds& rounds, void* stream) {
    LaunchShape shape = one_block(rounds.group);
    if (rounds.blocks_are_ranks) {
        shape.blocks = static_cast<uint32_t>(rounds.group.num_ranks);
        shape.cooperative = true;
    }
    const PeerRoundsParams params{
        rounds.group, rounds.blocks_are_ranks, rounds.rounds, rounds.data_offset, rounds.first, rounds.wrong,
        rounds.passed};
    launch("mok's barrier test", peer_rounds_kernel, shape, stream, params);
}

}  // namespace mok::launch
