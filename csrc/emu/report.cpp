#include "csrc/emu/report.h"

#include <bit>
#include <cstdarg>
#include <cstdio>

#include "csrc/emu/schedule.h"

namespace mok::emu {

namespace {

constexpr const char* kKindNames[] = {"deadlock", "order",    "proxy",  "bounds", "alignment",
                                      "barrier",  "diverged", "exited", "usage",  "limit"};

std::string describe_place(const Shadow& shadow, uint64_t at) {
    return shadow.block != nullptr ? describe_shared(*shadow.block, at)
                                   : describe_global(shadow.region->begin + at);
}

const char* verb(Access access) {
    return access.reads && access.writes ? "adds to" : access.writes ? "writes" : "reads";
}

const char* advice(const ShadowNode& node, Access access) {
    if (access.scope != Scope::kNone && node.access.scope != Scope::kNone) {
        return "between ranks both accesses to a flag need sys scope, between blocks of a rank gpu scope";
    }
    if (node.record == nullptr)
        return "a barrier, mbarrier or flag with release and acquire must lie between";
    if (std::strncmp(node.record->instruction, "wgmma", 5) == 0) {
        return "wgmma_wait by that warp, then a barrier or mbarrier to this thread, must lie between";
    }
    if (node.access.writes && node.record->component != node.record->issuer->component) {
        return "a wait at the mbarrier that it completes on must lie between";
    }
    if (node.access.writes)
        return "bulk_wait by that thread, then a barrier or flag to this one, must lie between";
    if (node.record->component == node.record->issuer->component) {
        return "bulk_wait_read by that thread, then a barrier or mbarrier to this one, must lie between";
    }
    return "a wait at the mbarrier that it completes on must lie between";
}

std::string prefix(ErrorKind kind, const Thread& thread) {
    return text("%s: %s, %s at %s: ", kKindNames[static_cast<size_t>(kind)], describe(thread).c_str(),
                thread.instruction, describe(thread.site).c_str());
}

}  // namespace

std::string text(const char* format, ...) {
    char buffer[2048];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(buffer, sizeof(buffer), format, arguments);
    va_end(arguments);
    return buffer;
}

std::string describe_lanes(uint32_t lanes) {
    if (lanes == ~0u) return "";
    const uint32_t first = static_cast<uint32_t>(std::countr_zero(lanes));
    const uint32_t count = static_cast<uint32_t>(std::popcount(lanes));
    if (count == 1) return text(" lane %u", first);
    if (lanes >> first == (1u << count) - 1) return text(" lanes %u-%u", first, first + count - 1);
    return text(" lanes %#x", lanes);
}

std::string describe_warp(const Warp& warp, uint32_t lanes) {
    const Launch& launch = *warp.block->launch->launch;
    std::string role;
    for (const WarpRole& candidate : launch.roles) {
        if (warp.idx >= candidate.first_warp && warp.idx < candidate.first_warp + candidate.warps) {
            role = " (" + candidate.name + ")";
        }
    }
    return text("rank %d block %u warp %u%s%s", launch.rank, warp.block->idx, warp.idx, role.c_str(),
                describe_lanes(lanes).c_str());
}

std::string describe(const Thread& thread) {
    return describe_warp(*thread.warp, 1u << thread.lane);
}

std::string describe(Site site) {
    const char* file = site.file_name();
    const char* inside = std::strstr(file, "csrc/");
    return text("%s:%u", inside != nullptr ? inside : file, static_cast<unsigned>(site.line()));
}

std::string describe_shared(const Block& block, uint64_t address) {
    const uint32_t offset = static_cast<uint32_t>(address) - kDynamicShared;
    std::string place = text("shared byte %u", offset);
    for (const SharedName& name : block.launch->launch->shared_names) {
        if (offset < name.offset || offset >= name.offset + name.bytes) continue;
        const uint32_t inside = offset - name.offset;
        place = name.stride == 0 || name.stride >= name.bytes
                    ? name.name
                    : text("%s[%u]", name.name.c_str(), inside / name.stride);
        const uint32_t rest = name.stride == 0 ? inside : inside % name.stride;
        if (rest != 0) place += text(" + %u", rest);
        place += text(" (shared byte %u)", offset);
    }
    return place;
}

std::string describe_global(const void* address) {
    const uint8_t* at = static_cast<const uint8_t*>(address);
    for (const auto& region : machine->regions) {
        if (at < region->begin || at >= region->end) continue;
        const Region& r = region->region;
        const std::string owner = r.rank == Region::kAnyRank ? "the host" : text("rank %d", r.rank);
        return text("%s + %llu of %s", r.name.c_str(), static_cast<unsigned long long>(at - region->begin),
                    owner.c_str());
    }
    return text("global address %p", address);
}

std::string describe_access(const ShadowNode& node) {
    const std::string who = node.record != nullptr ? describe(*node.record->issuer)
                                                   : describe_warp(*node.stamp.warp, node.stamp.lanes);
    const char* instruction = node.record != nullptr ? node.record->instruction : node.instruction;
    return text("%s at %s of %s", instruction,
                describe(node.record != nullptr ? node.record->site : node.site).c_str(), who.c_str());
}

void fail(ErrorKind kind, const std::string& message) {
    stop_run(prefix(kind, *machine->current) + message);
}

void warn(const std::string& message) {
    auto& warnings = machine->result.warnings;
    for (const std::string& earlier : warnings) {
        if (earlier == message) return;
    }
    warnings.push_back(message);
}

void fail_order(const Shadow& shadow, uint64_t page_begin, const Thread& viewer, Access access, bool is_async,
                const ShadowNode& node) {
    const Thread& me = *machine->current;
    const std::string place = describe_place(shadow, page_begin + node.begin);
    std::string message = text("%s %s, which %s %s", verb(access), place.c_str(),
                               describe_access(node).c_str(), verb(node.access));
    if (node.record != nullptr && !node.record->is_done) {
        message += "; that is still in flight";
    } else {
        message += "; nothing puts that before this";
    }
    if (&viewer != &me && viewer.warp == me.warp) message += text(" for lane %u", viewer.lane);
    if (is_async && node.record != nullptr && node.record->is_reduction && access.reads) {
        message += ", so the order of the two sums is free";
    }
    if (node.record == nullptr && node.access.writes && is_known(node.stamp, viewer, true)) {
        stop_run(
            prefix(ErrorKind::kOrder, me) + message +
            ": between blocks of a cluster what was written is handed on by mbar_arrive_cluster_release and "
            "mbar_wait_acquire_cluster; the plain forms hand on reads only.");
    }
    stop_run(prefix(ErrorKind::kOrder, me) + message + ": " + advice(node, access) + ".");
}

void report_proxy(const Shadow& shadow, uint64_t page_begin, const Thread& viewer, Access access,
                  const ShadowNode& node, bool is_error) {
    (void)viewer;
    const char* fence =
        shadow.space == Space::kShared ? "fence_proxy_async_shared" : "fence_proxy_async_global";
    const std::string message = text(
        "%s %s through the async proxy; %s %s it%s before, and no proxy fence lies between: %s by the thread "
        "that did, before it hands on, or by one that comes after it.",
        verb(access), describe_place(shadow, page_begin + node.begin).c_str(), describe_access(node).c_str(),
        verb(node.access), node.record == nullptr ? " by ordinary access" : "", fence);
    const std::string whole = prefix(ErrorKind::kProxy, *machine->current) + message;
    if (is_error) stop_run(whole);
    warn(whole);
}

void log_line(const std::string& line) {
    constexpr size_t kMostLines = 400'000;  // the end of a run is what matters
    Machine& m = *machine;
    auto& log = m.result.log;
    if (log.size() >= kMostLines) log.erase(log.begin(), log.begin() + kMostLines / 2);
    log.push_back(text("%llu ", static_cast<unsigned long long>(m.result.stats.steps)) + line);
}

void log_instruction() {
    const Thread& me = *machine->current;
    log_line(text("%s: %s at %s", describe(me).c_str(), me.instruction, describe(me.site).c_str()));
}

}  // namespace mok::emu
