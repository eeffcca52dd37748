// One reserved range of address space holding the windows of all ranks, and the arena inside the own window.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace mok {

int64_t page_bytes();

/// A range of equal windows. Its memory lives as long as the object, except in a process forked from the one
/// that made it: there nothing was inherited, and the addresses may belong to something else.
class Mapping {
  public:
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    virtual ~Mapping() = default;

    char* window(int rank) const { return base_ + rank * stride_; }
    int64_t stride() const { return stride_; }
    /// True in the process that created it.
    bool is_ours() const;

    /// Sees to it that the range has memory; throws HeapError if there is none.
    virtual void take_memory(char* begin, int64_t bytes) = 0;
    /// What [begin, begin + bytes) holds is not needed any more.
    virtual void give_memory_back(char* begin, int64_t bytes) = 0;
    /// Only [begin, begin + bytes), of the own window, is still used.
    virtual void keep_only(char* begin, int64_t bytes) = 0;
    /// Copies between host memory and any window; visible to the peers on return.
    virtual void copy_in(char* to, const void* from, int64_t bytes) = 0;
    virtual void copy_out(void* to, const char* from, int64_t bytes) = 0;

  protected:
    Mapping(int64_t stride, int num_windows);

    int64_t stride_;
    int num_windows_;
    char* base_ = nullptr;

  private:
    pid_t owner_;
};

/// Windows of host memory: mapped files that peers map too, or private memory of one rank.
class HostMapping final : public Mapping {
  public:
    HostMapping(int64_t stride, int num_windows);
    ~HostMapping() override;

    void map_shared(int window, int fd);
    void map_private(int window);

    void take_memory(char* begin, int64_t bytes) override;
    void give_memory_back(char* begin, int64_t bytes) override;
    void keep_only(char* begin, int64_t bytes) override;
    void copy_in(char* to, const void* from, int64_t bytes) override;
    void copy_out(void* to, const char* from, int64_t bytes) override;

  private:
    bool is_shared_ = false;
};

/// Blocks of the own window beyond the fixed part, for tensors: first fit, 256-byte aligned. Pages are taken
/// from the system when a block is allocated (an error then, not a SIGBUS later) and go back when it is
/// freed.
class Arena {
  public:
    Arena(std::shared_ptr<Mapping> mapping, char* begin, int64_t bytes);

    /// Throws HeapError when no gap is large enough or the system has no memory.
    void* allocate(int64_t bytes);
    /// Does nothing in a forked process. Throws std::invalid_argument for a pointer that is not a live block.
    void free(void* block);
    int64_t bytes_in_use();
    /// No further blocks; unmaps all but the arena, and that too once no block lives.
    void retire();

  private:
    void give_back(int64_t offset, int64_t bytes);

    std::mutex mutex_;
    std::shared_ptr<Mapping> mapping_;  // null once retired and empty
    char* begin_;
    int64_t bytes_;
    int64_t in_use_ = 0;
    bool retired_ = false;
    std::map<int64_t, int64_t> free_;  // offset -> bytes, neighbours merged
    std::map<int64_t, int64_t> live_;
};

}  // namespace mok
