// The machine's state: threads, warps, blocks, launches, what is in flight and who may run next.
// csrc/emu/machine.h and csrc/emu/sync.h are the interfaces.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/emu/clock.h"
#include "csrc/emu/context.h"
#include "csrc/emu/launch.h"
#include "csrc/emu/machine.h"
#include "csrc/emu/shadow.h"
#include "csrc/emu/sync.h"

namespace mok::emu {

struct LaunchState;
struct Mbarrier;
struct PendingCopy;

/// What a thread that does not run waits for.
enum class WaitKind : uint8_t {
    kNone,
    kLanes,      // the other lanes of a warp-wide instruction
    kNamed,      // a named barrier: `number` is its id
    kCluster,    // barrier.cluster.wait
    kMbarrier,   // `number` is its address, `expected` the parity
    kPoll,       // a condition on global memory
    kBulk,       // its bulk groups; `number` may be unfinished
    kBulkRead,   // the same, reads only
    kRegisters,  // setmaxnreg
    kSleep,      // nanosleep, or a poll of its own that saw nothing new
};

struct Wait {
    WaitKind kind = WaitKind::kNone;
    uint32_t number = 0;
    uint64_t expected = 0;
    uint64_t seen = 0;
    const void* flag = nullptr;
    uint64_t deadline_ns = 0;  // virtual time; 0: waits for ever
};

/// The wrapper of a bounded wait, whose own reads are other instructions.
struct WaitPlace {
    const char* instruction = nullptr;
    Site site;
};

/// A thread's bulk groups.
struct BulkGroup {
    uint32_t unread = 0, unwritten = 0;  // copies
    std::vector<AsyncRecord*> reads, writes;
};
struct BulkGroups {
    std::deque<BulkGroup> committed;
    uint64_t num_retired = 0;                                  // complete ones that have left the front
    std::vector<std::pair<uint64_t, AsyncRecord*>> unawaited;  // their writes, by group
    BulkGroup open;

    BulkGroup& at(uint64_t index) {
        const uint64_t place = index - num_retired;
        return place < committed.size() ? committed[place] : open;
    }
};

/// How many proxy fences a thread had executed when it published an epoch of its own.
struct FenceMark {
    uint32_t epoch;
    uint32_t fences[2];
};

struct Thread {
    Warp* warp = nullptr;
    uint32_t lane = 0;
    bool exited = false;
    Context context;
    Stack stack;

    const char* instruction = "start";
    Site site;
    Wait wait;
    WaitPlace wait_place;
    Wake wake = Wake::kProgress;
    uint64_t progress_seen = 0;
    uint32_t steps_in_a_row = 0;  // instructions while nothing happened
    uint64_t deposits = 0;        // warp-wide instructions it has taken part in
    uint64_t result = 0;          // of the last exchange
    bool is_polling = false;
    uint64_t poll_progress = 0;        // the machine's when the poll's test began
    std::vector<const void*> watched;  // what the poll's test has read
    std::vector<Mbarrier*> watched_barriers;

    // Order (csrc/emu/shadow.h)
    View view;
    int component = -1;  // of its own, once it synchronises alone
    uint32_t epoch = 1;
    uint32_t fences[2] = {0, 0};
    std::vector<FenceMark> fence_marks;
    View released[3];  // what fences of scope block, gpu and sys have made ready for a relaxed store
    View seen[3];      // what relaxed loads have seen of writers in the block, on this GPU, elsewhere
    const void* on_its_way = nullptr;  // stored at system scope, with no fence of that scope since

    std::unique_ptr<BulkGroups> bulk;

    uint32_t idx() const;
    Block& block() const;
};

struct Accumulators;

/// One warp-wide instruction that some lanes have reached.
struct Deposit {
    const char* instruction;
    uint32_t lanes;
    detail::Execute execute;
    Accumulators* accumulators;  // of a wgmma
    alignas(16) std::byte operands[kLanes * detail::kOperandBytes];
};

struct WarpFenceMark {
    uint32_t epoch;
    std::array<std::array<uint32_t, kLanes>, 2> fences;  // by Space
};

/// What is in flight for one accumulator array of each lane.
struct Accumulators {
    static constexpr uint32_t kMaxColumns = 256;

