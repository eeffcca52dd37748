// The life of launches, blocks and threads.

#include "csrc/emu/launch.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

#include "csrc/emu/copies.h"
#include "csrc/emu/launch_state.h"
#include "csrc/emu/report.h"
#include "csrc/emu/schedule.h"

namespace mok::emu {

namespace {

constexpr uint32_t kMaxShared = 227 * 1024;
constexpr size_t kSharedBuffer = 256 * 1024;

/// Shared memories are kept between runs, so that their pages stay warm.
std::vector<uint8_t*>& free_shared() {
    static std::vector<uint8_t*> buffers;
    return buffers;
}

uint8_t* take_shared(uint32_t bytes) {
    if (free_shared().empty()) {
        void* buffer = std::aligned_alloc(4096, kSharedBuffer);
        if (buffer == nullptr) throw std::bad_alloc();
        free_shared().push_back(static_cast<uint8_t*>(buffer));
    }
    uint8_t* buffer = free_shared().back();
    free_shared().pop_back();
    std::memset(buffer, kPoison, kDynamicShared + bytes);
    return buffer;
}

void start_block(LaunchState& state, Cluster& cluster, uint32_t idx) {
    Machine& m = *machine;
    const Launch& launch = *state.launch;
    Block& block = *state.blocks.emplace_back(std::make_unique<Block>());
    block.launch = &state;
    block.idx = idx;
    block.cluster = &cluster;
    block.rank_in_cluster = static_cast<uint32_t>(cluster.blocks.size());
    block.num_threads = launch.threads;
    block.num_warps = launch.threads / kLanes;
    block.threads = std::make_unique<Thread[]>(block.num_threads);
    block.warps = std::make_unique<Warp[]>(block.num_warps);
    block.shared = take_shared(launch.shared_bytes);
    block.shadow.resize(kDynamicShared + launch.shared_bytes);
    block.mbarrier_of.assign((kDynamicShared + launch.shared_bytes) / 8 + 1, -1);
    cluster.blocks.push_back(&block);
    const bool is_starved = m.options.policy == Policy::kStarvedWarps || random_bits() % 2 == 0;
    for (uint32_t i = 0; i < block.num_warps; ++i) {
        Warp& warp = block.warps[i];
        warp.block = &block;
        warp.idx = i;
        warp.lanes = &block.threads[i * kLanes];
        warp.weight = choose_weight(is_starved);
        warp.registers = registers_at_launch(launch);
        for (uint32_t lane = 0; lane < kLanes; ++lane) {
            Thread& thread = warp.lanes[lane];
            thread.warp = &warp;
            thread.lane = lane;
            thread.view = state.begin;
            thread.stack = Stack::take();
            thread.context = thread.stack.prepare(thread_main);
        }
    }
}

/// As many further clusters as may be resident.
void start_clusters(LaunchState& state) {
    Machine& m = *machine;
    const Launch& launch = *state.launch;
    while (state.next_cluster < launch.blocks / launch.cluster && state.resident < state.most_resident) {
        Cluster& cluster = *state.clusters.emplace_back(std::make_unique<Cluster>());
        const size_t first = state.blocks.size();
        for (uint32_t i = 0; i < launch.cluster; ++i) {
            start_block(state, cluster, state.next_cluster * launch.cluster + i);
        }
        for (size_t i = first; i < state.blocks.size(); ++i) {
            Block& block = *state.blocks[i];
            for (uint32_t w = 0; w < block.num_warps; ++w) make_ready(block.warps[w], ~0u);
        }
        m.alive += uint64_t{launch.threads} * launch.cluster;
        m.result.stats.threads += uint64_t{launch.threads} * launch.cluster;
        state.resident += launch.cluster;
        ++state.next_cluster;
    }
}

void start_launch(Stream& stream) {
    LaunchState& state = *stream.launches[stream.next];
    const Launch& launch = *state.launch;
    state.phase = LaunchPhase::kRunning;
    if (keeps_log()) log_line(text("rank %d: %s begins", launch.rank, launch.name.c_str()));
    state.component = static_cast<int>(new_component());
    if (stream.next > 0) state.begin = stream.launches[stream.next - 1]->end;
    state.begin.known.set(static_cast<uint32_t>(state.component), 1);
    if (stream.next == 0) {
        for (const auto& region : machine->regions) {
            if (!region->region.is_input || region->region.rank != stream.rank) continue;
            std::memcpy(region->begin, region->initial.data(), region->initial.size());
            state.begin.known.set(static_cast<uint32_t>(region->start_component), 1);
        }
    }
    // What earlier kernels of the stream did, in any proxy, is over.
    state.begin.fenced[0] = state.begin.fenced[1] = state.begin.known;
    const uint32_t clusters = launch.blocks / launch.cluster;
    const uint32_t most =
        launch.cooperative || random_bits() % 2 == 0 ? clusters : 1 + random_below(clusters);
    state.most_resident = most * launch.cluster;
    start_clusters(state);
    note_progress();
}

void start_stream(Stream& stream) {
    stream.has_started = true;
    start_launch(stream);
}

/// The host looks at the rank's outputs.
void keep_outputs(int rank) {
    for (const auto& region : machine->regions) {
        if (region->region.is_output && region->region.rank == rank)
            region->final.assign(region->begin, region->end);
    }
}

void end_stream(Stream& stream, const View& end) {
    for (const auto& region : machine->regions) {
        if (!region->region.is_output || region->region.rank != stream.rank) continue;
        uint64_t at = 0;
        if (const ShadowNode* node = region->shadow.unknown_write(end, &at)) {
            stop_run(text(
                "order: the end of rank %d's last kernel does not come after the write of %s by %s; the "
                "host, which reads it then, may see anything",
                stream.rank, describe_global(region->begin + at).c_str(), describe_access(*node).c_str()));
        }
    }
    keep_outputs(stream.rank);
}

void try_end_launch(LaunchState& state) {
    if (state.phase != LaunchPhase::kRunning || state.num_exited < state.launch->blocks || state.copies != 0)
        return;
    Machine& m = *machine;
    state.phase = LaunchPhase::kEnded;
    if (keeps_log()) log_line(text("rank %d: %s ends", state.launch->rank, state.launch->name.c_str()));
    // The end of a grid waits for its copies.
    for (AsyncRecord& record : m.records) {
        if (record.epoch != AsyncRecord::kOpen || record.issuer->block().launch != &state) continue;
        record.component = state.component;
        record.epoch = 2;
    }
    state.end.known.set(static_cast<uint32_t>(state.component), 2);
    for (Stream& stream : m.streams) {
        if (stream.is_stopped || stream.launches[stream.next] != &state) continue;
        if (++stream.next < stream.launches.size()) {
            start_launch(stream);
        } else {
            stream.is_stopped = true;
            end_stream(stream, state.end);
        }
        return;
    }
}

void end_block(Block& block) {
    LaunchState& state = *block.launch;
    check_copies_at_exit(block);
    check_wgmmas_at_exit(block);
    check_barriers_at_exit(block);
    for (const auto& [thread, use] : block.remote_uses) {
        if (is_known(use.stamp, block.end, true)) continue;
        fail(ErrorKind::kExited,
             text("ends the block, but does not come after %s (%s at %s), which uses its shared memory: a "
                  "cluster "
                  "barrier before the end keeps the block",
                  describe(*thread).c_str(), use.instruction, describe(use.site).c_str()));
    }
    block.has_exited = true;
    state.end.join(block.end);
    ++state.num_exited;
    machine->to_reap.push_back(&block);
    for (const Block* other : block.cluster->blocks) {
        if (!other->has_exited) return;
    }
    state.resident -= state.launch->cluster;
    start_clusters(state);
    try_end_launch(state);
}

}  // namespace

void start_due_streams() {
    if (machine->num_waiting_streams == 0) return;
    for (Stream& stream : machine->streams) {
        if (stream.has_started || stream.starts_last || machine->result.stats.steps < stream.start_step)
            continue;
        --machine->num_waiting_streams;
        start_stream(stream);
    }
}

bool start_waiting_stream() {
    for (Stream& stream : machine->streams) {
        if (stream.has_started) continue;
        --machine->num_waiting_streams;
        start_stream(stream);
        return true;
    }
    return false;
}

void exit_thread(Thread& thread) {
    Block& block = thread.block();
    thread.exited = true;
    thread.warp->present &= ~(1u << thread.lane);
    ++block.num_exited;
    --machine->alive;
    note_progress();
    if (thread.stack.has_overflowed()) fail(ErrorKind::kLimit, "has overflowed its stack of 64 KiB");
    block.end.join(thread.view);
    if (thread.warp->present == 0) release(*thread.warp, block.end);
    forget_exited(thread);
    if (block.num_exited == block.num_threads) end_block(block);
}

void trap_launch(LaunchState& state) {
    Machine& m = *machine;
    state.phase = LaunchPhase::kTrapped;
    if (keeps_log()) log_line(text("rank %d: %s traps", state.launch->rank, state.launch->name.c_str()));
    m.result.trapped.push_back(state.launch->name);
    keep_outputs(state.launch->rank);
    drop_copies(state);
    for (const auto& block : state.blocks) {
        if (block->has_exited) continue;
        for (uint32_t i = 0; i < block->num_warps; ++i) {
            Warp& warp = block->warps[i];
            m.alive -= static_cast<uint64_t>(__builtin_popcount(warp.present));
            warp.present = warp.ready = 0;
            if (warp.wgmma != nullptr) std::erase(m.multiplying, &warp);
        }
        for (uint32_t i = 0; i < block->num_threads; ++i) block->threads[i].exited = true;
        block->has_exited = true;
        m.to_reap.push_back(block.get());
    }
    std::erase_if(m.idle, [](const Thread* thread) { return thread->exited; });
    std::erase_if(m.watchers, [](const auto& watcher) { return watcher.second->exited; });
    for (Stream& stream : m.streams) {
        if (std::find(stream.launches.begin(), stream.launches.end(), &state) != stream.launches.end()) {
            stream.is_stopped = true;
        }
    }
    note_progress();
}

void copy_done(LaunchState& state) {
    --state.copies;
    if (state.copies == 0) try_end_launch(state);
}

void reap_blocks() {
    for (Block* block : machine->to_reap) {
        for (uint32_t i = 0; i < block->num_threads; ++i) block->threads[i].stack.release();
        free_shared().push_back(block->shared);
        block->shared = nullptr;
    }
    machine->to_reap.clear();
}

}  // namespace mok::emu
