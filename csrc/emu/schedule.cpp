#include "csrc/emu/schedule.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <exception>

#include "csrc/emu/copies.h"
#include "csrc/emu/launch_state.h"
#include "csrc/emu/report.h"

namespace mok::emu {

Machine* machine = nullptr;

namespace {

// A test of its own may look at a second condition only every so many polls (the peer barrier: 32).
constexpr uint32_t kIdleRounds = 128;
// A thread that has run so many instructions while nothing happened is polling.
constexpr uint32_t kStaleInstructions = 512;
constexpr uint32_t kSleeperChance = 8, kEndedChance = 16, kEndedLooks = 4;

/// Wakes everyone in a bounded wait or asleep. False if there is nobody, or nothing came of it before.
bool wake_idle() {
    Machine& m = *machine;
    if (m.idle.empty()) return false;
    if (m.idle_progress != m.progress) {
        m.idle_progress = m.progress;
        m.idle_rounds = 0;
    }
    Wake reason = Wake::kIdle;
    if (++m.idle_rounds > kIdleRounds) {
        if (!m.options.time_outs) return false;
        uint64_t next = 0;
        for (const Thread* thread : m.idle) {
            const uint64_t at = thread->wait.deadline_ns;
            if (at != 0 && (next == 0 || at < next)) next = at;
        }
        if (next == 0) return false;
        const uint64_t now = timer_ns();
        if (next > now) m.jumped_ns += next - now;
        m.idle_rounds = 0;
        reason = Wake::kTimeUp;
    }
    for (Thread* thread : m.idle) {
        thread->wake = reason;
        make_ready(*thread);
    }
    m.idle.clear();
    return true;
}

/// The host's end of a rank: sets the word once the step has come, then lets its waits look at it now and
/// then.
void end_rank() {
    Machine& m = *machine;
    const EndedRank& ended = m.options.ended;
    if (!m.has_ended_rank) {
        if (m.result.stats.steps < ended.step) return;
        const auto is_running = [&](const Stream& stream) {
            return stream.rank == ended.rank && stream.has_started && !stream.is_stopped;
        };
        if (std::none_of(m.streams.begin(), m.streams.end(), is_running)) return;
        *ended.word = 1;
        m.has_ended_rank = true;
        if (keeps_log()) log_line(text("the host ends rank %d", ended.rank));
        note_progress();
    }
    // Also before copies that are held back go on: on a GPU a wait looks within microseconds.
    if (m.idle.empty() || !chance(m.ready.empty() ? 512 : kEndedChance)) return;
    // Who has looked and does not leave looks again when something has happened, or copies would never go on.
    if (m.ended_progress != m.progress) m.ended_looks = 0;
    m.ended_progress = m.progress;
    if (++m.ended_looks > kEndedLooks) return;
    constexpr uint32_t kMostWarps = 12;  // of those one may be the last that looks
    const uint32_t one_of = random_bits() % 4 == 0 ? static_cast<uint32_t>(m.idle.size()) : 1;
    const uint32_t last_warp = random_bits() % 2 == 0 ? random_below(kMostWarps) : kMostWarps;
    std::erase_if(m.idle, [&](Thread* thread) {
        if (rank_of(*thread) != ended.rank || thread->warp->idx == last_warp || random_below(one_of) != 0) {
            return false;
        }
        thread->wake = Wake::kIdle;
        make_ready(*thread);
        return true;
    });
}

void wake_sleepers() {
    Machine& m = *machine;
    std::erase_if(m.idle, [](Thread* thread) {
        if (thread->wait.kind != WaitKind::kSleep) return false;
        make_ready(*thread);
        return true;
    });
}

Thread* take_lane(Warp& warp) {
    uint32_t lane;
    if (machine->character.random_lanes) {
        const uint32_t turn = random_bits() % kLanes;
        const uint32_t turned = turn == 0 ? warp.ready : warp.ready >> turn | warp.ready << (kLanes - turn);
        lane = (static_cast<uint32_t>(__builtin_ctz(turned)) + turn) % kLanes;
    } else {
        lane = static_cast<uint32_t>(__builtin_ctz(warp.ready));
    }
    warp.ready &= ~(1u << lane);
    return &warp.lanes[lane];
}

/// A thread that is ready, nullptr where the pick fell on one that is not to run now.
Thread* pick_ready() {
    Machine& m = *machine;
    Warp* warp = m.last;
    if (warp == nullptr || warp->ready == 0 || !chance(m.character.stay_chance)) {
        const size_t place = random_bits() % m.ready.size();
        warp = m.ready[place];
        if (warp->ready == 0) {
            warp->is_listed = false;
            m.ready[place] = m.ready.back();
            m.ready.pop_back();
            return nullptr;
        }
        const bool is_skipped = warp->weight < 1024 && !chance(warp->weight) && random_bits() % 64 != 0;
        if (is_skipped && m.ready.size() > 1) return nullptr;
    }
    m.last = warp;
    return take_lane(*warp);
}

/// The next thread to run; nullptr when all are done.
Thread* choose_next() {
    Machine& m = *machine;
    for (;;) {
        if (++m.result.stats.steps > m.options.max_steps) {
            stop_run(
                text("step limit: %llu steps without an end; a poll of the kernel's own that never "
                     "succeeds?",
                     static_cast<unsigned long long>(m.options.max_steps)));
        }
        start_due_streams();
        if (m.options.ended.word != nullptr) end_rank();
        if (has_active_copies() && (m.ready.empty() || chance(m.character.copy_chance))) {
            step_copies();
            continue;
        }
        if (m.ready.empty()) {
            const bool held_first = random_bits() % 2 == 0;
            if (held_first && let_held_copy_go()) continue;
            if (start_waiting_stream() || let_held_copy_go()) continue;
            if (wake_idle()) continue;
            if (m.alive == 0) return nullptr;
            fail_deadlock();
        }
        if (!m.idle.empty() && chance(kSleeperChance)) wake_sleepers();
        if (Thread* thread = pick_ready()) return thread;
    }
}

void switch_to(Context& from, Thread& thread) {
    machine->current = &thread;
    ++machine->result.stats.switches;
    switch_context(from, thread.context);
}

void switch_away() {
    Thread& me = *machine->current;
    Thread* next = choose_next();
    if (next != &me) switch_to(me.context, *next);
}

}  // namespace

uint32_t random_bits() {
    uint64_t& x = machine->random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return static_cast<uint32_t>(x >> 32);
}

uint32_t random_below(uint32_t bound) {
    return static_cast<uint32_t>(uint64_t{random_bits()} * bound >> 32);
}

bool chance(uint32_t of_1024) {
    return of_1024 != 0 && random_bits() % 1024 < of_1024;
}

void choose_character(Policy policy, uint64_t seed) {
    Machine& m = *machine;
    m.random = seed * 0x9e3779b97f4a7c15u + 0x1234567u;
    if (m.random == 0) m.random = 1;
    for (int i = 0; i < 8; ++i) random_bits();
    constexpr uint32_t kCopy[] = {0, 4, 32, 256, 1000}, kStay[] = {0, 700, 1000, 1020};
    constexpr uint32_t kYield[] = {0, 0, 32, 256}, kHold[] = {0, 0, 128, 700};
    Character& c = m.character;
    c = {kCopy[random_below(5)], kStay[random_below(4)], kYield[random_below(4)], kHold[random_below(4)],
         random_bits() % 2 == 0};
    switch (policy) {
        case Policy::kBySeed:
        case Policy::kStarvedWarps:
        case Policy::kLateRank:
            break;
        case Policy::kRandom:
            c = {256, 0, 256, 0, true};
            break;
        case Policy::kRunUntilBlocked:
            c.yield_chance = 0;
            c.stay_chance = 1024;
            break;
        case Policy::kHeldCopies:
            c.hold_chance = 1024;
            break;
    }
}

uint32_t choose_weight(bool starved_block) {
    constexpr uint32_t kWeights[] = {1024, 1024, 512, 64, 8};
    const uint32_t weight = kWeights[random_below(5)];
    return starved_block ? weight : 1024;
}

void make_ready(Thread& thread) {
    if (thread.exited) return;
    make_ready(*thread.warp, 1u << thread.lane);
}

void make_ready(Warp& warp, uint32_t lanes) {
    warp.ready |= lanes & warp.present;
    if (warp.is_listed || warp.ready == 0) return;
    warp.is_listed = true;
    machine->ready.push_back(&warp);
}

Wake block_current(const Wait& wait) {
    Thread& me = *machine->current;
    me.wait = wait;
    me.wake = Wake::kProgress;
    switch_away();
    me.wait.kind = WaitKind::kNone;
    return me.wake;
}

Wake block_bounded(const Wait& wait) {
    Thread& me = *machine->current;
    machine->idle.push_back(&me);
    const Wake wake = block_current(wait);
    if (wake == Wake::kProgress) std::erase(machine->idle, &me);
    return wake;
}

void yield_current() {
    make_ready(*machine->current);
    switch_away();
}

void enter(const char* instruction, Site site) {
    Machine& m = *machine;
    Thread& me = *m.current;
    me.instruction = instruction;
    me.site = site;
    Warp& warp = *me.warp;
    while (me.deposits > warp.num_executed) {
        warp.waiting_lanes |= 1u << me.lane;
        block_current({WaitKind::kLanes});
    }
    if (chance(m.character.yield_chance)) yield_current();
    if (me.progress_seen != m.progress) {
        me.progress_seen = m.progress;
        me.steps_in_a_row = 0;
    } else if (++me.steps_in_a_row > kStaleInstructions) {
        sleep();
    }
    if (keeps_log()) log_instruction();
}

void sleep() {
    block_bounded({WaitKind::kSleep});
}

uint64_t timer_ns() {
    return 1'000'000 + machine->result.stats.steps + machine->jumped_ns;
}

void trap() {
    const void* stored = machine->current->on_its_way;
    if (stored != nullptr) {
        fail(ErrorKind::kUsage, text("may end the context while its store to %s is on the way: "
                                     "fence_acq_rel_sys must lie between",
                                     describe_global(stored).c_str()));
    }
    throw KernelTrapped{};
}

void stop_run(const std::string& error) {
    Machine& m = *machine;
    if (!m.has_failed) {
        m.has_failed = true;
        m.result.error =
            error + text(" [seed %llu, step %llu]", static_cast<unsigned long long>(m.options.seed),
                         static_cast<unsigned long long>(m.result.stats.steps));
        if (std::getenv("MOK_EMU_BREAK") != nullptr) std::raise(SIGTRAP);
    }
    throw RunStopped{};
}

void run_threads() {
    Machine& m = *machine;
    try {
        while (!m.has_failed) {
            reap_blocks();
            m.current = nullptr;
            Thread* next = choose_next();
            if (next == nullptr) return;
            switch_to(m.main, *next);
        }
    } catch (const RunStopped&) {
    }
}

void thread_main() {
    Machine& m = *machine;
    Thread& me = *m.current;
    try {
        me.block().launch->launch->body();
        enter("exit", me.site);
        exit_thread(me);
    } catch (const KernelTrapped&) {
        trap_launch(*me.block().launch);
    } catch (const RunStopped&) {
    } catch (const std::exception& error) {
        m.has_failed = true;
        m.result.error = text("kernel threw: %s", error.what());
    }
    Context nowhere;
    switch_context(nowhere, m.main);
    std::abort();
}

}  // namespace mok::emu
