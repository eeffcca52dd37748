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

void check_sizes(int num_ranks, int64_t fixed_bytes, int64_t arena_bytes) {
    MOK_CHECK(num_ranks >= 1 && num_ranks <= kMaxGroupRanks, "num_ranks is ", num_ranks,
              ", but a group has 1 to ", kMaxGroupRanks, " ranks.");
    MOK_CHECK(fixed_bytes >= 1 && fixed_bytes <= kLargestPart, "fixed_bytes is ", fixed_bytes,
              ", but must be in [1, ", kLargestPart, "]; lower max_tokens.");
    MOK_CHECK(arena_bytes >= 0 && arena_bytes <= kLargestPart, "arena_bytes is ", arena_bytes,
              ", but must be in [0, ", kLargestPart, "].");
}

std::string name_peer(const HeapAddress& address) {
    return concat("rank ", address.rank, " (process ", address.pid,
                  address.is_device() ? ", " + address.device.gpu : std::string(), ")");
}

}  // namespace

SymmHeap::SymmHeap(int rank, int num_ranks, int64_t fixed_bytes, int64_t arena_bytes, int device)
    : rank_(rank),
      num_ranks_(num_ranks),
      fixed_bytes_(fixed_bytes),
      arena_bytes_(arena_bytes),
      device_(device),
      owner_(getpid()) {
    check_sizes(num_ranks, fixed_bytes, arena_bytes);
    MOK_CHECK(rank >= 0 && rank < num_ranks, "rank is ", rank, ", but must be in [0, ", num_ranks, ").");
    fixed_bytes_ = round_up(fixed_bytes, page_bytes());
    arena_bytes_ = round_up(arena_bytes, page_bytes());
    if (device == kHostDevice) {
        open_host();
    } else {
        open_device();
    }
    arena_ = std::make_shared<Arena>(mapping_, base_ + fixed_bytes_, arena_bytes_);
}

SymmHeap::SymmHeap(int rank, int num_ranks, int64_t fixed_bytes, std::shared_ptr<DeviceMapping> mapping)
    : rank_(rank),
      num_ranks_(num_ranks),
      fixed_bytes_(fixed_bytes),
      arena_bytes_(mapping->stride() - fixed_bytes),
      device_(mapping->device()),
      mapping_(mapping),
      device_mapping_(mapping),
      owner_(getpid()),
      base_(mapping->window(rank)),
      connected_(true) {
    arena_ = std::make_shared<Arena>(mapping_, base_ + fixed_bytes_, arena_bytes_);
}

std::vector<std::shared_ptr<SymmHeap>> SymmHeap::create_virtual(int num_ranks, int64_t fixed_bytes,
                                                                int64_t arena_bytes, int device) {
    check_sizes(num_ranks, fixed_bytes, arena_bytes);
    fixed_bytes = round_up(fixed_bytes, page_bytes());
    const std::shared_ptr<DeviceMapping> mapping =
        create_device_mapping(device, kAllRanks, num_ranks, fixed_bytes + arena_bytes, fixed_bytes);
    std::vector<std::shared_ptr<SymmHeap>> heaps;
    for (int rank = 0; rank < num_ranks; ++rank) {
        heaps.emplace_back(new SymmHeap(rank, num_ranks, fixed_bytes, mapping));
    }
    return heaps;
}

void SymmHeap::open_host() {
    if (fixed_bytes_ > read_memory_limits().hard_limit())
        throw_no_memory(rank_, fixed_bytes_, "it can never get them");
    const auto mapping = std::make_shared<HostMapping>(stride(), num_ranks_);
    mapping_ = mapping;
    base_ = mapping->window(rank_);
    if (num_ranks_ == 1) {
        mapping->map_private(0);
        connected_ = true;
        return;
    }
    backing_ = "memfd";
    own_ = create_memfd(rank_, stride());
    allocate_fixed_part(rank_, own_.get(), fixed_bytes_);
    mapping->map_shared(rank_, own_.get());
    address_ = local_address(rank_, num_ranks_, fixed_bytes_, arena_bytes_);
    exchange_ = std::make_unique<FdExchange>(address_);
}

void SymmHeap::open_device() {
    device_mapping_ = create_device_mapping(device_, rank_, num_ranks_, stride(), fixed_bytes_);
    mapping_ = device_mapping_;
    arena_bytes_ = mapping_->stride() - fixed_bytes_;
    base_ = mapping_->window(rank_);
    if (num_ranks_ == 1) {
        connected_ = true;
        return;
    }
    address_ = local_address(rank_, num_ranks_, fixed_bytes_, arena_bytes_);
    address_.device = device_mapping_->offer();
    if (address_.device.has_fd) own_ = device_mapping_->export_fd();
    exchange_ = std::make_unique<FdExchange>(address_);
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
    const GroupAddresses group = parse_group(addresses, address_);
    std::vector<UniqueFd> descriptors(static_cast<size_t>(num_ranks_));
    if (group.passing == Passing::kDescriptors) {
        descriptors = exchange->exchange(own_.get(), group.ranks, timeout_s);
    }
    for (const HeapAddress& peer : group.ranks) {
        const int r = peer.rank;
        UniqueFd& descriptor = descriptors[static_cast<size_t>(r)];
        if (r == rank_) continue;
        if (group.passing == Passing::kFabric) {
            device_mapping_->map_fabric(r, peer.device.fabric, name_peer(peer));
        } else if (device_mapping_) {
            device_mapping_->map_fd(r, std::move(descriptor), name_peer(peer));
        } else {
            check_received(descriptor.get(), r, stride());
            static_cast<HostMapping&>(*mapping_).map_shared(r, descriptor.get());
        }
    }
    if (device_mapping_) {
        device_mapping_->finish();
        backing_ = device_mapping_->backing();
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

char* SymmHeap::range(int rank, int64_t offset, int64_t bytes) const {
    MOK_CHECK(offset >= 0 && bytes >= 0 && bytes <= stride() && offset <= stride() - bytes, "[", offset, ", ",
              offset + bytes, ") is not within a window of ", stride(), " bytes.");
    return window(rank) + offset;
}

void SymmHeap::write(int rank, int64_t offset, const void* from, int64_t bytes) {
    mapping_->copy_in(range(rank, offset, bytes), from, bytes);
}

void SymmHeap::read(int rank, int64_t offset, void* to, int64_t bytes) const {
    mapping_->copy_out(to, range(rank, offset, bytes), bytes);
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
    device_mapping_.reset();
}

}  // namespace mok
