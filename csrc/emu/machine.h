// The emulated machine as the wrappers of csrc/ptx/host see it. csrc/emu/launch.h starts kernels on it;
// docs/emulator.md says what it checks.
//
// Every thread of every block of every rank is a fiber of one OS thread; a seed decides who runs. A wrapper
// is called by the current thread and does one of these:
//   enter(...)          then acts at once (loads, stores, barriers, copies): the scheduling point;
//   deposit(...)        a warp-wide instruction without a result: the lane leaves its operands, goes on;
//                       the last of the 32 executes it. No lane can enter anything else before that;
//   exchange(...)       a warp-wide instruction with a result for each lane: waits for the other lanes.
// A wrapper owns nothing (no std::string, no vector) across enter, exchange or a wait: a run that fails
// leaves the other fibers where they are.
//
// Addresses. A shared address has 24 bits of offset, the first of dynamic shared memory being
// kDynamicShared, and in the upper bits 0 for the own block or cluster rank + 1. Global addresses are host
// pointers into registered regions (launch.h).
//
// Built from csrc/emu/*.cpp and csrc/emu/*.S with -DMOK_EMULATOR -fno-strict-aliasing; kernels besides with
// -ftrivial-auto-var-init=pattern, so that an uninitialised local is a wrong number.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <source_location>
#include <string>
#include <type_traits>

namespace mok::emu {

using Site = std::source_location;  // of the wrapper's call: names the line in reports and in mutation

inline constexpr uint32_t kLanes = 32;
inline constexpr uint32_t kDynamicShared = 1024;  // as much is reserved on the device
inline constexpr uint32_t kOffsetBits = 24;
inline constexpr uint8_t kPoison = 0xff;  // undefined memory: NaN as BF16 and FP32

enum class ErrorKind : uint8_t {
    kDeadlock,
    kOrder,     // two accesses of which neither is ordered before the other
    kProxy,     // ordered, but no proxy fence between ordinary and asynchronous access
    kBounds,    // outside of a region or of shared memory, or another rank's private memory
    kAlign,     // misaligned address, size or coordinate
    kBarrier,   // mbarrier or named barrier: counts, bytes, not initialised, wrong phase
    kDiverged,  // lanes that differ in a warp-wide instruction or its operands
    kExited,    // a block that has left is still written to, or leaves with copies in flight
    kUsage,     // an instruction's rule: wgmma without fence, accumulator touched, registers, ...
    kLimit,     // steps, stack
};

/// Ends the run. The message is a clause about the current thread's instruction ("reads stage 1 + 32, which
/// ..."); thread, instruction and source line are put in front of it.
[[noreturn]] void fail(ErrorKind kind, const std::string& message);
/// Something doubtful that a run survives, reported once per text.
void warn(const std::string& message);

// Who runs.

struct Block;
struct Warp;
struct Thread;

uint32_t thread_idx();
uint32_t lane_idx();
uint32_t warp_idx();
uint32_t block_threads();
uint32_t block_idx();
uint32_t num_blocks();
uint32_t cluster_rank();
uint32_t cluster_blocks();
/// Virtual nanoseconds: they advance with every scheduling step, and jump when waits are to time out.
uint64_t timer_ns();

/// A scheduling point: waits until the warp-wide instructions before it are complete, perhaps lets others
/// run, and notes what the thread does. Every wrapper that is not a deposit or an exchange begins with it.
void enter(const char* instruction, Site site);
/// Whether this call is the one that mutation leaves out. First of all in wrappers that synchronise.
bool is_left_out(const char* wrapper, Site site);
/// nanosleep: others run.
void sleep();
/// trap: the rank's kernel ends here and now.
[[noreturn]] void trap();

/// A number below `bound` from the schedule's generator.
uint32_t random_below(uint32_t bound);

// Memory.

enum class Scope : uint8_t { kNone, kBlock, kCluster, kGpu, kSys };  // kNone: an ordinary access

struct Access {
    bool reads = false;
    bool writes = false;
    Scope scope = Scope::kNone;
};
inline constexpr Access kRead{true, false, Scope::kNone};
inline constexpr Access kWrite{false, true, Scope::kNone};

/// Checks bounds, alignment and order of an ordinary access of the current thread, records it, and returns
/// where the bytes are. `bytes` is at most 16.
uint8_t* shared_access(uint32_t address, uint32_t bytes, Access access);
/// The same for lane `lane` of the current warp (inside deposit's or exchange's execute).
uint8_t* shared_access_of_lane(uint32_t lane, uint32_t address, uint32_t bytes, Access access);
uint8_t* global_access(const void* address, uint32_t bytes, Access access);

/// mapa.
uint32_t cluster_address(uint32_t address, uint32_t rank);

// Warp-wide instructions.

namespace detail {
inline constexpr size_t kOperandBytes = 48;
using Execute = void (*)(const std::byte* operands, size_t stride, uint32_t lanes);
void deposit(const char* instruction, const void* operands, size_t bytes, bool uniform, Execute execute,
             Site site);
using ExecuteWithResults = void (*)(const std::byte* operands, size_t stride, uint32_t lanes,
                                    uint64_t* results);
uint64_t exchange(const char* instruction, const void* operands, size_t bytes, ExecuteWithResults execute,
                  Site site);
}  // namespace detail

/// The lanes' operands of one warp-wide instruction; a lane that has exited has none.
template <typename Operands>
struct Lanes {
    const std::byte* first;
    size_t stride;
    uint32_t present;  // bit i: lane i takes part

