// Fibers: a stack each, and a switch between them. One OS thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mok::emu {

/// Where a fiber that does not run will continue.
struct Context {
    void* place = nullptr;
};

/// Keeps the running fiber in `from` and continues `to`.
void switch_context(Context& from, const Context& to);

/// A stack from the process's pool, which keeps what it was once given; its start is marked, so that an
/// overflow is seen. On processors without a switch of ours the pool also keeps a ucontext for each.
class Stack {
  public:
    Stack() = default;
    Stack(Stack&& other) noexcept : index_(other.index_) { other.index_ = kNone; }
    Stack& operator=(Stack&& other) noexcept;
    ~Stack() { release(); }

    static Stack take();
    void release();
    /// A context that will call `entry`, which must not return.
    Context prepare(void (*entry)());
    bool has_overflowed() const;

  private:
    static constexpr uint32_t kNone = 0xffffffffu;
    explicit Stack(uint32_t index) : index_(index) {}
    uint32_t index_ = kNone;
};

}  // namespace mok::emu
