#include "csrc/symm/scratch.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "csrc/layout/types.h"

namespace mok {

namespace {

constexpr int64_t kAlign = 64;

}  // namespace

bool poison_requested() {
    static const bool requested = [] {
        const char* value = std::getenv("MOK_POISON");
        return value != nullptr && value[0] == '1';
    }();
    return requested;
}

void Scratch::Free::operator()(void* pointer) const {
    std::free(pointer);
}

void* Scratch::get(ScratchSlot slot, int64_t bytes) {
    Buffer& buffer = buffers_[static_cast<int>(slot)];
    if (bytes > buffer.bytes) {
        buffer.data.reset();  // before the new one exists: the old contents are dead
        buffer.bytes = 0;
        const int64_t rounded = round_up(bytes, kAlign);
        void* data = std::aligned_alloc(kAlign, rounded);
        if (data == nullptr) throw std::bad_alloc();
        buffer.data.reset(data);
        buffer.bytes = rounded;
        std::memset(data, 0, rounded);
    }
    if (poison_requested() && buffer.bytes > 0) std::memset(buffer.data.get(), 0xff, buffer.bytes);
    return buffer.data.get();
}

int64_t Scratch::total_bytes() const {
    int64_t total = 0;
    for (const Buffer& buffer : buffers_) total += buffer.bytes;
    return total;
}

void Scratch::release() {
    for (Buffer& buffer : buffers_) buffer = Buffer{};
}

}  // namespace mok
