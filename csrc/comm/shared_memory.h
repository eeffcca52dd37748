// Words shared between processes: plain integers in a mapped window, every access atomic with its order in
// the name. The futexes are shared ones (no FUTEX_PRIVATE_FLAG): the waker is another process.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include "csrc/layout/control_block.h"

namespace mok::shared {

template <typename T>
T load_relaxed(const T& word) {
    return __atomic_load_n(&word, __ATOMIC_RELAXED);
}

template <typename T>
T load_acquire(const T& word) {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

template <typename T>
T load_ordered(const T& word) {
    return __atomic_load_n(&word, __ATOMIC_SEQ_CST);
}

template <typename T>
void store_relaxed(T& word, T value) {
    __atomic_store_n(&word, value, __ATOMIC_RELAXED);
}

template <typename T>
void store_release(T& word, T value) {
    __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

template <typename T>
void store_ordered(T& word, T value) {
    __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
}

inline void futex_wake_all(uint32_t& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

/// Sleeps while word == seen, at most `seconds`; returns early for any reason.
inline void futex_wait(uint32_t& word, uint32_t seen, double seconds) {
    seconds = std::max(seconds, 1e-6);
    timespec limit;
    limit.tv_sec = static_cast<time_t>(seconds);
    limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

/// Announces what was written to `head`'s block. A waiter first sets `sleeping`, then reads the doorbell,
/// then looks at the block: in the single order of these four accesses either its read follows our increment
/// (it sees what we wrote), or our look at `sleeping` follows its store (we wake it; the futex compares the
/// doorbell once more).
inline void ring(ControlHead& head) {
    __atomic_fetch_add(&head.doorbell, 1u, __ATOMIC_SEQ_CST);
    if (load_ordered(head.sleeping)) futex_wake_all(head.doorbell);
}

/// At most kReasonBytes of text, cut between UTF-8 characters.
inline std::string fitting(const std::string& text) {
    if (text.size() <= static_cast<size_t>(kReasonBytes)) return text;
    size_t end = kReasonBytes;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;
    return text.substr(0, end);
}

inline void write_text(SharedText& shared_text, const std::string& text) {
    const std::string cut = fitting(text);
    store_relaxed<uint64_t>(shared_text.bytes, cut.size());
    for (size_t i = 0; i * 8 < cut.size(); ++i) {
        uint64_t word = 0;
        memcpy(&word, cut.data() + i * 8, std::min<size_t>(8, cut.size() - i * 8));
        store_relaxed(shared_text.words[i], word);
    }
}

inline std::string read_text(const SharedText& shared_text) {
    const size_t bytes = std::min<uint64_t>(load_relaxed(shared_text.bytes), kReasonBytes);
    std::string text(bytes, '\0');
    for (size_t i = 0; i * 8 < bytes; ++i) {
        const uint64_t word = load_relaxed(shared_text.words[i]);
        memcpy(text.data() + i * 8, &word, std::min<size_t>(8, bytes - i * 8));
    }
    return text;
}

}  // namespace mok::shared
