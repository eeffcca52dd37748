// The report of a run in which nothing can move.

#include <bit>

#include "csrc/emu/report.h"
#include "csrc/emu/schedule.h"

namespace mok::emu {

namespace {

bool is_bounded(const Thread& thread) {
    return thread.wait.kind == WaitKind::kMbarrier || thread.wait.kind == WaitKind::kPoll;
}

/// What the thread is at: of a bounded wait the wrapper, not what its test has read last.
std::string describe_place(const Thread& thread) {
    const bool bounded = is_bounded(thread);
    return text("%s at %s", bounded ? thread.wait_place.instruction : thread.instruction,
                describe(bounded ? thread.wait_place.site : thread.site).c_str());
}

bool is_same_wait(const Thread& a, const Thread& b) {
    return a.exited == b.exited && describe_place(a) == describe_place(b) && a.wait.kind == b.wait.kind &&
           a.wait.number == b.wait.number && a.wait.expected == b.wait.expected && a.wait.flag == b.wait.flag;
}

std::string describe_mbarrier(const Block& block, const Wait& wait) {
    const int index = block.mbarrier_of[wait.number / 8];
    if (index < 0) return "an mbarrier that was invalidated";
    const Mbarrier& barrier = block.mbarriers[static_cast<size_t>(index)];
    return text(
        "the mbarrier %s, parity %llu; it is in phase %u: %u of %u arrivals and %lld bytes are missing, %u "
        "copies are on their way",
        describe_shared(block, barrier.address).c_str(), static_cast<unsigned long long>(wait.expected),
        barrier.phase, barrier.pending, barrier.count, static_cast<long long>(barrier.bytes), barrier.loads);
}

/// Threads at a barrier of the block, also of warps that are not complete there.
uint32_t num_waiting(const Block& block, uint32_t id) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < block.num_threads; ++i) {
        const Wait& wait = block.threads[i].wait;
        count += !block.threads[i].exited && wait.kind == WaitKind::kNamed && wait.number == id ? 1 : 0;
    }
    return count;
}

std::string describe_wait(const Thread& thread) {
    const Block& block = thread.block();
    const Wait& wait = thread.wait;
    switch (wait.kind) {
        case WaitKind::kNone:
            return "nothing";
        case WaitKind::kLanes: {
            const uint32_t missing = thread.warp->present & ~thread.warp->exchange.lanes;
            return text("the other lanes of its warp; missing are%s", describe_lanes(missing).c_str());
        }
        case WaitKind::kNamed: {
            const NamedBarrier& barrier = block.named[wait.number];
            if (wait.number == 0) {
                return text("all threads of the block: %u of %u are here", num_waiting(block, wait.number),
                            block.num_threads - block.num_exited);
            }
            return text("named barrier %u: %u of %u threads are here", wait.number, barrier.arrived,
                        barrier.expected);
        }
        case WaitKind::kCluster:
            return text("the cluster: %u threads have arrived", block.cluster->barrier.arrived);
        case WaitKind::kMbarrier:
            return describe_mbarrier(block, wait);
        case WaitKind::kPoll: {
            const std::string place = wait.flag == nullptr ? "a condition" : describe_global(wait.flag);
            return text("%s: %llu expected, %llu seen", place.c_str(),
                        static_cast<unsigned long long>(wait.expected),
                        static_cast<unsigned long long>(wait.seen));
        }
        case WaitKind::kBulk:
            return text("its bulk groups but the newest %u", wait.number);
        case WaitKind::kBulkRead:
            return text("the reads of its bulk groups but the newest %u", wait.number);
        case WaitKind::kRegisters:
            return text("%u registers a thread; the block has %u free for the warp's 32 threads", wait.number,
                        block.free_registers);
        case WaitKind::kSleep:
            return "a poll of its own";
    }
    return "";
}

}  // namespace

void fail_deadlock() {
    Machine& m = *machine;
    std::string message = "deadlock: no thread can run and nothing is in flight. Waiting:";
    for (const auto& launch : m.launches) {
        if (launch->phase == LaunchPhase::kWaiting && launch->launch->rank >= 0) continue;
        for (const auto& block : launch->blocks) {
            for (uint32_t i = 0; i < block->num_warps; ++i) {
                const Warp& warp = block->warps[i];
                for (uint32_t lane = 0; lane < kLanes;) {
                    const Thread& thread = warp.lanes[lane];
                    uint32_t end = lane + 1;
                    while (end < kLanes && is_same_wait(thread, warp.lanes[end])) ++end;
                    if (!thread.exited) {
                        const uint32_t lanes =
                            end - lane == kLanes ? ~0u : ((1u << (end - lane)) - 1) << lane;
                        message += text("\n  %s: %s waits for %s", describe_warp(warp, lanes).c_str(),
                                        describe_place(thread).c_str(), describe_wait(thread).c_str());
                    }
                    lane = end;
                }
            }
        }
        const uint32_t blocks = launch->launch->blocks,
                       started = launch->next_cluster * launch->launch->cluster;
        if (launch->phase == LaunchPhase::kRunning && started < blocks) {
            message += text(
                "\n  launch %s of rank %d is not cooperative: %u of its %u blocks start when others have "
                "left",
                launch->launch->name.c_str(), launch->launch->rank, blocks - started, blocks);
        }
    }
    stop_run(message);
}

}  // namespace mok::emu