    alignas(64) float d[16 * kMaxColumns];  // 16 rows of `columns`
    uint32_t columns = 0;
    float* registers[kLanes] = {};
    uint32_t num_live = 0;   // lanes
    bool is_in_use = false;  // by a wgmma since they were handed over
};

struct QueuedWgmma {
    Wgmma op;
    uint64_t group;
    Accumulators* accumulators;
    bool is_done;
};

/// The wgmmas of a warpgroup that some of its warps have come to: all four execute the same.
struct WarpgroupOrder {
    struct Entry {
        Wgmma op;
        uint32_t warps;  // that have come
    };
    std::deque<Entry> entries;
    uint64_t first = 0;  // number of the front entry
};

struct WgmmaQueue {
    std::deque<QueuedWgmma> ops;
    uint64_t num_issued = 0;
    uint64_t group = 0;
    bool is_fenced = false;
    bool is_listed = false;
    std::vector<std::unique_ptr<Accumulators>> accumulators;
    int component = -1;
    uint32_t epoch = 0;
    AsyncRecord* record = nullptr;                          // of the open group
    std::deque<std::pair<uint64_t, AsyncRecord*>> records;  // of committed groups not waited for
};

struct Warp {
    Block* block = nullptr;
    uint32_t idx = 0;
    Thread* lanes = nullptr;
    uint32_t present = 0xffffffffu;  // lanes that have not exited

    uint32_t ready = 0;
    bool is_listed = false;
    uint32_t weight = 1024;  // of 1024: how often it runs when it is picked

    std::deque<Deposit> deposits;
    uint64_t num_executed = 0;
    uint32_t waiting_lanes = 0;  // in enter, for deposits
    Deposit exchange{};          // the one that waits for lanes; lanes == 0: none
    bool has_lost_last = false;

    int component = -1;
    uint32_t epoch = 1;
    std::vector<WarpFenceMark> fence_marks;

    std::unique_ptr<WgmmaQueue> wgmma;
    uint32_t registers = 0;  // per thread
    uint32_t register_lane = 0;
    static constexpr uint64_t kNoPhase = ~uint64_t{0};
    uint64_t cluster_phase = kNoPhase;  // of its last arrival
};

struct Mbarrier {
    uint32_t address = 0;
    uint32_t count = 0, pending = 0;
    int64_t bytes = 0;
    uint32_t phase = 0;
    bool is_valid = false;
    bool is_fenced = false;   // fence.mbarrier_init by its maker
    bool is_visible = false;  // a cluster barrier after that
    uint32_t loads = 0;       // in flight
    AsyncRecord* last_load = nullptr;
    uint32_t last_load_phase = 0;  // how many phases are complete once it is
    Thread* maker = nullptr;
    ThreadStamp made;
    int component = -1;
    View next[2], done[2];  // released by the block's own threads, by other blocks
    std::vector<Thread*> waiters;
};

struct NamedBarrier {
    uint32_t arrived = 0;   // threads
    uint32_t expected = 0;  // 0: nobody is here
    bool any = false;       // bar.red.or
    View view;
    std::vector<Warp*> waiters;
};

struct ClusterBarrier {
    uint32_t arrived = 0;  // threads
    uint64_t phase = 0;
    View next, done;
    std::vector<Warp*> waiters;
};

/// The blocks of one cluster, which start together.
struct Cluster {
    std::vector<Block*> blocks;
    ClusterBarrier barrier;
    uint32_t threads = 0;
};

struct RemoteUse {
    Thread* thread;
    ThreadStamp stamp;
    const char* instruction;
    Site site;
};

struct Block {
    LaunchState* launch = nullptr;
    uint32_t idx = 0;
    uint32_t rank_in_cluster = 0;
    Cluster* cluster = nullptr;
    std::unique_ptr<Thread[]> threads;
    std::unique_ptr<Warp[]> warps;
    uint32_t num_threads = 0, num_warps = 0, num_exited = 0;
    bool has_exited = false;
    uint8_t* shared = nullptr;  // shared[address]
    Shadow shadow{*this};
    std::vector<int16_t> mbarrier_of;  // per 8 bytes; -1: none
    std::deque<Mbarrier> mbarriers;
    std::array<NamedBarrier, 16> named;
    std::array<WarpgroupOrder, 8> warpgroups;
    uint32_t free_registers = 0;
    std::vector<Warp*> register_waiters;
    std::unordered_map<Thread*, RemoteUse> remote_uses;  // by threads of other blocks
    View end;                                            // joined by threads as they exit

