// Flags in global memory: what their accesses hand on from writer to reader, fences, and waits for them.

#include <algorithm>

#include "csrc/emu/memory.h"
#include "csrc/emu/report.h"
#include "csrc/emu/schedule.h"

namespace mok::emu {

namespace {

bool includes(Scope scope, const Block& from, const Block& to) {
    switch (scope) {
        case Scope::kNone:
            return false;
        case Scope::kBlock:
            return &from == &to;
        case Scope::kCluster:
            return from.cluster == to.cluster;
        case Scope::kGpu:
            return from.launch->launch->rank == to.launch->launch->rank;
        case Scope::kSys:
            return true;
    }
    return false;
}

/// Where what a fence hands on or takes up is kept: by how far the other end may be away.
size_t distance(Scope scope) {
    return scope == Scope::kSys ? 2 : scope == Scope::kGpu ? 1 : 0;
}
size_t distance(const Block& from, const Block& to) {
    for (const Scope scope : {Scope::kBlock, Scope::kGpu}) {
        if (includes(scope, from, to)) return distance(scope);
    }
    return 2;
}
constexpr Scope kScopes[3] = {Scope::kBlock, Scope::kGpu, Scope::kSys};

void hand_on(FlagState& flag, const Thread& from, Scope scope, const View& view) {
    for (Released& released : flag.released) {
        if (released.block == &from.block() && released.scope == scope) {
            released.view.join(view);
            return;
        }
    }
    flag.released.push_back({&from.block(), scope, view});
}

void wake_watchers(const void* address) {
    auto& watchers = machine->watchers;
    for (size_t i = 0; i < watchers.size();) {
        if (watchers[i].first != address) {
            ++i;
            continue;
        }
        make_ready(*watchers[i].second);
        watchers[i] = watchers.back();
        watchers.pop_back();
    }
}

}  // namespace

uint8_t* flag_access(const void* address, uint32_t bytes, Access access, const FlagOrder& order) {
    Thread& me = *machine->current;
    access.scope = order.scope;
    uint8_t* place = global_access(address, bytes, access);
    if (!access.reads) return place;
    if (me.is_polling) me.watched.push_back(address);
    const auto found = machine->flags.find(address);
    if (found == machine->flags.end()) return place;
    for (const Released& released : found->second.released) {
        if (!includes(released.scope, *released.block, me.block()) ||
            !includes(order.scope, me.block(), *released.block)) {
            continue;
        }
        if (order.acquires) {
            acquire(me, released.view);
        } else {
            me.seen[distance(*released.block, me.block())].join(released.view);
        }
    }
    return place;
}

void flag_written(const void* address, bool keeps, const FlagOrder& order) {
    Thread& me = *machine->current;
    FlagState& flag = machine->flags[address];
    if (!keeps) flag.released.clear();
    if (order.releases) {
        View view;
        release(me, view);
        hand_on(flag, me, order.scope, view);
    } else {
        for (size_t i = 0; i < 3; ++i) {
            if (me.released[i].known.is_empty()) continue;
            hand_on(flag, me, std::min(kScopes[i], order.scope), me.released[i]);
        }
    }
    if (order.scope == Scope::kSys) me.on_its_way = address;
    note_progress();
    wake_watchers(address);
}

void fence(Scope scope) {
    Thread& me = *machine->current;
    const size_t farthest = distance(scope);
    for (size_t i = 0; i <= farthest; ++i) acquire(me, me.seen[i]);
    if (scope == Scope::kSys) me.on_its_way = nullptr;
    me.released[farthest] = {};
    release(me, me.released[farthest]);
}

void begin_wait(const char* wrapper, Site site) {
    enter(wrapper, site);
    machine->current->wait_place = {wrapper, site};
}

void begin_poll() {
    Thread& me = *machine->current;
    me.is_polling = true;
    me.poll_progress = machine->progress;
    me.watched.clear();
    me.watched_barriers.clear();
}

Wake poll_sleep(uint64_t expected, uint64_t seen, uint64_t deadline_ns) {
    Machine& m = *machine;
    Thread& me = *m.current;
    me.is_polling = false;
    if (me.poll_progress != m.progress) return Wake::kProgress;  // while the test ran
    for (const void* address : me.watched) m.watchers.emplace_back(address, &me);
    for (Mbarrier* barrier : me.watched_barriers) barrier->waiters.push_back(&me);
    Wait wait{WaitKind::kPoll};
    wait.expected = expected;
    wait.seen = seen;
    wait.flag = me.watched.empty() ? nullptr : me.watched.back();
    wait.deadline_ns = deadline_ns;
    const Wake wake = block_bounded(wait);
    std::erase_if(m.watchers, [&](const auto& watcher) { return watcher.second == &me; });
    for (Mbarrier* barrier : me.watched_barriers) std::erase(barrier->waiters, &me);
    return wake;
}

void end_poll() {
    machine->current->is_polling = false;
}

}  // namespace mok::emu
