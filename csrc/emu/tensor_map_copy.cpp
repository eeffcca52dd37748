#include "csrc/emu/tensor_map_copy.h"

#include <cstring>
#include <memory>
#include <string>

#include "csrc/emu/memory.h"

namespace mok::emu {

namespace {

constexpr uint32_t kTensorAlignment = 128;  // of a box in shared memory

class TensorCopy : public Copy {
  public:
    TensorCopy(const TensorMapFields& map, const int32_t* at, uint32_t shared, bool add)
        : map_(map), shared_(shared & ((1u << kOffsetBits) - 1)), add_(add) {
        std::memcpy(at_, at, map.rank * sizeof(*at));
    }

    void visit_global(void (*visit)(void* context, uint8_t* first, size_t bytes),
                      void* context) const override {
        for_each_line(map_, at_, shared_, [&](const BoxLine& line) {
            const uint32_t bytes = line.inside_end - line.inside_begin;
            // Up to 16 bytes: lines of odd length have padding behind them, for strides are multiples of 16.
            const uint32_t whole = (bytes + kPieceBytes - 1) / kPieceBytes * kPieceBytes;
            if (bytes > 0) visit(context, reinterpret_cast<uint8_t*>(line.global), whole);
        });
    }

    void load(uint8_t* shared) const override {
        for_each_line(map_, at_, shared_, [&](const BoxLine& line) {
            for (uint32_t at = 0; at < line.bytes; at += kPieceBytes) {
                uint8_t piece[kPieceBytes] = {};
                for_inside(line, at, [&](uint32_t first, char* global, uint32_t bytes) {
                    std::memcpy(piece + first, global, bytes);
                });
                std::memcpy(shared + place(line, at), piece, kPieceBytes);
            }
        });
    }

    void store(const uint8_t* shared) const override {
        for_each_line(map_, at_, shared_, [&](const BoxLine& line) {
            for (uint32_t at = 0; at < line.bytes; at += kPieceBytes) {
                const uint8_t* piece = shared + place(line, at);
                for_inside(line, at, [&](uint32_t first, char* global, uint32_t bytes) {
                    if (add_) {
                        reduce_add(map_.element, global, reinterpret_cast<const char*>(piece) + first, bytes);
                    } else {
                        std::memcpy(global, piece + first, bytes);
                    }
                });
            }
        });
    }

    bool is_reduction() const override { return add_; }

  private:
    /// Where a line's piece lies, from the first byte of the range on.
    uint32_t place(const BoxLine& line, uint32_t at) const {
        return line.shared(at, map_.swizzle_width) - shared_;
    }

    /// Calls f(first byte of the piece, its place in the tensor, bytes) if some of the piece lies inside.
    template <typename F>
    static void for_inside(const BoxLine& line, uint32_t at, const F& f) {
        const uint32_t begin = std::max(at, line.inside_begin);
        const uint32_t end = std::min(at + kPieceBytes, line.inside_end);
        if (begin < end) f(begin - at, line.global + (begin - line.inside_begin), end - begin);
    }

    TensorMapFields map_;
    int32_t at_[kMaxTensorRank] = {};
    uint32_t shared_;
    bool add_;
};

std::string coordinates(const TensorMapFields& map, const int32_t* at) {
    std::string text = std::to_string(at[0]);
    for (uint32_t i = 1; i < map.rank; ++i) text += ", " + std::to_string(at[i]);
    return text;
}

TensorMapFields check_box(const void* map_address, uint32_t rank, const int32_t* at) {
    const TensorMapFields map = read_tensor_map(map_address);
    if (map.rank != rank) {
        fail(ErrorKind::kUsage, "has a tensor map of " + std::to_string(map.rank) + " dimensions");
    }
    if (int64_t{at[0]} * map.element_bytes % kPieceBytes != 0) {
        fail(ErrorKind::kAlign, "begins at " + coordinates(map, at) + ": the first must be a multiple of " +
                                    std::to_string(kPieceBytes / map.element_bytes) +
                                    " elements (16 bytes), or the hardware traps");
    }
    return map;
}

}  // namespace

std::unique_ptr<Copy> make_tensor_copy(const TensorMapFields& map, const int32_t* at, uint32_t shared,
                                       bool add) {
    return std::make_unique<TensorCopy>(map, at, shared, add);
}

TensorMapFields read_tensor_map(const void* map) {
    TensorMapFields fields;
    std::memcpy(&fields, map, sizeof(fields));
    if (reinterpret_cast<uintptr_t>(map) % 64 != 0) {
        fail(ErrorKind::kAlign, "has a tensor map that is not aligned to 64 bytes");
    }
    if (fields.magic != kTensorMapMagic) {
        fail(ErrorKind::kUsage, "has a tensor map that make_tensor_map did not make");
    }
    return fields;
}

void issue_tensor_load(const char* instruction, const void* map, uint32_t rank, const int32_t* at,
                       uint32_t shared, uint32_t barrier, uint16_t blocks) {
    const TensorMapFields fields = check_box(map, rank, at);
    issue_load(instruction, make_tensor_copy(fields, at, shared, /* add */ false),
               {shared, fields.box_bytes(), kTensorAlignment}, barrier, blocks);
}

void check_tensor_prefetch(const void* map, uint32_t rank, const int32_t* at) {
    const TensorMapFields fields = check_box(map, rank, at);
    const auto locate = [](void*, uint8_t* first, size_t bytes) { locate_global(first, bytes, false); };
    make_tensor_copy(fields, at, 0, /* add */ false)->visit_global(locate, nullptr);
}

void issue_tensor_store(const char* instruction, const void* map, uint32_t rank, const int32_t* at,
                        uint32_t shared, bool add) {
    const TensorMapFields fields = check_box(map, rank, at);
    for (uint32_t i = 0; i < fields.rank; ++i) {
        if (at[i] < 0) {
            fail(ErrorKind::kBounds, "begins at " + coordinates(fields, at) +
                                         ": only a load may begin before 0, on a store the hardware traps");
        }
    }
    if (add && fields.element == TensorElement::kBytes) {
        fail(ErrorKind::kUsage, "adds to a tensor of bytes: its map must say BF16 or FP32");
    }
    issue_store(instruction, make_tensor_copy(fields, at, shared, add),
                {shared, fields.box_bytes(), kTensorAlignment});
}

}  // namespace mok::emu
