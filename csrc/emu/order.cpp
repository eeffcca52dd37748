// What synchronisation does to views, and what views know.

#include <algorithm>

#include "csrc/emu/shadow.h"
#include "csrc/emu/state.h"

namespace mok::emu {

namespace {

/// The fence counts that were published with the newest epoch up to `epoch`; nullptr before the first.
template <typename Mark>
const Mark* mark_at(const std::vector<Mark>& marks, uint32_t epoch) {
    for (size_t i = marks.size(); i-- > 0;) {
        if (marks[i].epoch <= epoch) return &marks[i];
    }
    return nullptr;
}

void mark_fences(Thread& thread) {
    const FenceMark* last = thread.fence_marks.empty() ? nullptr : &thread.fence_marks.back();
    const uint32_t before[2] = {last != nullptr ? last->fences[0] : 0, last != nullptr ? last->fences[1] : 0};
    if (thread.fences[0] == before[0] && thread.fences[1] == before[1]) return;
    thread.fence_marks.push_back({thread.epoch, {thread.fences[0], thread.fences[1]}});
}

void mark_fences(Warp& warp) {
    WarpFenceMark mark{warp.epoch, {}};
    bool any = false;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
        for (int space = 0; space < 2; ++space) {
            mark.fences[space][lane] = warp.lanes[lane].fences[space];
            any |= mark.fences[space][lane] != 0;
        }
    }
    if (!any || (!warp.fence_marks.empty() && warp.fence_marks.back().fences == mark.fences)) return;
    warp.fence_marks.push_back(mark);
}

uint32_t component_of(Warp& warp) {
    if (warp.component < 0) warp.component = static_cast<int>(new_component());
    return static_cast<uint32_t>(warp.component);
}

bool knows(const Clock& clock, int component, uint32_t epoch) {
    return component >= 0 && clock[static_cast<uint32_t>(component)] >= epoch;
}

/// `lanes` of the stamp, each by itself.
bool knows_lanes(const Clock& clock, const ThreadStamp& stamp, uint32_t lanes) {
    for (; lanes != 0; lanes &= lanes - 1) {
        if (!knows(clock, stamp.warp->lanes[__builtin_ctz(lanes)].component, stamp.thread_epoch))
            return false;
    }
    return true;
}

bool knows(const Clock& clock, const ThreadStamp& stamp, uint32_t lanes) {
    if (clock.is_empty()) return false;
    return knows(clock, stamp.warp->component, stamp.warp_epoch) || knows_lanes(clock, stamp, lanes);
}

/// Whether `lane`, whose access has the stamp, executed a proxy fence between it and the newest of its
/// releases that `clock` knows.
bool has_fenced(const Clock& clock, const ThreadStamp& stamp, uint32_t lane, Space space) {
    if (clock.is_empty()) return false;
    const size_t index = static_cast<size_t>(space);
    const Warp& warp = *stamp.warp;
    if (knows(clock, warp.component, stamp.warp_epoch)) {
        const auto* mark = mark_at(warp.fence_marks, clock[static_cast<uint32_t>(warp.component)]);
        if (mark != nullptr && mark->fences[index][lane] > stamp.fences) return true;
    }
    const Thread& thread = warp.lanes[lane];
    if (knows(clock, thread.component, stamp.thread_epoch)) {
        const auto* mark = mark_at(thread.fence_marks, clock[static_cast<uint32_t>(thread.component)]);
        if (mark != nullptr && mark->fences[index] > stamp.fences) return true;
    }
    return false;
}

uint32_t lanes_besides(const ThreadStamp& stamp, const Thread& thread) {
    return stamp.warp == thread.warp ? stamp.lanes & ~(1u << thread.lane) : stamp.lanes;
}

}  // namespace

uint32_t new_component() {
    return machine->num_components++;
}

uint32_t component_of(Thread& thread) {
    if (thread.component < 0) thread.component = static_cast<int>(new_component());
    return static_cast<uint32_t>(thread.component);
}

ThreadStamp stamp_of(Thread& thread, Space space) {
    return {thread.warp, 1u << thread.lane, thread.warp->epoch, thread.component < 0 ? 1 : thread.epoch,
            thread.fences[static_cast<size_t>(space)]};
}

