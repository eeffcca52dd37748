#include "csrc/symm/heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "csrc/comm/errors.h"
#include "csrc/layout/check.h"
#include "csrc/layout/control_block.h"
#include "csrc/symm/memory_limits.h"

namespace mok {
namespace {

// Linux 6.3: systems with vm.memfd_noexec=2 insist on it, older kernels refuse it.
constexpr unsigned kMfdNoexecSeal = 0x0008u;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int64_t kLargestPart = int64_t{1} << 46;

[[noreturn]] void throw_no_memory(int rank, int64_t bytes, const std::string& why) {
    throw HeapError(concat("rank ", rank, " wants ", bytes, " bytes for the fixed part of its window, but ",
                           why, " (", read_memory_limits().text(),
                           "); lower max_tokens, use fewer ranks per machine, or give it more memory."));
}

UniqueFd create_memfd(int rank, int64_t bytes) {
    const std::string name = concat("mok-rank", rank);
    int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | kMfdNoexecSeal);
    if (fd < 0 && errno == EINVAL) fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    UniqueFd memory(fd);
    if (!memory || ftruncate(fd, bytes) != 0 || fcntl(fd, F_ADD_SEALS, kSeals) != 0) {
        throw HeapError(
            concat("rank ", rank, " cannot create a memory file of ", bytes, " bytes: ", strerror(errno),
                   "; raise the limits (ulimit -n, ulimit -f) or use backend=\"collective\" if this "
                   "system forbids memfd_create."));
    }
    return memory;
}

void allocate_fixed_part(int rank, int fd, int64_t bytes) {
    int error = EINTR;
    while (error == EINTR) error = posix_fallocate(fd, 0, bytes);
    if (error != 0) throw_no_memory(rank, bytes, strerror(error));
}

/// A peer must not be able to shrink what we map.
void check_received(int fd, int peer, int64_t bytes) {
    struct stat status {};
    const int seals = fcntl(fd, F_GET_SEALS);
    if (fstat(fd, &status) != 0 || status.st_size != bytes || seals < 0 || (seals & kSeals) != kSeals) {
        throw HeapError(concat("rank ", peer, " sent a descriptor that is no sealed window of ", bytes,
                               " bytes; install the same mok on all ranks."));
    }
}

}  // namespace

SymmHeap::SymmHeap(int rank, int num_ranks, int64_t fixed_bytes, int64_t arena_bytes)
    : rank_(rank),
      num_ranks_(num_ranks),
      fixed_bytes_(fixed_bytes),
      arena_bytes_(arena_bytes),
      owner_(getpid()) {
    MOK_CHECK(num_ranks >= 1 && num_ranks <= kMaxGroupRanks, "num_ranks is ", num_ranks,
              ", but a group has 1 to ", kMaxGroupRanks, " ranks.");
    MOK_CHECK(rank >= 0 && rank < num_ranks, "rank is ", rank, ", but must be in [0, ", num_ranks, ").");
    MOK_CHECK(fixed_bytes >= 1 && fixed_bytes <= kLargestPart, "fixed_bytes is ", fixed_bytes,
              ", but must be in [1, ", kLargestPart, "]; lower max_tokens.");
    MOK_CHECK(arena_bytes >= 0 && arena_bytes <= kLargestPart, "arena_bytes is ", arena_bytes,
              ", but must be in [0, ", kLargestPart, "].");
    fixed_bytes_ = round_up(fixed_bytes, page_bytes());
    arena_bytes_ = round_up(arena_bytes, page_bytes());
    if (fixed_bytes_ > read_memory_limits().hard_limit())
        throw_no_memory(rank, fixed_bytes_, "it can never get them");
    mapping_ = std::make_shared<Mapping>(stride(), num_ranks);
    base_ = mapping_->window(rank);
    if (num_ranks == 1) {
        mapping_->map_private(0);
        connected_ = true;
    } else {
        own_ = create_memfd(rank, stride());
        allocate_fixed_part(rank, own_.get(), fixed_bytes_);
        mapping_->map_shared(rank, own_.get());
        address_ = local_address(rank, num_ranks, fixed_bytes_, arena_bytes_);
        exchange_ = std::make_unique<FdExchange>(address_);
    }
    arena_ = std::make_shared<Arena>(mapping_, base_ + fixed_bytes_, arena_bytes_);
}

SymmHeap::~SymmHeap() {
    close();
}

std::string SymmHeap::address() const {
    return num_ranks_ == 1 ? "" : address_.text();
}

void SymmHeap::connect(const std::vector<std::string>& addresses, double timeout_s) {
    if (closed_) throw WorkspaceClosed("connect was used after close; create a new heap.");
    if (connected_) return;
    // Whatever happens, the listener goes: peers that come after a failure learn of it at once.
    const std::unique_ptr<FdExchange> exchange = std::move(exchange_);
    if (exchange == nullptr) throw HeapError("connect failed before; create a new heap.");
    const std::vector<HeapAddress> peers = parse_group(addresses, address_);
    std::vector<UniqueFd> descriptors = exchange->exchange(own_.get(), peers, timeout_s);
    for (int r = 0; r < num_ranks_; ++r) {
        if (r == rank_) continue;
        check_received(descriptors[static_cast<size_t>(r)].get(), r, stride());
        mapping_->map_shared(r, descriptors[static_cast<size_t>(r)].get());
    }
    own_.reset();
    connected_ = true;
}

void SymmHeap::require_open() const {
    if (closed_) throw WorkspaceClosed("the symmetric heap was used after close; create a new workspace.");
    if (!in_owner_process()) {
        throw WorkspaceClosed(
            "a forked process cannot use its parent's symmetric heap; create a workspace of its own.");
    }
}

char* SymmHeap::window(int rank) const {
    require_open();
    MOK_CHECK(rank >= 0 && rank < num_ranks_, "rank is ", rank, ", but must be in [0, ", num_ranks_, ").");
    if (!connected_ && rank != rank_) throw HeapError(concat("window(", rank, ") was used before connect."));
    return mapping_->window(rank);
}

bool SymmHeap::contains(const void* p, int64_t bytes) const {
    const auto address = reinterpret_cast<uintptr_t>(p);
    const auto begin = reinterpret_cast<uintptr_t>(base_);
    return !closed_ && bytes >= 0 && bytes <= stride() && address >= begin &&
           address - begin <= static_cast<uintptr_t>(stride() - bytes);
}

void* SymmHeap::arena_allocate(int64_t bytes) {
    require_open();
    return arena_->allocate(bytes);
}

void SymmHeap::close() {
    if (closed_) return;
    closed_ = true;
    exchange_.reset();
    own_.reset();
    arena_->retire();
    mapping_.reset();
}

}  // namespace mok
