// Barriers of blocks and clusters, and the registers that warpgroups pass on.

#include <algorithm>
#include <bit>

#include "csrc/emu/launch_state.h"
#include "csrc/emu/report.h"
#include "csrc/emu/schedule.h"
#include "csrc/emu/warp.h"

namespace mok::emu {

namespace {

constexpr uint32_t kWarpgroupWarps = 4;
constexpr uint32_t kRegisterFile = 65536;

void open(NamedBarrier& barrier, bool any) {
    for (Warp* warp : barrier.waiters) {
        acquire(*warp, barrier.view);
        for (uint32_t lane = 0; lane < kLanes; ++lane) warp->lanes[lane].result = any ? 1 : 0;
        make_ready(*warp, ~0u);
    }
    barrier = {};
    note_progress();
}

uint32_t threads_left(const Block& block) {
    return block.num_threads - block.num_exited;
}

/// A whole warp has come to barrier `id`; returns true if it was the last.
bool arrive(Warp& warp, uint32_t id, uint32_t expected, uint32_t lanes, bool condition) {
    NamedBarrier& barrier = warp.block->named[id];
    if (barrier.expected != 0 && barrier.expected != expected && id != 0) {
        fail(ErrorKind::kBarrier, text("expects %u threads at named barrier %u, where others expect %u",
                                       expected, id, barrier.expected));
    }
    barrier.expected = expected;
    barrier.arrived += id == 0 ? static_cast<uint32_t>(std::popcount(lanes)) : kLanes;
    barrier.any |= condition;
    release(warp, barrier.view);
    note_progress();
    if (barrier.arrived > expected) {
        fail(ErrorKind::kBarrier, text("is one too many: %u threads at named barrier %u, which expects %u",
                                       barrier.arrived, id, expected));
    }
    return barrier.arrived == expected;
}

struct NamedOperands {
    uint32_t id, threads;
};

void arrive_named(const NamedOperands& operands) {
    Warp& warp = *machine->current->warp;
    if (arrive(warp, operands.id, operands.threads, ~0u, false)) open(warp.block->named[operands.id], false);
}

void check_named(uint32_t id, uint32_t threads) {
    if (id == 0 || id >= 16 || threads == 0 || threads % kLanes != 0 ||
        threads > machine->current->block().num_threads) {
        fail(
            ErrorKind::kBarrier,
            text("names barrier %u with %u threads: ids are 1 to 15, threads a multiple of 32 of the block's "
                 "%u",
                 id, threads, machine->current->block().num_threads));
    }
}

}  // namespace

bool sync_block(const char* instruction, bool condition, Site site) {
    Thread& me = *machine->current;
    Warp& warp = *me.warp;
    const uint32_t operand = condition ? 1 : 0;
    if (!meet(instruction, &operand, sizeof(operand), false, site, {WaitKind::kNamed, 0})) {
        return me.result != 0;
    }
    bool any = false;
    for (uint32_t lanes = warp.exchange.lanes; lanes != 0; lanes &= lanes - 1) {
        uint32_t value;
        std::memcpy(&value, warp.exchange.operands + std::countr_zero(lanes) * detail::kOperandBytes,
                    sizeof(value));
        any |= value != 0;
    }
    const uint32_t lanes = depart(warp, false);
    NamedBarrier& barrier = warp.block->named[0];
    barrier.waiters.push_back(&warp);
    if (arrive(warp, 0, threads_left(*warp.block), lanes, any)) {
        open(barrier, barrier.any);
        warp.ready &= ~(1u << me.lane);
    } else {
        block_current({WaitKind::kNamed, 0});
    }
    return me.result != 0;
}

void named_barrier(const char* instruction, uint32_t id, uint32_t threads, bool waits, Site site) {
    Thread& me = *machine->current;
    Warp& warp = *me.warp;
    check_named(id, threads);
    const NamedOperands operands{id, threads};
    if (!waits) {
        deposit_uniform<NamedOperands, arrive_named>(instruction, operands, site);
        return;
    }
    if (!meet(instruction, &operands, sizeof(operands), true, site, {WaitKind::kNamed, id})) return;
    const uint32_t lanes = depart(warp, false);
    NamedBarrier& barrier = warp.block->named[id];
    barrier.waiters.push_back(&warp);
    if (arrive(warp, id, threads, lanes, false)) {
        open(barrier, false);
        warp.ready &= ~(1u << me.lane);
    } else {
        block_current({WaitKind::kNamed, id});
    }
}

// Clusters.

namespace {

uint32_t threads_left(const Cluster& cluster) {
    uint32_t threads = 0;
    for (const Block* block : cluster.blocks) threads += threads_left(*block);
    return threads;
}

void try_open(Cluster& cluster) {
    ClusterBarrier& barrier = cluster.barrier;
    if (barrier.arrived == 0 || barrier.arrived < threads_left(cluster)) return;
    barrier.arrived = 0;
    ++barrier.phase;
    barrier.done = std::move(barrier.next);
    barrier.next = {};
    for (Block* block : cluster.blocks) {
        for (Mbarrier& mbarrier : block->mbarriers) mbarrier.is_visible |= mbarrier.is_fenced;
    }
    for (Warp* warp : barrier.waiters) {
        acquire(*warp, barrier.done);
        warp->cluster_phase = Warp::kNoPhase;
        make_ready(*warp, ~0u);
    }
    barrier.waiters.clear();
    note_progress();
}

struct ArriveOperands {
    uint32_t releases;
};

void arrive_at_cluster(const ArriveOperands& operands) {
    Warp& warp = *machine->current->warp;
    ClusterBarrier& barrier = warp.block->cluster->barrier;
    if (warp.cluster_phase == barrier.phase) {
        fail(ErrorKind::kBarrier, "arrives twice at the cluster's barrier without a wait between");
    }
    warp.cluster_phase = barrier.phase;
    if (operands.releases != 0) release(warp, barrier.next);
    barrier.arrived += kLanes;
    note_progress();
    try_open(*warp.block->cluster);
}

}  // namespace

void cluster_arrive(bool releases, Site site) {
    deposit_uniform<ArriveOperands, arrive_at_cluster>("cluster_arrive", {releases ? 1u : 0u}, site);
}

void cluster_wait(Site site) {
    Thread& me = *machine->current;
    Warp& warp = *me.warp;
    if (!meet("cluster_wait", nullptr, 0, false, site, {WaitKind::kCluster})) return;
    ClusterBarrier& barrier = warp.block->cluster->barrier;
    if (warp.cluster_phase == Warp::kNoPhase) {
        fail(ErrorKind::kBarrier, "waits at the cluster's barrier without having arrived");
    }
    const bool is_open = warp.cluster_phase < barrier.phase;
    depart(warp, is_open);
    if (is_open) {
        acquire(warp, barrier.done);
        warp.cluster_phase = Warp::kNoPhase;
        return;
    }
    barrier.waiters.push_back(&warp);
    block_current({WaitKind::kCluster});
}

// Exits.

void forget_exited(Thread& thread) {
    Warp& warp = *thread.warp;
    if (!warp.deposits.empty()) {
        fail(ErrorKind::kDiverged, text("while other lanes of the warp are at %s, which needs all lanes",
                                        warp.deposits.front().instruction));
    }
    if (warp.exchange.lanes != 0 && warp.exchange.lanes == warp.present) {
        warp.has_lost_last = true;
        make_ready(warp, 1u << std::countr_zero(warp.exchange.lanes));
    }
    Block& block = *warp.block;
    NamedBarrier& barrier = block.named[0];
    if (barrier.arrived != 0 && barrier.arrived == threads_left(block)) open(barrier, barrier.any);
    try_open(*block.cluster);
}

void check_barriers_at_exit(Block& block) {
    for (uint32_t id = 1; id < block.named.size(); ++id) {
        const NamedBarrier& barrier = block.named[id];
        if (barrier.arrived == 0) continue;
        fail(ErrorKind::kBarrier,
             text("leaves named barrier %u with %u of %u arrivals", id, barrier.arrived, barrier.expected));
    }
}

// Registers.

void set_registers(uint32_t registers, bool increases, Site site) {
    Thread& me = *machine->current;
    Warp& warp = *me.warp;
    Block& block = *warp.block;
    const char* instruction = increases ? "registers_increase" : "registers_decrease";
    if (!meet(instruction, &registers, sizeof(registers), true, site, {WaitKind::kRegisters, registers}))
        return;
    depart(warp, false);
    if (increases ? registers < warp.registers : registers > warp.registers) {
        fail(ErrorKind::kUsage,
             text("asks for %u registers of a warp that has %u: %s", registers, warp.registers,
                  increases ? "an increase cannot lower" : "a decrease cannot raise"));
    }
    if (block.num_warps % kWarpgroupWarps != 0) {
        fail(ErrorKind::kUsage, "needs whole warpgroups, but the block's last one is not");
    }
    if (!increases) {
        block.free_registers += (warp.registers - registers) * kLanes;
        for (Warp* waiter : block.register_waiters) make_ready(*waiter, 1u << waiter->register_lane);
        block.register_waiters.clear();
    } else {
        warp.register_lane = me.lane;
        while (block.free_registers < (registers - warp.registers) * kLanes) {
            block.register_waiters.push_back(&warp);
            block_current({WaitKind::kRegisters, registers});
        }
        block.free_registers -= (registers - warp.registers) * kLanes;
    }
    warp.registers = registers;
    note_progress();
    make_ready(warp, ~(1u << me.lane));
}

uint32_t registers_at_launch(const Launch& launch) {
    if (launch.registers != 0) return launch.registers;
    return std::min(255u, kRegisterFile / launch.threads) / 8 * 8;
}

}  // namespace mok::emu
