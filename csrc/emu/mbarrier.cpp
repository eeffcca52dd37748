#include "csrc/emu/mbarrier.h"

#include <algorithm>

#include "csrc/emu/copies.h"
#include "csrc/emu/memory.h"
#include "csrc/emu/report.h"
#include "csrc/emu/schedule.h"

namespace mok::emu {

namespace {

constexpr int64_t kMaxBytes = (1 << 20) - 1;
constexpr uint32_t kMaxArrivals = (1 << 20) - 1;

std::string name_of(const Block& block, const Mbarrier& barrier) {
    return describe_shared(block, barrier.address);
}

void try_complete(const Block& block, Mbarrier& barrier) {
    note_progress();
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    if (keeps_log()) {
        log_line(text("rank %d block %u: phase %u of %s is complete", block.launch->launch->rank, block.idx,
                      barrier.phase, name_of(block, barrier).c_str()));
    }
    ++barrier.phase;
    barrier.pending = barrier.count;
    if (barrier.component >= 0) {
        barrier.next[0].known.set(static_cast<uint32_t>(barrier.component), barrier.phase);
    }
    for (int i = 0; i < 2; ++i) {
        barrier.done[i] = std::move(barrier.next[i]);
        barrier.next[i] = {};
    }
    for (Thread* waiter : barrier.waiters) make_ready(*waiter);
    barrier.waiters.clear();
}

}  // namespace

Mbarrier& find_mbarrier(Block& block, uint32_t offset) {
    const int index = block.mbarrier_of[offset / 8];
    if (index < 0) {
        fail(ErrorKind::kBarrier, text("uses %s, which is no mbarrier: mbar_init comes first",
                                       describe_shared(block, offset).c_str()));
    }
    Mbarrier& barrier = block.mbarriers[static_cast<size_t>(index)];
    const Thread& me = *machine->current;
    if (!barrier.is_visible && !is_known(barrier.made, me, false)) {
        fail(ErrorKind::kOrder, text("uses the mbarrier %s, whose mbar_init by %s nothing puts before it: a "
                                     "block or cluster barrier "
                                     "must lie between",
                                     name_of(block, barrier).c_str(), describe(*barrier.maker).c_str()));
    }
    return barrier;
}

Mbarrier& find_mbarrier_for_async(Block& block, uint32_t offset) {
    Mbarrier& barrier = find_mbarrier(block, offset);
    if (!barrier.is_fenced) {
        fail(ErrorKind::kProxy,
             text("uses the mbarrier %s, but %s has not called fence_mbarrier_init_release_cluster after its "
                  "mbar_init",
                  name_of(block, barrier).c_str(), describe(*barrier.maker).c_str()));
    }
    return barrier;
}

void complete_bytes(Block& block, Mbarrier& barrier, uint32_t bytes) {
    barrier.bytes -= bytes;
    if (barrier.bytes < -kMaxBytes) {
        fail(ErrorKind::kBarrier,
             text("more than 1 MiB is complete on %s that nobody expects", name_of(block, barrier).c_str()));
    }
    try_complete(block, barrier);
}

void mbarrier_init(uint32_t address, uint32_t arrivals) {
    const SharedPlace place = locate(address, 8, 8);
    Block& block = *place.block;
    if (arrivals == 0 || arrivals > kMaxArrivals) {
        fail(ErrorKind::kBarrier, text("sets %u arrivals at %s: 1 to 2^20 - 1", arrivals,
                                       describe_shared(block, place.offset).c_str()));
    }
    int16_t& index = block.mbarrier_of[place.offset / 8];
    if (index >= 0) {
        fail(ErrorKind::kBarrier, text("makes an mbarrier of %s, which is one: mbar_invalidate comes first",
                                       describe_shared(block, place.offset).c_str()));
    }
    Thread& me = *machine->current;
    block.shadow.access(me, place.offset, 8, kWrite);
    index = static_cast<int16_t>(block.mbarriers.size());
    Mbarrier& barrier = block.mbarriers.emplace_back();
    barrier.address = place.offset;
    barrier.count = barrier.pending = arrivals;
    barrier.maker = &me;
    barrier.made = stamp_of(me, Space::kShared);
    note_progress();
}

void mbarrier_invalidate(uint32_t address) {
    const SharedPlace place = locate(address, 8, 8);
    Mbarrier& barrier = find_mbarrier(*place.block, place.offset);
    if (!barrier.waiters.empty() || barrier.loads != 0) {
        fail(ErrorKind::kBarrier,
             text("ends the mbarrier %s while %s", name_of(*place.block, barrier).c_str(),
                  barrier.loads != 0 ? "copies are to complete on it" : "threads wait at it"));
    }
    place.block->mbarrier_of[place.offset / 8] = -1;
    place.block->shadow.access(*machine->current, place.offset, 8, kWrite);
}

void fence_mbarrier_init() {
    Thread& me = *machine->current;
    for (Mbarrier& barrier : me.block().mbarriers) barrier.is_fenced |= barrier.maker == &me;
}

void mbarrier_arrive(uint32_t address, uint32_t arrivals, uint32_t bytes, ArriveOrder order) {
    const SharedPlace place = locate(address, 8, 8);
    Thread& me = *machine->current;
    const bool is_remote = place.block != &me.block();
    Mbarrier& barrier = is_remote ? find_mbarrier_for_async(*place.block, place.offset)
                                  : find_mbarrier(*place.block, place.offset);
    if (order == ArriveOrder::kCluster || (order == ArriveOrder::kBlock && !is_remote)) {
        release(me, barrier.next[is_remote ? 1 : 0]);
    } else if (order == ArriveOrder::kBlock) {
        release_reads(me, barrier.next[0]);
    }
    barrier.bytes += bytes;
    if (barrier.pending < arrivals) {
        fail(ErrorKind::kBarrier,
             text("arrives once too often at %s: all %u arrivals of phase %u are there, and "
                  "%lld bytes are missing",
                  name_of(*place.block, barrier).c_str(), barrier.count, barrier.phase,
                  static_cast<long long>(barrier.bytes)));
    }
    if (barrier.bytes > kMaxBytes) {
        fail(ErrorKind::kBarrier,
             text("expects %lld bytes in one phase of %s: at most 2^20 - 1",
                  static_cast<long long>(barrier.bytes), name_of(*place.block, barrier).c_str()));
    }
    barrier.pending -= arrivals;
    try_complete(*place.block, barrier);
}

bool mbarrier_test(uint32_t address, uint32_t parity, Scope scope) {
    const SharedPlace place = locate(address, 8, 8);
    Thread& me = *machine->current;
    if (place.block != &me.block()) fail(ErrorKind::kBarrier, "waits at another block's mbarrier");
    if (parity > 1) fail(ErrorKind::kBarrier, text("waits for parity %u: 0 or 1", parity));
    Mbarrier& barrier = find_mbarrier(*place.block, place.offset);
    if ((barrier.phase & 1) == parity) {
        if (me.is_polling) me.watched_barriers.push_back(&barrier);
        return false;
    }
    acquire(me, barrier.done[0]);
    if (scope == Scope::kCluster) {
        acquire(me, barrier.done[1]);
    } else {
        me.view.reads.join(barrier.done[1].known);  // not what other blocks wrote
    }
    return true;
}

bool mbarrier_test_for_warp(uint32_t address, uint32_t parity) {
    if (!mbarrier_test(address, parity, Scope::kBlock)) return false;
    const SharedPlace place = locate(address, 8, 8);
    const Mbarrier& barrier = find_mbarrier(*place.block, place.offset);
    acquire(*machine->current->warp, barrier.done[0]);
    return true;
}

Wake mbarrier_sleep(uint32_t address, uint32_t parity, uint64_t deadline_ns) {
    const SharedPlace place = locate(address, 8, 8);
    Mbarrier& barrier = find_mbarrier(*place.block, place.offset);
    barrier.waiters.push_back(machine->current);
    Wait wait{WaitKind::kMbarrier, place.offset, parity};
    wait.deadline_ns = deadline_ns;
    const Wake wake = block_bounded(wait);
    if (wake != Wake::kProgress) std::erase(barrier.waiters, machine->current);
    return wake;
}

}  // namespace mok::emu
