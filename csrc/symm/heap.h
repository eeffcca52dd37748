// The symmetric heap: one equal window of memory per rank of a group, every rank's mapped by every rank.
//
//   window:  [ fixed part: control block, then the workspace's layout | arena: tensors of `mok.symm_empty` ]
//
// Rank r's window lies r * stride into one reserved range, so peer(p, r) = p + (r - me) * stride: no pointer
// tables. With several ranks a window is a memfd (not shm_open: /dev/shm may be 64 MiB) sealed against
// resizing, so that no peer can turn accesses into SIGBUS. Its fixed part is allocated at once, the arena as
// tensors come. Descriptors are closed as soon as everything is mapped. With one rank it is plain memory. On
// a GPU a window is CUDA's virtual memory, all of it allocated at once (csrc/symm/device_mapping.h). Closing
// needs no peer: what a peer has mapped stays until it closes too. Live arena tensors keep the arena mapped.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/symm/device_mapping.h"
#include "csrc/symm/fd_exchange.h"
#include "csrc/symm/mapping.h"

namespace mok {

/// For SymmHeap's device: host memory.
inline constexpr int kHostDevice = -1;

class SymmHeap {
  public:
    /// Both sizes are rounded up to pages and equal on all ranks; `device` is a CUDA device or kHostDevice.
    /// Throws HeapError when the memory is not there.
    SymmHeap(int rank, int num_ranks, int64_t fixed_bytes, int64_t arena_bytes, int device = kHostDevice);
    SymmHeap(const SymmHeap&) = delete;
    SymmHeap& operator=(const SymmHeap&) = delete;
    ~SymmHeap();

    /// The heaps of num_ranks ranks that this process plays itself on one GPU, connected.
    static std::vector<std::shared_ptr<SymmHeap>> create_virtual(int num_ranks, int64_t fixed_bytes,
                                                                 int64_t arena_bytes, int device);

    /// What the peers need to fetch this window; empty for one rank.
    std::string address() const;
    /// Fetches and maps the peers' windows. Throws PeersNotLocal (on all ranks alike) or HeapError.
    void connect(const std::vector<std::string>& addresses, double timeout_s);

    int rank() const { return rank_; }
    int num_ranks() const { return num_ranks_; }
    int64_t fixed_bytes() const { return fixed_bytes_; }
    int64_t arena_bytes() const { return arena_bytes_; }
    int64_t stride() const { return fixed_bytes_ + arena_bytes_; }
    /// "memory" for one rank; "memfd", "posix_fd" or "fabric".
    const char* backing() const { return backing_; }
    /// The CUDA device of the windows, or kHostDevice.
    int device() const { return device_; }
    /// Null on the CPU and after close.
    DeviceMapping* device_mapping() const { return device_mapping_.get(); }
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

    /// Copies between host memory and [offset, offset + bytes) of a rank's window.
    void write(int rank, int64_t offset, const void* from, int64_t bytes);
    void read(int rank, int64_t offset, void* to, int64_t bytes) const;

    /// 256-byte aligned memory of the own window; its peers see it at the same offset. Throws HeapError when
    /// full.
    void* arena_allocate(int64_t bytes);
    /// Outlives the heap: what frees a tensor after close.
    std::shared_ptr<Arena> arena() const { return arena_; }

    /// Unmaps everything but the blocks of live tensors. May be called again.
    void close();

  private:
    SymmHeap(int rank, int num_ranks, int64_t fixed_bytes, std::shared_ptr<DeviceMapping> mapping);

    void require_open() const;
    void open_host();
    void open_device();
    char* range(int rank, int64_t offset, int64_t bytes) const;

    int rank_;
    int num_ranks_;
    int64_t fixed_bytes_;
    int64_t arena_bytes_;
    int device_;
    HeapAddress address_;
    UniqueFd own_;
    std::unique_ptr<FdExchange> exchange_;
    std::shared_ptr<Mapping> mapping_;
    std::shared_ptr<DeviceMapping> device_mapping_;  // the same, if on a GPU
    std::shared_ptr<Arena> arena_;
    const char* backing_ = "memory";
    pid_t owner_;
    char* base_ = nullptr;  // the own window
    bool connected_ = false;
    bool closed_ = false;
};

}  // namespace mok