    uint32_t shared_end() const;
};

enum class LaunchPhase : uint8_t { kWaiting, kRunning, kEnded, kTrapped };

struct LaunchState {
    const Launch* launch = nullptr;
    LaunchPhase phase = LaunchPhase::kWaiting;
    uint32_t next_cluster = 0, resident = 0, most_resident = 0, num_exited = 0;
    uint32_t copies = 0;  // in flight
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Cluster>> clusters;
    int component = -1;
    View begin, end;
};

/// The launches of one rank.
struct Stream {
    int rank = 0;
    std::vector<LaunchState*> launches;
    size_t next = 0;
    uint64_t start_step = 0;
    bool starts_last = false;
    bool has_started = false, is_stopped = false;
};

struct RegionState {
    Region region;
    uint8_t* begin;
    uint8_t* end;
    Shadow shadow{*this};
    int start_component = -1;      // inputs: known by whoever comes after the launch's begin
    std::vector<uint8_t> initial;  // inputs: what the host has put there
    std::vector<uint8_t> final;    // outputs: what the host finds there
};

/// What a flag's newest value carries to those who acquire it.
struct Released {
    const Block* block;  // of the writer
    Scope scope;
    View view;
};
struct FlagState {
    std::vector<Released> released;
};

/// How a schedule behaves, in parts of 1024 where not said otherwise.
struct Character {
    uint32_t copy_chance = 0;   // that a copy moves before a thread does
    uint32_t stay_chance = 0;   // that the same warp runs on
    uint32_t yield_chance = 0;  // at an instruction
    uint32_t hold_chance = 0;   // that a copy waits until nothing else can move
    bool random_lanes = false;
};

struct Machine {
    Machine();
    ~Machine();

    RunOptions options;
    RunResult result;
    bool has_failed = false;
    std::vector<std::unique_ptr<RegionState>> regions;  // by address
    std::vector<std::unique_ptr<LaunchState>> launches;
    std::vector<Stream> streams;
    size_t num_waiting_streams = 0;

    Context main;
    Thread* current = nullptr;
    uint64_t random = 1;
    Character character;
    std::vector<Warp*> ready;
    Warp* last = nullptr;
    std::vector<Thread*> idle;  // in waits that an idle machine looks at again
    std::vector<std::pair<const void*, Thread*>> watchers;
    std::vector<std::unique_ptr<PendingCopy>> copies;  // the first num_active may complete at any time
    size_t num_active = 0;
    std::vector<Warp*> multiplying;
    std::vector<Block*> to_reap;
    uint64_t alive = 0;  // threads
    uint64_t progress = 0, idle_progress = ~uint64_t{0};
    uint32_t idle_rounds = 0;
    uint64_t jumped_ns = 0;
    bool has_ended_rank = false;
    uint64_t ended_progress = 0;
    uint32_t ended_looks = 0;  // at the ended rank's word, since that progress

    uint32_t num_components = 0;
    std::deque<AsyncRecord> records;
    std::unordered_map<const void*, FlagState> flags;
    RegionState* last_region = nullptr;
    std::unordered_map<const void*, CallSite> sites;
};

extern Machine* machine;

inline uint32_t Thread::idx() const {
    return warp->idx * kLanes + lane;
}
inline Block& Thread::block() const {
    return *warp->block;
}
inline uint32_t Block::shared_end() const {
    return kDynamicShared + launch->launch->shared_bytes;
}
inline int rank_of(const Thread& thread) {
    return thread.block().launch->launch->rank;
}

}  // namespace mok::emu
