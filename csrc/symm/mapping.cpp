#include "csrc/symm/mapping.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "csrc/comm/errors.h"
#include "csrc/layout/check.h"

namespace mok {
namespace {

constexpr int64_t kAlignment = 256;  // TMA and cache lines
// Linux 5.14; the C library's headers may be older.
constexpr int kMadvPopulateWrite = 23;

void* map_or_throw(void* where, int64_t bytes, int protection, int flags, int fd, const char* what) {
    void* mapped = mmap(where, static_cast<size_t>(bytes), protection, flags, fd, 0);
    if (mapped == MAP_FAILED) {
        throw HeapError(
            concat("cannot map ", bytes, " bytes for ", what, ": ", strerror(errno),
                   "; lower max_tokens or MOK_ARENA_BYTES, or raise the limit of address space (ulimit "
                   "-v)."));
    }
    return mapped;
}

}  // namespace

int64_t page_bytes() {
    static const int64_t bytes = sysconf(_SC_PAGESIZE);
    return bytes;
}

Mapping::Mapping(int64_t stride, int num_windows)
    : stride_(stride), num_windows_(num_windows), owner_(getpid()) {
    MOK_CHECK(stride <= (int64_t{1} << 46) / num_windows, "a window of ", stride, " bytes for each of ",
              num_windows, " ranks does not fit the address space; lower max_tokens or MOK_ARENA_BYTES.");
}

bool Mapping::is_ours() const {
    return getpid() == owner_;
}

HostMapping::HostMapping(int64_t stride, int num_windows) : Mapping(stride, num_windows) {
    base_ = static_cast<char*>(map_or_throw(nullptr, stride * num_windows, PROT_NONE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, "the windows"));
}

HostMapping::~HostMapping() {
    if (is_ours()) munmap(base_, static_cast<size_t>(stride_ * num_windows_));
}

void HostMapping::map_shared(int window, int fd) {
    map_or_throw(base_ + window * stride_, stride_, PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, "a window");
    // A forked data loader would otherwise keep the memory alive, and could write to it.
    madvise(base_ + window * stride_, static_cast<size_t>(stride_), MADV_DONTFORK);
    is_shared_ = true;
}

void HostMapping::map_private(int window) {
    map_or_throw(base_ + window * stride_, stride_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, "a window");
}

void HostMapping::keep_only(char* begin, int64_t bytes) {
    if (!is_ours()) return;
    const auto drop = [](char* from, char* to) {
        if (to > from) {
            mmap(from, static_cast<size_t>(to - from), PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        }
    };
    drop(base_, begin);
    drop(begin + bytes, base_ + stride_ * num_windows_);
}

void HostMapping::take_memory(char* begin, int64_t bytes) {
    if (!is_shared_) return;
    char* first_page = begin - reinterpret_cast<uintptr_t>(begin) % static_cast<uintptr_t>(page_bytes());
    const auto length = static_cast<size_t>(begin + bytes - first_page);
    if (madvise(first_page, length, kMadvPopulateWrite) != 0 && errno != EINVAL) {
        throw HeapError(concat("the system has no memory for ", bytes, " bytes in the arena: ",
                               strerror(errno), "; free memory or raise the container's limit."));
    }
}

void HostMapping::give_memory_back(char* begin, int64_t bytes) {
    madvise(begin, static_cast<size_t>(bytes), is_shared_ ? MADV_REMOVE : MADV_DONTNEED);
}

void HostMapping::copy_in(char* to, const void* from, int64_t bytes) {
    memcpy(to, from, static_cast<size_t>(bytes));
}

void HostMapping::copy_out(void* to, const char* from, int64_t bytes) {
    memcpy(to, from, static_cast<size_t>(bytes));
}

Arena::Arena(std::shared_ptr<Mapping> mapping, char* begin, int64_t bytes)
    : mapping_(std::move(mapping)), begin_(begin), bytes_(bytes) {
    if (bytes > 0) free_[0] = bytes;
}

void* Arena::allocate(int64_t bytes) {
    MOK_CHECK(bytes >= 0, "bytes is ", bytes, ", but must not be negative.");
    const std::lock_guard lock(mutex_);
    if (retired_) throw WorkspaceClosed("a tensor was asked of a closed workspace; create a new one.");
    if (!mapping_->is_ours()) {
        throw WorkspaceClosed("a forked process cannot allocate in its parent's workspace; create its own.");
    }
    bytes = std::max(bytes, int64_t{1});
    if (bytes <= bytes_) bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const auto gap =
        std::find_if(free_.begin(), free_.end(), [&](const auto& g) { return g.second >= bytes; });
    if (gap == free_.end()) {
        int64_t largest = 0;
        for (const auto& [offset, size] : free_) largest = std::max(largest, size);
        throw HeapError(concat("no room for ", bytes, " bytes in this rank's arena (", in_use_, " of ",
                               bytes_, " bytes in use, the largest gap has ", largest,
                               "); free tensors or raise arena_bytes (MOK_ARENA_BYTES)."));
    }
    const auto [offset, size] = *gap;
    char* block = begin_ + offset;
    try {
        mapping_->take_memory(block, bytes);
    } catch (const HeapError&) {
        give_back(offset, bytes);
        throw;
    }
    free_.erase(gap);
    if (size > bytes) free_[offset + bytes] = size - bytes;
    live_[offset] = bytes;
    in_use_ += bytes;
    return block;
}

void Arena::free(void* block) {
    std::shared_ptr<Mapping> last_use;
    const std::lock_guard lock(mutex_);
    if (mapping_ == nullptr || !mapping_->is_ours()) return;
    const auto live = live_.find(static_cast<char*>(block) - begin_);
    MOK_CHECK(live != live_.end(), "the pointer is not a live block of this arena.");
    auto [offset, bytes] = *live;
    in_use_ -= bytes;
    live_.erase(live);
    auto next = free_.lower_bound(offset);
    int64_t begin = offset, end = offset + bytes;
    if (next != free_.end() && next->first == end) {
        end += next->second;
        next = free_.erase(next);
    }
    if (next != free_.begin()) {
        const auto previous = std::prev(next);
        if (previous->first + previous->second == begin) {
            begin = previous->first;
            free_.erase(previous);
        }
    }
    free_[begin] = end - begin;
    give_back(offset, bytes);
    if (retired_ && live_.empty()) last_use = std::move(mapping_);
}

void Arena::give_back(int64_t offset, int64_t bytes) {
    // Whole pages only; a page at either end goes too if its other blocks are free.
    const int64_t page = page_bytes();
    const auto gap = std::prev(free_.upper_bound(offset));
    const int64_t first = std::max(gap->first + page - 1, offset) / page * page;
    const int64_t last =
        std::min(gap->first + gap->second, (offset + bytes + page - 1) / page * page) / page * page;
    if (last > first) {
        mapping_->give_memory_back(begin_ + first, last - first);
    }
}

int64_t Arena::bytes_in_use() {
    const std::lock_guard lock(mutex_);
    return in_use_;
}

void Arena::retire() {
    std::shared_ptr<Mapping> last_use;
    const std::lock_guard lock(mutex_);
    if (retired_) return;
    retired_ = true;
    if (live_.empty()) {
        last_use = std::move(mapping_);
    } else {
        mapping_->keep_only(begin_, bytes_);
    }
}

}  // namespace mok
