#include <algorithm>
#include <bit>

#include "csrc/emu/copies.h"
#include "csrc/emu/report.h"
#include "csrc/emu/schedule.h"
#include "csrc/emu/warp.h"

namespace mok::emu {

namespace {

constexpr uint32_t kWarpgroupWarps = 4;

WgmmaQueue& queue_of(Warp& warp) {
    if (warp.wgmma == nullptr) warp.wgmma = std::make_unique<WgmmaQueue>();
    return *warp.wgmma;
}

/// Where register i of a lane lies in the warp's rows (csrc/ptx/device/wgmma.cuh has the layout).
uint32_t place_of(uint32_t lane, uint32_t i, uint32_t columns) {
    const uint32_t row = lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    return row * columns + column;
}

bool is_poison(const float* registers, uint32_t count) {
    uint32_t bits = ~0u;
    for (uint32_t i = 0; i < count; ++i) bits &= std::bit_cast<uint32_t>(registers[i]);
    return bits == ~0u;
}

bool is_in_flight(const WgmmaQueue& queue, const Accumulators& accumulators) {
    return std::any_of(queue.ops.begin(), queue.ops.end(),
                       [&](const QueuedWgmma& op) { return op.accumulators == &accumulators; });
}

Accumulators& free_accumulators(WgmmaQueue& queue) {
    for (const auto& candidate : queue.accumulators) {
        if (candidate->num_live == 0 && !is_in_flight(queue, *candidate)) return *candidate;
    }
    return *queue.accumulators.emplace_back(std::make_unique<Accumulators>());
}

/// The registers become those of the operation; NaN until a wait gives them back.
Accumulators& hand_over(Warp& warp, uint32_t lane, float* registers, uint32_t columns) {
    WgmmaQueue& queue = queue_of(warp);
    const Thread& me = warp.lanes[lane];
    const uint64_t place = me.deposits - warp.num_executed;
    Accumulators* shared = place < warp.deposits.size() ? warp.deposits[place].accumulators : nullptr;
    for (const auto& candidate : queue.accumulators) {
        if (candidate->registers[lane] != registers) continue;
        if (candidate->columns != columns || !is_poison(registers, columns / 2)) {
            fail(ErrorKind::kUsage,
                 "has accumulators that were written while an earlier wgmma may still add to "
                 "them: wgmma_wait comes first");
        }
        if (shared != nullptr && shared != candidate.get()) {
            fail(ErrorKind::kDiverged, "has other accumulators than the lanes before");
        }
        return *candidate;
    }
    Accumulators& taken = shared != nullptr ? *shared : free_accumulators(queue);
    if (taken.registers[lane] != nullptr) {
        fail(ErrorKind::kDiverged, "has other accumulators than the lanes before");
    }
    taken.columns = columns;
    taken.registers[lane] = registers;
    ++taken.num_live;
    for (uint32_t i = 0; i < columns / 2; ++i) taken.d[place_of(lane, i, columns)] = registers[i];
    std::memset(registers, kPoison, columns / 2 * sizeof(float));
    return taken;
}

void give_back(Accumulators& accumulators) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
        float* registers = accumulators.registers[lane];
        if (registers == nullptr) continue;
        if (!is_poison(registers, accumulators.columns / 2)) {
            fail(ErrorKind::kUsage,
                 text("ends a wgmma whose accumulators lane %u has written meanwhile", lane));
        }
        for (uint32_t i = 0; i < accumulators.columns / 2; ++i) {
            registers[i] = accumulators.d[place_of(lane, i, accumulators.columns)];
        }
        accumulators.registers[lane] = nullptr;
    }
    accumulators.num_live = 0;
    accumulators.is_in_use = false;
}

/// The four warps of a warpgroup execute the same operation on the same operands.
void compare_in_warpgroup(const Warp& warp, uint64_t number, const Wgmma& op) {
    WarpgroupOrder& order = warp.block->warpgroups[warp.idx / kWarpgroupWarps];
    const uint64_t place = number - order.first;
    if (place == order.entries.size()) order.entries.push_back({op, 0});
    WarpgroupOrder::Entry& entry = order.entries[place];
    if (std::memcmp(&entry.op, &op, sizeof(op)) != 0) {
        fail(ErrorKind::kDiverged,
             text("has other operands than the same wgmma of another warp of its warpgroup: "
                  "descriptors %#llx, %#llx and %#llx, %#llx",
                  static_cast<unsigned long long>(op.a), static_cast<unsigned long long>(op.b),
                  static_cast<unsigned long long>(entry.op.a), static_cast<unsigned long long>(entry.op.b)));
    }
    if (++entry.warps < kWarpgroupWarps) return;
    order.entries.pop_front();
    ++order.first;
}

