// The machine's synchronisation, as csrc/ptx/host calls it: barriers, mbarriers, flags, fences and waits.
// Every function acts for the current thread, after enter().
#pragma once

#include "csrc/emu/machine.h"

namespace mok::emu {

/// Why a wait returned.
enum class Wake : uint8_t {
    kProgress,  // what it waits for may hold now
    kIdle,      // nothing else can move: look whether another wait has given up
    kTimeUp,    // nothing else can move, and time has passed beyond a limit
};

/// A bounded wait begins (instead of enter): reports name it as long as it sleeps.
void begin_wait(const char* wrapper, Site site);

// Barriers of a block and a cluster.

/// bar.sync 0; returns whether any thread came with `condition`.
bool sync_block(const char* instruction, bool condition, Site site);
void named_barrier(const char* instruction, uint32_t id, uint32_t threads, bool waits, Site site);
void cluster_arrive(bool releases, Site site);
void cluster_wait(Site site);
void sync_warp(Site site);
bool elect_one(Site site);
/// A warp-wide instruction that leaves nothing behind and needs nothing from the other lanes.
void meet_later(const char* instruction, Site site);
/// setmaxnreg.
void set_registers(uint32_t registers, bool increases, Site site);

// mbarriers.

void mbarrier_init(uint32_t address, uint32_t arrivals);
void mbarrier_invalidate(uint32_t address);
void fence_mbarrier_init();

enum class ArriveOrder : uint8_t {
    kNothing,  // expect_tx without arrival
    kBlock,    // release.cta: to another block it hands on reads only
    kCluster,  // release.cluster
};
void mbarrier_arrive(uint32_t address, uint32_t arrivals, uint32_t bytes, ArriveOrder order);
/// Whether the phase of this parity is complete; acquires what its arrivals released.
bool mbarrier_test(uint32_t address, uint32_t parity, Scope scope);
/// Sleeps until the phase is complete or the wait is to look at its deadline.
Wake mbarrier_sleep(uint32_t address, uint32_t parity, uint64_t deadline_ns);

struct MbarrierPair {
    uint32_t barrier[2], parity[2];
};
/// All lanes wait until one of them, alone, has waited for either phase: true in that lane, which then calls
/// the others with dismiss_warp. It tests for all.
bool lead_warp(const char* instruction, const MbarrierPair& operands, Site site);
bool mbarrier_test_for_warp(uint32_t address, uint32_t parity);
void dismiss_warp(uint64_t result);
/// What dismiss_warp was given.
uint64_t warp_result();

/// st.async: 16 bytes into another block's shared memory, completing on a barrier there.
void store_async(uint32_t address, const uint32_t (&words)[4], uint32_t barrier);

// Flags.

/// Order of one access to a flag. Left out by mutation, it is a relaxed one.
struct FlagOrder {
    bool acquires = false;
    bool releases = false;
    Scope scope = Scope::kGpu;
};
/// Before reading or writing: checks the access and returns where the flag is.
uint8_t* flag_access(const void* address, uint32_t bytes, Access access, const FlagOrder& order);
/// After writing; `keeps`: a read-modify-write, which hands on what its predecessor released.
void flag_written(const void* address, bool keeps, const FlagOrder& order);

void fence(Scope scope);
void fence_proxy(bool shared, bool global);

// Waits with a test of their own.

/// Between the two, flags that the thread reads are those whose writers wake it.
void begin_poll();
Wake poll_sleep(uint64_t expected, uint64_t seen, uint64_t deadline_ns);
void end_poll();

}  // namespace mok::emu
