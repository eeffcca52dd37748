// Growable local buffers of a workspace: temporaries that are dead after each call, shared by all layers of a
// group.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

namespace mok {

/// MOK_POISON=1: memory without contents is filled with 0xff, which is NaN in FP32 and BF16.
bool poison_requested();

enum class ScratchSlot : int32_t {
    kIds,           // normalized ids of a one-rank call
    kHomeRows,      // rows that come home, one-rank calls
    kHomeDweights,  // router-weight gradients that come home, one-rank calls
    kRowTables,     // per ring row: where it comes from, where it goes, its weight
    kRingX,
    kRingDout,
    kRingGate,
    kRingUp,
    kRingHidden,  // h forward, rn(w p) backward
    kRingDgate,
    kRingDup,
    kDweightPartials,
    kSharedRows,    // the shared expert's y or dx
    kBiases,        // in FP32, rounded to the compute type
    kAccumulators,  // FP32 weight gradients of the one cut segment
    kWorkers,       // packed operands and tiles, one part per worker
    kCount,
};

class Scratch {
  public:
    /// At least `bytes`, 64-byte aligned, every page touched (so that memory use does not depend on routing).
    /// Contents are unspecified; poison_requested() fills them at every call.
    void* get(ScratchSlot slot, int64_t bytes);

    template <typename T>
    T* get(ScratchSlot slot, int64_t count) {
        return static_cast<T*>(get(slot, count * static_cast<int64_t>(sizeof(T))));
    }

    int64_t total_bytes() const;
    void release();

  private:
    struct Free {
        void operator()(void* pointer) const;
    };
    struct Buffer {
        std::unique_ptr<void, Free> data;
        int64_t bytes = 0;
    };
    std::array<Buffer, static_cast<int>(ScratchSlot::kCount)> buffers_;
};

}  // namespace mok
