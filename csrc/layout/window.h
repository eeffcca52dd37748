// What lies where in one rank's window of the symmetric heap; the same offsets on every rank.
#pragma once

#include <cstdint>

#include "csrc/layout/types.h"

namespace mok {

struct WindowLayout {
    int64_t ids;       // int32 [max_tokens * K], -1 or a valid expert
    int64_t weights;   // float [max_tokens * K], backward only
    int64_t x;         // T [max_tokens, H], staging for an x that does not lie in the heap
    int64_t dout;      // T [max_tokens, H], the same for dout
    int64_t rows;      // T [max_tokens * K, H], rows that come home: y forward, dx backward
    int64_t dweights;  // float [max_tokens * K], router-weight gradients that come home
    int64_t bytes;     // all of it, the control block included
};

MOK_HD WindowLayout window_layout(int64_t control_bytes, int64_t max_tokens, int64_t top_k, int64_t hidden,
                                  DType dtype) {
    constexpr int64_t kAlign = 256;  // TMA and cache lines
    const int64_t row_bytes = hidden * dtype_bytes(dtype);
    WindowLayout layout{};
    int64_t end = round_up(control_bytes, kAlign);
    const auto place = [&end](int64_t bytes) {
        const int64_t begin = end;
        end = round_up(end + bytes, kAlign);
        return begin;
    };
    layout.ids = place(max_tokens * top_k * 4);
    layout.weights = place(max_tokens * top_k * 4);
    layout.x = place(max_tokens * row_bytes);
    layout.dout = place(max_tokens * row_bytes);
    layout.rows = place(max_tokens * top_k * row_bytes);
    layout.dweights = place(max_tokens * top_k * 4);
    layout.bytes = end;
    return layout;
}

}  // namespace mok
