// The symmetric heap: one equal window of memory per rank of a group, every rank's mapped by every rank.
//
//   window:  [ fixed part: control block, then the workspace's layout | arena: tensors of `mok.symm_empty` ]
//
// Rank r's window lies r * stride into one reserved range, so peer(p, r) = p + (r - me) * stride: no pointer
// tables. With several ranks a window is a memfd (not shm_open: /dev/shm may be 64 MiB) sealed against
// resizing, so that no peer can turn accesses into SIGBUS. Its fixed part is allocated at once, the arena as
// tensors come. Descriptors are closed as soon as everything is mapped. With one rank it is plain memory.
// Closing needs no peer: what a peer has mapped stays until it closes too. Live arena tensors keep the arena
// mapped.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/symm/fd_exchange.h"
#include "csrc/symm/mapping.h"

namespace mok {

class SymmHeap {
  public:
    /// Both sizes are rounded up to pages and equal on all ranks. Throws HeapError when the memory is not
    /// there.
    SymmHeap(int rank, int num_ranks, int64_t fixed_bytes, int64_t arena_bytes);
    SymmHeap(const SymmHeap&) = delete;
    SymmHeap& operator=(const SymmHeap&) = delete;
    ~SymmHeap();

    /// What the peers need to fetch this window; empty for one rank.
    std::string address() const;
    /// Fetches and maps the peers' windows. Throws PeersNotLocal (on all ranks alike) or HeapError.
    void connect(const std::vector<std::string>& addresses, double timeout_s);

    int rank() const { return rank_; }
    int num_ranks() const { return num_ranks_; }
    int64_t fixed_bytes() const { return fixed_bytes_; }
    int64_t arena_bytes() const { return arena_bytes_; }
    int64_t stride() const { return fixed_bytes_ + arena_bytes_; }
    const char* backing() const { return num_ranks_ == 1 ? "memory" : "memfd"; }
    bool closed() const { return closed_; }
    /// False after a fork, in the child: nothing of the heap is mapped there.
    bool in_owner_process() const { return getpid() == owner_; }

    /// Throws WorkspaceClosed after close, before connect, and in a process forked from the one that owns the
    /// heap.
    char* window(int rank) const;

    /// The same place in rank r's window as p in mine. No checks: for use within a call.
    template <typename T>
    T* peer(T* p, int rank) const {
        return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) +
                                    static_cast<uintptr_t>((rank - rank_) * stride()));
    }
    /// Whether [p, p + bytes) lies in this rank's window.
    bool contains(const void* p, int64_t bytes) const;
    int64_t offset(const void* p) const { return static_cast<const char*>(p) - base_; }

    /// 256-byte aligned memory of the own window; its peers see it at the same offset. Throws HeapError when
    /// full.
    void* arena_allocate(int64_t bytes);
    void arena_free(void* block) { arena_->free(block); }
    /// Outlives the heap: what frees a tensor after close.
    std::shared_ptr<Arena> arena() const { return arena_; }

    /// Unmaps everything but the blocks of live tensors. May be called again.
    void close();

  private:
    void require_open() const;

    int rank_;
    int num_ranks_;
    int64_t fixed_bytes_;
    int64_t arena_bytes_;
    HeapAddress address_;
    UniqueFd own_;
    std::unique_ptr<FdExchange> exchange_;
    std::shared_ptr<Mapping> mapping_;
    std::shared_ptr<Arena> arena_;
    pid_t owner_;
    char* base_ = nullptr;  // the own window
    bool connected_ = false;
    bool closed_ = false;
};

}  // namespace mok
