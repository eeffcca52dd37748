#include "csrc/emu/context.h"

#include <sys/mman.h>

#include <new>
#include <vector>

// MOK_EMU_UCONTEXT tries the portable switch on a processor that has one of ours.
#if (defined(__x86_64__) || defined(__aarch64__)) && !defined(MOK_EMU_UCONTEXT)
#define MOK_EMU_OWN_SWITCH 1
extern "C" void mok_emu_switch(void** save, void* to);
#else
#include <ucontext.h>

#include <memory>
#endif

namespace mok::emu {

namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr uint64_t kMark = 0x6d6f6b2073746163u;

/// Stacks come in slabs that are never given back: a run after the first one finds warm pages.
struct Pool {
    static constexpr uint32_t kSlabStacks = 1024;
    std::vector<uint8_t*> slabs;
    std::vector<uint32_t> free;
#if !defined(MOK_EMU_OWN_SWITCH)
    std::vector<std::unique_ptr<ucontext_t>> contexts;
#endif

    uint8_t* at(uint32_t index) const {
        return slabs[index / kSlabStacks] + size_t{index % kSlabStacks} * kStackBytes;
    }

    void grow() {
        void* slab = mmap(nullptr, kSlabStacks * kStackBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (slab == MAP_FAILED) throw std::bad_alloc();
        const uint32_t first = static_cast<uint32_t>(slabs.size()) * kSlabStacks;
        slabs.push_back(static_cast<uint8_t*>(slab));
        for (uint32_t i = kSlabStacks; i-- > 0;) free.push_back(first + i);
#if !defined(MOK_EMU_OWN_SWITCH)
        for (uint32_t i = 0; i < kSlabStacks; ++i) contexts.push_back(std::make_unique<ucontext_t>());
#endif
    }
};

Pool& pool() {
    static Pool* instance = new Pool;  // never destroyed: fibers of a failed run may be anywhere on it
    return *instance;
}

uint64_t* mark_of(uint32_t index) {
    return reinterpret_cast<uint64_t*>(pool().at(index));
}

}  // namespace

Stack& Stack::operator=(Stack&& other) noexcept {
    if (this != &other) {
        release();
        index_ = other.index_;
        other.index_ = kNone;
    }
    return *this;
}

Stack Stack::take() {
    if (pool().free.empty()) pool().grow();
    const uint32_t index = pool().free.back();
    pool().free.pop_back();
    *mark_of(index) = kMark;
    return Stack(index);
}

void Stack::release() {
    if (index_ != kNone) pool().free.push_back(index_);
    index_ = kNone;
}

bool Stack::has_overflowed() const {
    return index_ != kNone && *mark_of(index_) != kMark;
}

#if defined(MOK_EMU_OWN_SWITCH)

void switch_context(Context& from, const Context& to) {
    mok_emu_switch(&from.place, to.place);
}

Context Stack::prepare(void (*entry)()) {
    // The live parts of stacks would otherwise lie at equal distances and share a few cache sets.
    const size_t shift = index_ * 5 % 32 * 64;
    void** top = reinterpret_cast<void**>(pool().at(index_) + kStackBytes - 128 - shift);
#if defined(__x86_64__)
    *--top = nullptr;  // entry's return address: the end of a backtrace
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
#else
    constexpr int kSaved = 20, kReturn = 11;  // x30 is the twelfth word
    top -= kSaved;
    for (int i = 0; i < kSaved; ++i) top[i] = nullptr;
    top[kReturn] = reinterpret_cast<void*>(entry);
#endif
    return Context{top};
}

#else

void switch_context(Context& from, const Context& to) {
    ucontext_t here;
    from.place = &here;
    swapcontext(&here, static_cast<ucontext_t*>(to.place));
}

Context Stack::prepare(void (*entry)()) {
    ucontext_t* context = pool().contexts[index_].get();
    getcontext(context);
    context->uc_stack.ss_sp = pool().at(index_);
    context->uc_stack.ss_size = kStackBytes;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
    return Context{context};
}

#endif

}  // namespace mok::emu
