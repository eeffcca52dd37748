// Vector clocks. A component is a warp, a thread that synchronises alone, an mbarrier, a warp's wgmmas or a
// launch; its entry is the newest event of it that the clock's owner comes after.
//
// Clocks are shared: after a barrier all its threads hold one. A shared clock is never written, so a join of
// two that are held elsewhere makes a third, and the next thread that joins the same two gets that one.
#pragma once

#include <cstdint>
#include <utility>

namespace mok::emu {

class Clock {
  public:
    Clock() = default;
    Clock(const Clock& other) : data_(other.data_) { retain(); }
    Clock(Clock&& other) noexcept : data_(other.data_) { other.data_ = nullptr; }
    Clock& operator=(Clock other) noexcept {
        std::swap(data_, other.data_);
        return *this;
    }
    ~Clock() { drop(); }

    uint32_t operator[](uint32_t component) const {
        return data_ != nullptr && component < data_->size ? data_->at[component] : 0;
    }
    void set(uint32_t component, uint32_t value);
    void join(const Clock& other);
    bool is_same(const Clock& other) const { return data_ == other.data_; }
    bool is_empty() const { return data_ == nullptr; }

    /// Between runs: forgets what joins have kept.
    static void reset();

  private:
    struct Data {
        uint32_t references;
        uint32_t size;
        uint32_t at[];
    };
    friend struct JoinCache;

    explicit Clock(Data* data) : data_(data) {}
    void retain() const {
        if (data_ != nullptr) ++data_->references;
    }
    void drop() {
        if (data_ != nullptr && --data_->references == 0) destroy(data_);
    }
    static Data* create(uint32_t size);
    static void destroy(Data* data);
    static bool is_covered(const Data& smaller, const Data& larger);
    void own(uint32_t size);
    void take_larger(const Data& other);

    Data* data_ = nullptr;
};

enum class Space : uint8_t { kShared, kGlobal };

/// What a thread comes after, and what a synchronising object hands on.
struct View {
    Clock known;
    Clock fenced[2];  // by Space: what was known at a proxy fence on the way
    Clock reads;      // accesses that may be overwritten, but whose writes are not seen

    void join(const View& other) {
        known.join(other.known);
        fenced[0].join(other.fenced[0]);
        fenced[1].join(other.fenced[1]);
        reads.join(other.reads);
    }
    bool is_same(const View& other) const {
        return known.is_same(other.known) && fenced[0].is_same(other.fenced[0]) &&
               fenced[1].is_same(other.fenced[1]) && reads.is_same(other.reads);
    }
};

}  // namespace mok::emu
