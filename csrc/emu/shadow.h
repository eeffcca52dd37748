// What is known about who touched which bytes last, and whether a new access comes after it.
//
// An access is ordered behind an older one if the thread's view contains the older one's stamp. A thread's
// stamp is its warp's epoch (known to whoever comes after a later barrier of the whole warp) and its own
// (known to whoever acquires what the thread released alone). An asynchronous operation's record gets its
// stamp when somebody's wait learns that it is complete: until then nothing is ordered behind it.
//
// Between ordinary and asynchronous accesses to the same bytes a proxy fence must lie on the way: by the
// thread of the ordinary access after it (counted in the stamp), or by any thread that already comes after
// that access.
#pragma once

#include <vector>

#include "csrc/emu/clock.h"
#include "csrc/emu/machine.h"

namespace mok::emu {

struct RegionState;

struct ThreadStamp {
    Warp* warp = nullptr;
    uint32_t lanes = 0;
    uint32_t warp_epoch = 0;
    uint32_t thread_epoch = 0;  // 1 where more than one lane is meant: none of them had synchronised alone
    uint32_t fences = 0;        // proxy fences of the space before the access
};

/// One asynchronous operation, or all wgmmas of one group of a warp.
struct AsyncRecord {
    static constexpr uint32_t kOpen = ~0u;

    int component = -1;
    uint32_t epoch = kOpen;  // of the wait that learnt of its completion
    Thread* issuer = nullptr;
    const char* instruction = "";
    Site site;
    bool is_done = false;  // it has happened, whether or not anybody knows
    bool is_reduction = false;
};

/// One access to a run of bytes of a page.
struct ShadowNode {
    ShadowNode* next;
    AsyncRecord* record;  // nullptr: the stamp's thread, by an ordinary access
    ThreadStamp stamp;
    const char* instruction;
    Site site;
    uint16_t begin, end;
    Access access;
};

struct ShadowPage {
    static constexpr uint32_t kBytes = 1024, kCellBytes = 16, kCells = kBytes / kCellBytes;

    ShadowNode* ranges = nullptr;  // accesses of more than one cell
    ShadowNode* cells[kCells] = {};
    uint32_t num_in_cells = 0;
};

/// The shared memory of one block or a region of global memory.
class Shadow {
  public:
    explicit Shadow(const Block& block) : space(Space::kShared), block(&block) {}
    explicit Shadow(const RegionState& region) : space(Space::kGlobal), region(&region) {}
    void resize(uint64_t bytes) {
        pages_.assign((bytes + ShadowPage::kBytes - 1) / ShadowPage::kBytes, nullptr);
    }

    /// An access of up to 16 bytes, aligned to its size, by one lane.
    void access(Thread& thread, uint64_t begin, uint32_t bytes, Access access);
    /// Of an operation that `thread` issues: a source or destination, recorded under `record`.
    void access_async(Thread& thread, uint64_t begin, uint64_t end, Access access, AsyncRecord& record);
    /// An operand of a wgmma, which all lanes of its warp issue.
    void access_wgmma(Warp& warp, uint64_t begin, uint64_t end, AsyncRecord& record);
    /// A write that `view` does not come after; nullptr if there is none.
    const ShadowNode* unknown_write(const View& view, uint64_t* at) const;

    const Space space;
    const Block* const block = nullptr;
    const RegionState* const region = nullptr;

  private:
    ShadowPage& page(uint64_t index);

    std::vector<ShadowPage*> pages_;
};

/// Whether a view comes after a stamp or record.
bool is_known(const ThreadStamp& stamp, const View& view, bool reads_suffice);
bool is_known(const AsyncRecord& record, const View& view, bool reads_suffice);
/// Whether a thread does; it also comes after what it did itself.
bool is_known(const ThreadStamp& stamp, const Thread& thread, bool reads_suffice);
bool is_known(const AsyncRecord& record, const Thread& thread, bool reads_suffice);
/// Whether a proxy fence lies between a known access and the thread.
bool is_fenced(const ThreadStamp& stamp, const Thread& thread, Space space);
bool is_fenced(const AsyncRecord& record, const Thread& thread, Space space);

ThreadStamp stamp_of(Thread& thread, Space space);

// What synchronisation does to views.

uint32_t new_component();
/// The thread hands on all it knows and did.
void release(Thread& thread, View& to);
/// The same as a reader only: what it read may be overwritten.
void release_reads(Thread& thread, View& to);
void acquire(Thread& thread, const View& from);
/// A whole warp (its present lanes) hands on, or comes after, `view`.
void release(Warp& warp, View& to);
void acquire(Warp& warp, const View& from);
AsyncRecord& new_record(Thread& issuer, int component);
/// The thread's own component.
uint32_t component_of(Thread& thread);

/// Between runs: all pages and nodes are free again.
void reset_shadows();

}  // namespace mok::emu
