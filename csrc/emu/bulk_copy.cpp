#include "csrc/emu/bulk_copy.h"

#include "csrc/emu/memory.h"
#include "csrc/emu/report.h"
#include "csrc/emu/tensor_map.h"

namespace mok::emu {

namespace {

constexpr uint32_t kAlignment = 16;

class BulkCopy final : public Copy {
  public:
    BulkCopy(uint8_t* global, uint32_t bytes, bool adds) : global_(global), bytes_(bytes), adds_(adds) {}

    void visit_global(void (*visit)(void*, uint8_t*, size_t), void* context) const override {
        visit(context, global_, bytes_);
    }
    void load(uint8_t* shared) const override { std::memcpy(shared, global_, bytes_); }
    void store(const uint8_t* shared) const override {
        if (!adds_) {
            std::memcpy(global_, shared, bytes_);
            return;
        }
        reduce_add(TensorElement::kFloat32, reinterpret_cast<char*>(global_),
                   reinterpret_cast<const char*>(shared), bytes_);
    }
    bool is_reduction() const override { return adds_; }

  private:
    uint8_t* global_;
    uint32_t bytes_;
    bool adds_;
};

void check(const void* global, uint32_t bytes) {
    if (bytes == 0 || bytes % kAlignment != 0 || reinterpret_cast<uintptr_t>(global) % kAlignment != 0) {
        fail(ErrorKind::kAlign,
             text("moves %u bytes at global address %p: both must be positive multiples of %u", bytes, global,
                  kAlignment));
    }
}

uint8_t* bytes_at(const void* global) {
    return static_cast<uint8_t*>(const_cast<void*>(global));
}

}  // namespace

void issue_bulk_load(const char* instruction, uint32_t destination, const void* source, uint32_t bytes,
                     uint32_t barrier) {
    check(source, bytes);
    issue_load(instruction, std::make_unique<BulkCopy>(bytes_at(source), bytes, false),
               {destination, bytes, kAlignment}, barrier);
}

void issue_bulk_store(const char* instruction, void* destination, uint32_t source, uint32_t bytes,
                      bool adds) {
    check(destination, bytes);
    issue_store(instruction, std::make_unique<BulkCopy>(bytes_at(destination), bytes, adds),
                {source, bytes, kAlignment});
}

void check_bulk_prefetch(const void* source, uint32_t bytes) {
    check(source, bytes);
    locate_global(source, bytes, false);
}

}  // namespace mok::emu