AsyncRecord& new_record(Thread& issuer, int component) {
    AsyncRecord& record = machine->records.emplace_back();
    record.component = component;
    record.issuer = &issuer;
    record.instruction = issuer.instruction;
    record.site = issuer.site;
    return record;
}

void release(Thread& thread, View& to) {
    const uint32_t component = component_of(thread);
    to.join(thread.view);
    mark_fences(thread);
    to.known.set(component, thread.epoch);
    ++thread.epoch;
}

void release_reads(Thread& thread, View& to) {
    const uint32_t component = component_of(thread);
    to.reads.join(thread.view.known);
    to.reads.join(thread.view.reads);
    mark_fences(thread);
    to.reads.set(component, thread.epoch);
    ++thread.epoch;
}

void acquire(Thread& thread, const View& from) {
    thread.view.join(from);
}

void release(Warp& warp, View& to) {
    const View* last = nullptr;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
        Thread& thread = warp.lanes[lane];
        if (last == nullptr || !thread.view.is_same(*last)) to.join(thread.view);
        last = &thread.view;
    }
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
        Thread& thread = warp.lanes[lane];
        if (thread.component < 0) continue;
        mark_fences(thread);
        to.known.set(static_cast<uint32_t>(thread.component), thread.epoch);
        ++thread.epoch;
    }
    const uint32_t component = component_of(warp);
    mark_fences(warp);
    to.known.set(component, warp.epoch);
    ++warp.epoch;
}

void acquire(Warp& warp, const View& from) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) warp.lanes[lane].view.join(from);
}

bool is_known(const ThreadStamp& stamp, const Thread& thread, bool reads_suffice) {
    const uint32_t lanes = lanes_besides(stamp, thread);
    return lanes == 0 || knows(thread.view.known, stamp, lanes) ||
           (reads_suffice && knows(thread.view.reads, stamp, lanes));
}

bool is_known(const ThreadStamp& stamp, const View& view, bool reads_suffice) {
    return knows(view.known, stamp, stamp.lanes) || (reads_suffice && knows(view.reads, stamp, stamp.lanes));
}

bool is_known(const AsyncRecord& record, const View& view, bool reads_suffice) {
    return record.epoch != AsyncRecord::kOpen &&
           (knows(view.known, record.component, record.epoch) ||
            (reads_suffice && knows(view.reads, record.component, record.epoch)));
}

bool is_known(const AsyncRecord& record, const Thread& thread, bool reads_suffice) {
    if (record.epoch == AsyncRecord::kOpen) return false;
    return record.component == thread.component || is_known(record, thread.view, reads_suffice);
}

bool is_fenced(const ThreadStamp& stamp, const Thread& thread, Space space) {
    const uint32_t others = lanes_besides(stamp, thread);
    if (others != stamp.lanes && thread.fences[static_cast<size_t>(space)] <= stamp.fences) return false;
    if (others == 0 || knows(thread.view.fenced[static_cast<size_t>(space)], stamp, others)) return true;
    for (uint32_t lanes = others; lanes != 0; lanes &= lanes - 1) {
        const uint32_t lane = static_cast<uint32_t>(__builtin_ctz(lanes));
        if (!has_fenced(thread.view.known, stamp, lane, space) &&
            !has_fenced(thread.view.reads, stamp, lane, space)) {
            return false;
        }
    }
    return true;
}

bool is_fenced(const AsyncRecord& record, const Thread& thread, Space space) {
    return knows(thread.view.fenced[static_cast<size_t>(space)], record.component, record.epoch);
}

void fence_proxy(bool shared, bool global) {
    Thread& thread = *machine->current;
    Clock fenced = thread.view.known;
    if (thread.component >= 0) {
        mark_fences(thread);
        fenced.set(static_cast<uint32_t>(thread.component), thread.epoch);
        ++thread.epoch;
    }
    for (size_t space = 0; space < 2; ++space) {
        if (!(space == static_cast<size_t>(Space::kShared) ? shared : global)) continue;
        ++thread.fences[space];
        thread.view.fenced[space].join(fenced);
    }
}

}  // namespace mok::emu
