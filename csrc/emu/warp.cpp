#include "csrc/emu/warp.h"

#include <bit>

#include "csrc/emu/report.h"
#include "csrc/emu/schedule.h"

namespace mok::emu {

namespace {

/// The current lane's operands join those of the lanes before it.
void put(Deposit& deposit, const char* instruction, const void* operands, size_t bytes, bool uniform,
         Site site) {
    Thread& me = *machine->current;
    me.instruction = instruction;
    me.site = site;
    std::byte* slot = deposit.operands + me.lane * detail::kOperandBytes;
    if (deposit.lanes == 0) {
        deposit.instruction = instruction;
    } else {
        const uint32_t first = static_cast<uint32_t>(std::countr_zero(deposit.lanes));
        if (deposit.instruction != instruction && std::strcmp(deposit.instruction, instruction) != 0) {
            fail(ErrorKind::kDiverged,
                 text("while lane %u of the warp is at %s: all lanes of a warp must come to "
                      "the same warp-wide instructions in the same order",
                      first, deposit.instruction));
        }
        if (uniform && std::memcmp(deposit.operands + first * detail::kOperandBytes, operands, bytes) != 0) {
            fail(ErrorKind::kDiverged,
                 text("has other operands than lane %u: they must be equal in all lanes", first));
        }
    }
    if (bytes != 0) std::memcpy(slot, operands, bytes);
    deposit.lanes |= 1u << me.lane;
}

}  // namespace

void detail::deposit(const char* instruction, const void* operands, size_t bytes, bool uniform,
                     Execute execute, Site site) {
    Thread& me = *machine->current;
    Warp& warp = *me.warp;
    const uint64_t place = me.deposits - warp.num_executed;
    if (place == warp.deposits.size()) {
        Deposit& fresh = warp.deposits.emplace_back();
        fresh.lanes = 0;
        fresh.execute = execute;
        fresh.accumulators = nullptr;
    }
    Deposit& slot = warp.deposits[place];
    put(slot, instruction, operands, bytes, uniform, site);
    ++me.deposits;
    if (slot.lanes != warp.present) return;
    if (warp.present != ~0u) {
        fail(ErrorKind::kDiverged, "needs all 32 lanes, but some have left the kernel");
    }
    if (keeps_log()) log_instruction();
    execute(slot.operands, kOperandBytes, slot.lanes);
    warp.deposits.pop_front();
    ++warp.num_executed;
    for (uint32_t lanes = warp.waiting_lanes; lanes != 0; lanes &= lanes - 1) {
        const uint32_t lane = static_cast<uint32_t>(std::countr_zero(lanes));
        if (warp.lanes[lane].deposits > warp.num_executed) continue;
        warp.waiting_lanes &= ~(1u << lane);
        make_ready(warp.lanes[lane]);
    }
}

bool meet(const char* instruction, const void* operands, size_t bytes, bool uniform, Site site,
          const Wait& wait) {
    enter(instruction, site);
    Warp& warp = *machine->current->warp;
    put(warp.exchange, instruction, operands, bytes, uniform, site);
    if (warp.exchange.lanes == warp.present) return true;
    block_current(wait);
    if (!warp.has_lost_last) return false;
    warp.has_lost_last = false;  // the lane that all waited for has left the kernel
    return true;
}

uint32_t depart(Warp& warp, bool wakes) {
    const uint32_t lanes = warp.exchange.lanes;
    warp.exchange.lanes = 0;
    note_progress();
    if (wakes) make_ready(warp, lanes & ~(1u << machine->current->lane));
    return lanes;
}

uint64_t detail::exchange(const char* instruction, const void* operands, size_t bytes,
                          ExecuteWithResults execute, Site site) {
    Thread& me = *machine->current;
    Warp& warp = *me.warp;
    if (meet(instruction, operands, bytes, false, site)) {
        uint64_t results[kLanes] = {};
        execute(warp.exchange.operands, kOperandBytes, warp.exchange.lanes, results);
        for (uint32_t lane = 0; lane < kLanes; ++lane) warp.lanes[lane].result = results[lane];
        depart(warp, true);
    }
    return me.result;
}

void sync_warp(Site site) {
    Warp& warp = *machine->current->warp;
    if (!meet("sync_warp", nullptr, 0, false, site)) return;
    View view;
    release(warp, view);
    acquire(warp, view);
    depart(warp, true);
}

void meet_later(const char* instruction, Site site) {
    detail::deposit(
        instruction, nullptr, 0, false, [](const std::byte*, size_t, uint32_t) {}, site);
}

bool lead_warp(const char* instruction, const MbarrierPair& operands, Site site) {
    return meet(instruction, &operands, sizeof(operands), true, site);
}

void dismiss_warp(uint64_t result) {
    Warp& warp = *machine->current->warp;
    for (uint32_t lane = 0; lane < kLanes; ++lane) warp.lanes[lane].result = result;
    depart(warp, true);
}

uint64_t warp_result() {
    return machine->current->result;
}

bool elect_one(Site site) {
    Thread& me = *machine->current;
    Warp& warp = *me.warp;
    // The lanes come one after another: what they are told follows from the instruction's number.
    const uint64_t turn = me.deposits;
    meet_later("elect_one", site);
    uint64_t mixed = (machine->options.seed * 0x9e3779b97f4a7c15u) ^ (turn * 0xbf58476d1ce4e5b9u) ^ warp.idx;
    mixed = (mixed ^ mixed >> 29) * 0x94d049bb133111ebu;
    return (mixed >> 40) % kLanes == me.lane;
}

}  // namespace mok::emu
