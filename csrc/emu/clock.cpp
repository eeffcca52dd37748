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

bool Clock::is_covered(const Data& smaller, const Data& larger) {
    const uint32_t common = std::min(smaller.size, larger.size);
    uint32_t above = 0;
    for (uint32_t i = 0; i < common; ++i) above |= smaller.at[i] > larger.at[i] ? 1 : 0;
    for (uint32_t i = common; i < smaller.size; ++i) above |= smaller.at[i];
    return above == 0;
}

void Clock::join(const Clock& other) {
    if (other.data_ == nullptr || other.data_ == data_) return;
    if (data_ == nullptr) {
        *this = other;
        return;
    }
    if (is_covered(*other.data_, *data_)) return;
    if (is_covered(*data_, *other.data_)) {
        *this = other;
        return;
    }
    if (data_->references == 1) {
        own(other.data_->size);
        for (uint32_t i = 0; i < other.data_->size; ++i)
            data_->at[i] = std::max(data_->at[i], other.data_->at[i]);
        return;
    }
    JoinCache::Entry& entry = JoinCache::instance().entry(*this, other);
    if (!entry.first.is_same(*this) || !entry.second.is_same(other)) {
        Clock result = *this;
        result.own(std::max(data_->size, other.data_->size));
        for (uint32_t i = 0; i < other.data_->size; ++i) {
            result.data_->at[i] = std::max(result.data_->at[i], other.data_->at[i]);
        }
        entry = {*this, other, std::move(result)};
    }
    *this = entry.result;
}

void Clock::reset() {
    for (JoinCache::Entry& entry : JoinCache::instance().entries) entry = {};
}

}  // namespace mok::emu
