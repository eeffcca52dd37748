#include "csrc/emu/clock.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

namespace mok::emu {

namespace {

constexpr uint32_t kSizeStep = 64;

}  // namespace

/// The last joins, by their operands. It holds its clocks, so that they stay what they were.
struct JoinCache {
    struct Entry {
        Clock first, second, result;
    };
    static constexpr size_t kEntries = 256;
    Entry entries[kEntries];

    static JoinCache& instance() {
        static JoinCache cache;
        return cache;
    }
    Entry& entry(const Clock& first, const Clock& second) {
        const uintptr_t hash =
            reinterpret_cast<uintptr_t>(first.data_) * 31 + reinterpret_cast<uintptr_t>(second.data_);
        return entries[(hash >> 4 ^ hash >> 12) % kEntries];
    }
};

Clock::Data* Clock::create(uint32_t size) {
    void* memory = std::malloc(sizeof(Data) + size * sizeof(uint32_t));
    if (memory == nullptr) throw std::bad_alloc();
    Data* data = static_cast<Data*>(memory);
    data->references = 1;
    data->size = size;
    return data;
}

void Clock::destroy(Data* data) {
    std::free(data);
}

void Clock::own(uint32_t size) {
    if (data_ != nullptr && data_->references == 1 && data_->size >= size) return;
    const uint32_t old_size = data_ == nullptr ? 0 : data_->size;
    Data* data = create(std::max(old_size, (size + kSizeStep - 1) / kSizeStep * kSizeStep));
    if (old_size != 0) std::memcpy(data->at, data_->at, old_size * sizeof(uint32_t));
    std::fill(data->at + old_size, data->at + data->size, 0u);
    drop();
    data_ = data;
}

void Clock::set(uint32_t component, uint32_t value) {
    if ((*this)[component] == value) return;
    own(component + 1);
    data_->at[component] = value;
}

// Sizes are multiples of kSizeStep; epochs are far below 2^31, so they compare as signed numbers.
using Lane8 = int32_t __attribute__((vector_size(32), aligned(4), may_alias));

bool Clock::is_covered(const Data& smaller, const Data& larger) {
    const uint32_t common = std::min(smaller.size, larger.size);
    const auto *a = reinterpret_cast<const Lane8*>(smaller.at),
               *b = reinterpret_cast<const Lane8*>(larger.at);
    Lane8 above{};
    uint32_t i = 0;
    for (; i < common / 8; ++i) above |= a[i] > b[i];
    for (; i < smaller.size / 8; ++i) above |= a[i] != 0;
    int32_t any = 0;
    for (int lane = 0; lane < 8; ++lane) any |= above[lane];
    return any == 0;
}

void Clock::take_larger(const Data& other) {
    own(other.size);
    auto* a = reinterpret_cast<Lane8*>(data_->at);
    const auto* b = reinterpret_cast<const Lane8*>(other.at);
    for (uint32_t i = 0; i < other.size / 8; ++i) {
        const Lane8 mine = a[i] > b[i];
        a[i] = (a[i] & mine) | (b[i] & ~mine);
    }
}

void Clock::join(const Clock& other) {
    if (other.data_ == nullptr || other.data_ == data_) return;
    if (data_ == nullptr) {
        *this = other;
        return;
    }
    if (data_->references == 1) {
        if (is_covered(*other.data_, *data_)) return;
        if (is_covered(*data_, *other.data_)) {
            *this = other;
        } else {
            take_larger(*other.data_);
        }
        return;
    }
    JoinCache::Entry& entry = JoinCache::instance().entry(*this, other);
    if (!entry.first.is_same(*this) || !entry.second.is_same(other)) {
        Clock result = *this;
        if (is_covered(*data_, *other.data_)) {
            result = other;
        } else if (!is_covered(*other.data_, *data_)) {
            result.take_larger(*other.data_);
        }
        entry = {*this, other, std::move(result)};
    }
    *this = Clock(entry.result);
}

void Clock::reset() {
    for (JoinCache::Entry& entry : JoinCache::instance().entries) entry = {};
}

}  // namespace mok::emu