/// All lanes have come: the operation may read its operands from now on.
void enqueue(const Wgmma& op) {
    Warp& warp = *machine->current->warp;
    Block& block = *warp.block;
    WgmmaQueue& queue = *warp.wgmma;
    Accumulators& accumulators = *warp.deposits.front().accumulators;
    if (!accumulators.is_in_use && !queue.is_fenced) {
        fail(ErrorKind::kUsage,
             "takes accumulators that ordinary code has written since the last wgmma_fence");
    }
    accumulators.is_in_use = true;
    compare_in_warpgroup(warp, queue.num_issued++, op);
    if (queue.component < 0) queue.component = static_cast<int>(new_component());
    if (queue.record == nullptr) queue.record = &new_record(warp.lanes[0], queue.component);
    SharedRange ranges[2];
    op.ranges(op, warp.idx % kWarpgroupWarps, ranges);
    for (const SharedRange& range : ranges) {
        if (range.begin == range.end) continue;
        if (range.begin < kDynamicShared || range.end > block.shared_end()) {
            fail(ErrorKind::kBounds,
                 text("reads shared bytes [%d, %d), but the block has [0, %u)",
                      static_cast<int>(range.begin - kDynamicShared),
                      static_cast<int>(range.end - kDynamicShared), block.shared_end() - kDynamicShared));
        }
        block.shadow.access_wgmma(warp, range.begin, range.end, *queue.record);
    }
    queue.ops.push_back({op, queue.group, &accumulators, false});
    if (queue.is_listed) return;
    queue.is_listed = true;
    machine->multiplying.push_back(&warp);
}

struct NoOperands {
    uint32_t unused = 0;
};

void note_fence(const NoOperands&) {
    queue_of(*machine->current->warp).is_fenced = true;
}

void close_group(const NoOperands&) {
    WgmmaQueue& queue = queue_of(*machine->current->warp);
    if (queue.record != nullptr) queue.records.emplace_back(queue.group, queue.record);
    queue.record = nullptr;
    ++queue.group;
}

void finish(Warp& warp, uint64_t groups) {
    WgmmaQueue& queue = queue_of(warp);
    const uint64_t covered = queue.group - std::min(queue.group, groups);
    while (!queue.ops.empty() && queue.ops.front().group < covered) {
        if (!queue.ops.front().is_done) {
            step_wgmma(warp);
            continue;
        }
        queue.ops.pop_front();
    }
    ++queue.epoch;
    while (!queue.records.empty() && queue.records.front().first < covered) {
        AsyncRecord& record = *queue.records.front().second;
        record.epoch = queue.epoch;
        record.is_done = true;
        queue.records.pop_front();
    }
    if (queue.component >= 0) {
        View view;
        view.known.set(static_cast<uint32_t>(queue.component), queue.epoch);
        acquire(warp, view);
    }
    for (const auto& accumulators : queue.accumulators) {
        if (accumulators->num_live == 0 || is_in_flight(queue, *accumulators)) continue;
        give_back(*accumulators);
        queue.is_fenced = false;
    }
}

}  // namespace

void step_wgmma(Warp& warp) {
    WgmmaQueue& queue = *warp.wgmma;
    const auto op = std::find_if(queue.ops.begin(), queue.ops.end(),
                                 [](const QueuedWgmma& candidate) { return !candidate.is_done; });
    op->op.compute(op->op, warp.idx % kWarpgroupWarps, warp.block->shared, op->accumulators->d);
    op->is_done = true;
    ++machine->result.stats.wgmmas;
    note_progress();
    if (&*op != &queue.ops.back()) return;
    queue.is_listed = false;
    std::erase(machine->multiplying, &warp);
}

void wgmma_issue(const Wgmma& op, float* accumulators, Site site) {
    Thread& me = *machine->current;
    Warp& warp = *me.warp;
    me.instruction = "wgmma";
    me.site = site;
    if (warp.block->num_warps % kWarpgroupWarps != 0 &&
        warp.idx / kWarpgroupWarps == warp.block->num_warps / kWarpgroupWarps) {
        fail(ErrorKind::kUsage, "is in a warpgroup of fewer than four warps");
    }
    Accumulators& taken = hand_over(warp, me.lane, accumulators, op.columns);
    const uint64_t place = me.deposits - warp.num_executed;
    const bool is_first = place == warp.deposits.size();
    if (is_first) {
        Deposit& fresh = warp.deposits.emplace_back();
        fresh.lanes = 0;
        fresh.execute = [](const std::byte* first, size_t, uint32_t) {
            enqueue(*reinterpret_cast<const Wgmma*>(first));
        };
        fresh.accumulators = &taken;
    }
    deposit_uniform<Wgmma, enqueue>("wgmma", op, site);
}

void wgmma_fence(Site site) {
    deposit_uniform<NoOperands, note_fence>("wgmma_fence", {}, site);
}

void wgmma_commit(Site site) {
    deposit_uniform<NoOperands, close_group>("wgmma_commit", {}, site);
}

void wgmma_wait(int groups, Site site) {
    const uint64_t operand = static_cast<uint64_t>(groups);
    if (!meet("wgmma_wait", &operand, sizeof(operand), true, site)) return;
    Warp& warp = *machine->current->warp;
    finish(warp, operand);
    depart(warp, true);
}

void check_wgmmas_at_exit(Block& block) {
    for (size_t i = 0; i < block.warpgroups.size(); ++i) {
        if (block.warpgroups[i].entries.empty()) continue;
        fail(ErrorKind::kDiverged,
             text("ends the block, but only %u of the four warps of warpgroup %zu have come to "
                  "one of its wgmmas",
                  block.warpgroups[i].entries.front().warps, i));
    }
    for (uint32_t i = 0; i < block.num_warps; ++i) {
        const WgmmaQueue* queue = block.warps[i].wgmma.get();
        if (queue == nullptr || (queue->records.empty() && queue->record == nullptr)) continue;
        fail(ErrorKind::kExited, text("ends the block, but warp %u has not waited for its wgmmas", i));
    }
}

}  // namespace mok::emu