    const Operands& operator[](uint32_t lane) const {
        return *reinterpret_cast<const Operands*>(first + lane * stride);
    }
};

/// Leaves the lane's operands; the last lane runs `execute(lanes)` for all.
template <typename Operands, void (*kExecute)(const Lanes<Operands>&)>
void deposit(const char* instruction, const Operands& operands, Site site) {
    static_assert(std::is_trivially_copyable_v<Operands> && sizeof(Operands) <= detail::kOperandBytes);
    detail::deposit(
        instruction, &operands, sizeof(Operands), false,
        [](const std::byte* first, size_t stride, uint32_t lanes) {
            kExecute(Lanes<Operands>{first, stride, lanes});
        },
        site);
}

/// The same where all lanes must hold equal operands (kDiverged otherwise).
template <typename Operands, void (*kExecute)(const Operands&)>
void deposit_uniform(const char* instruction, const Operands& operands, Site site) {
    static_assert(std::is_trivially_copyable_v<Operands> && sizeof(Operands) <= detail::kOperandBytes);
    static_assert(std::has_unique_object_representations_v<Operands>, "operands are compared as bytes");
    detail::deposit(
        instruction, &operands, sizeof(Operands), true,
        [](const std::byte* first, size_t, uint32_t) { kExecute(*reinterpret_cast<const Operands*>(first)); },
        site);
}

/// Waits for the other lanes; the last runs `execute(lanes, results)`, which fills results[lane]. Up to 8
/// bytes of result a lane; longer ones go through a pointer among the operands.
template <typename Operands, void (*kExecute)(const Lanes<Operands>&, uint64_t (&results)[kLanes])>
uint64_t exchange(const char* instruction, const Operands& operands, Site site) {
    static_assert(std::is_trivially_copyable_v<Operands> && sizeof(Operands) <= detail::kOperandBytes);
    return detail::exchange(
        instruction, &operands, sizeof(Operands),
        [](const std::byte* first, size_t stride, uint32_t lanes, uint64_t* results) {
            kExecute(Lanes<Operands>{first, stride, lanes}, *reinterpret_cast<uint64_t(*)[kLanes]>(results));
        },
        site);
}

// Asynchronous copies.

/// What one copy between global and shared memory moves. Made by the wrapper, kept by the machine until the
/// copy is complete. Its shared side is one contiguous range; a swizzle permutes inside of it.
class Copy {
  public:
    virtual ~Copy() = default;
    /// Calls visit(context, first byte, bytes) for each contiguous piece of global memory that is moved (none
    /// for what lies outside of a tensor), 16-byte aligned.
    virtual void visit_global(void (*visit)(void* context, uint8_t* first, size_t bytes),
                              void* context) const = 0;
    /// Fills the whole shared range (zeros for what lies outside of a tensor).
    virtual void load(uint8_t* shared) const = 0;
    /// Writes (or adds) to global memory from a copy of the shared range.
    virtual void store(const uint8_t* shared) const = 0;
    /// Adds to global memory instead of overwriting it.
    virtual bool is_reduction() const { return false; }
};

struct CopyPlace {
    uint32_t shared;     // address of the range
    uint32_t bytes;      // of the range; a load completes as many on the barrier
    uint32_t alignment;  // that the instruction asks of `shared`
};

/// Global to shared. Completes on `barrier` of this block or, with a mask of cluster ranks, at the same
/// addresses of each of these blocks. The destination is poison until then.
void issue_load(const char* instruction, std::unique_ptr<Copy> copy, const CopyPlace& place, uint32_t barrier,
                uint16_t blocks = 0);
/// Shared to global, in the current thread's open bulk group. The source is read at one moment, the
/// destination (poison until then, unless the copy is a reduction) written at a later one.
void issue_store(const char* instruction, std::unique_ptr<Copy> copy, const CopyPlace& place);

void bulk_commit();
/// Waits until at most `groups` of the thread's newest groups are unfinished; `reads_only`: have not read.
void bulk_wait(int groups, bool reads_only);

// wgmma.

struct SharedRange {
    uint32_t begin = 0, end = 0;  // addresses of the block; empty if equal
};

/// One warp's part of a wgmma: rows 16 (warp % 4) and the next 15 of D. Compared as bytes between lanes.
struct Wgmma {
    uint64_t a, b;     // descriptors
    uint32_t columns;  // N
    uint32_t accumulate;
    uint64_t options;  // the wrapper's own: majors, types
    /// d[16][columns] (row-major) (+)= what the descriptors name; shared[address] is the byte of that
    /// address.
    void (*compute)(const Wgmma& op, uint32_t warp_in_group, const uint8_t* shared, float* d);
    /// What compute reads, up to whole swizzle atoms.
    void (*ranges)(const Wgmma& op, uint32_t warp_in_group, SharedRange (&reads)[2]);
};
static_assert(sizeof(Wgmma) <= detail::kOperandBytes);

/// Queues it. `accumulators` are the lane's columns / 2 registers in the order of csrc/ptx/device/wgmma.cuh;
/// they are NaN until a wait covers the group. Operands are read at any time up to that.
void wgmma_issue(const Wgmma& op, float* accumulators, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(int groups, Site site);

}  // namespace mok::emu
