// One run: checks what the host asks for, builds the machine, runs it, takes it apart.

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>

#include "csrc/emu/launch.h"
#include "csrc/emu/launch_state.h"
#include "csrc/emu/report.h"
#include "csrc/emu/schedule.h"

namespace mok::emu {

namespace {

constexpr uint32_t kMaxThreads = 1024, kMaxCluster = 16, kMaxShared = 227 * 1024;
constexpr uint64_t kLateSteps[] = {0, 0, 10'000, 1'000'000};

[[noreturn]] void refuse(const std::string& message) {
    throw std::invalid_argument(message);
}

void check_launch(const Launch& launch) {
    const char* name = launch.name.c_str();
    if (launch.threads == 0 || launch.threads > kMaxThreads || launch.threads % kLanes != 0) {
        refuse(text("launch %s has %u threads a block: a multiple of 32 up to 1024.", name, launch.threads));
    }
    if (launch.cluster == 0 || launch.cluster > kMaxCluster || launch.blocks == 0 ||
        launch.blocks % launch.cluster != 0) {
        refuse(
            text("launch %s has %u blocks in clusters of %u: at most 16 a cluster, which divides the blocks.",
                 name, launch.blocks, launch.cluster));
    }
    if (launch.shared_bytes > kMaxShared) {
        refuse(text("launch %s asks for %u bytes of shared memory: at most %u.", name, launch.shared_bytes,
                    kMaxShared));
    }
    if (!launch.body) refuse(text("launch %s has no kernel: set_kernel gives it one.", name));
    if (launch.rank < 0) refuse(text("launch %s has rank %d: ranks count from 0.", name, launch.rank));
}

void add_regions(const std::vector<Region>& regions) {
    Machine& m = *machine;
    for (const Region& region : regions) {
        if (region.bytes == 0) continue;
        auto state = std::make_unique<RegionState>();
        state->region = region;
        state->begin = static_cast<uint8_t*>(region.base);
        state->end = state->begin + region.bytes;
        if (reinterpret_cast<uintptr_t>(region.base) % 16 != 0) {
            refuse(text("region %s begins at %p: a multiple of 16 as device memory is.", region.name.c_str(),
                        region.base));
        }
        state->shadow.resize(region.bytes);
        m.regions.push_back(std::move(state));
    }
    std::sort(m.regions.begin(), m.regions.end(),
              [](const auto& a, const auto& b) { return a->begin < b->begin; });
    for (size_t i = 1; i < m.regions.size(); ++i) {
        if (m.regions[i]->begin >= m.regions[i - 1]->end) continue;
        refuse(text("regions %s and %s overlap.", m.regions[i - 1]->region.name.c_str(),
                    m.regions[i]->region.name.c_str()));
    }
}

void hide_inputs() {
    for (const auto& region : machine->regions) {
        if (!region->region.is_input) continue;
        region->start_component = static_cast<int>(new_component());
        region->initial.assign(region->begin, region->end);
        std::memset(region->begin, kPoison, region->initial.size());
    }
}

void add_launches(const std::vector<Launch>& launches) {
    Machine& m = *machine;
    std::map<int, size_t> stream_of;
    for (const Launch& launch : launches) {
        check_launch(launch);
        const auto [entry, is_new] = stream_of.try_emplace(launch.rank, m.streams.size());
        if (is_new) m.streams.emplace_back().rank = launch.rank;
        auto& state = m.launches.emplace_back(std::make_unique<LaunchState>());
        state->launch = &launch;
        m.streams[entry->second].launches.push_back(state.get());
    }
    m.num_waiting_streams = m.streams.size();
    if (m.streams.size() < 2) return;
    Stream& late = m.streams[random_below(static_cast<uint32_t>(m.streams.size()))];
    late.start_step = kLateSteps[random_below(std::size(kLateSteps))];
    late.starts_last = m.options.policy == Policy::kLateRank;
}

void take_apart() {
    Machine& m = *machine;
    for (const auto& launch : m.launches) {
        for (const auto& block : launch->blocks) {
            if (block->shared != nullptr &&
                std::find(m.to_reap.begin(), m.to_reap.end(), block.get()) == m.to_reap.end()) {
                m.to_reap.push_back(block.get());
            }
        }
    }
    reap_blocks();
    for (const auto& region : m.regions) {
        if (!region->final.empty()) std::memcpy(region->begin, region->final.data(), region->final.size());
    }
    RunStats& stats = m.result.stats;
    stats.clock_components = m.num_components;
    stats.virtual_ns = timer_ns();
    for (auto& [place, site] : m.sites) m.result.sites.push_back(site);
    std::sort(m.result.sites.begin(), m.result.sites.end(), [](const CallSite& a, const CallSite& b) {
        return std::tie(a.file, a.line, a.wrapper) < std::tie(b.file, b.line, b.wrapper);
    });
}

}  // namespace

RunResult run(const std::vector<Region>& regions, const std::vector<Launch>& launches,
              const RunOptions& options) {
    static std::mutex one_at_a_time;
    const std::lock_guard lock(one_at_a_time);
    const auto owner = std::make_unique<Machine>();
    machine = owner.get();
    struct Reset {
        ~Reset() {
            machine = nullptr;
            reset_shadows();
            Clock::reset();
        }
    } reset;
    machine->options = options;
    choose_character(options.policy, options.seed);
    add_regions(regions);
    add_launches(launches);
    hide_inputs();
    run_threads();
    machine->result.ok = !machine->has_failed;
    take_apart();
    return std::move(machine->result);
}

}  // namespace mok::emu
