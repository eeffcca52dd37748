// What a rank publishes about a call, and where. Host and device.
#pragma once

#include <cstdint>

#include "csrc/layout/call_header.h"
#include "csrc/layout/peer_record.h"

namespace mok {

/// Rows to copy into the window; 16-byte aligned, sizes and strides multiples of 16.
struct PublishedRows {
    const char* from;  // nullptr: nothing to copy
    char* to;
    int64_t from_stride;  // bytes
    int64_t row_bytes;    // and stride of `to`
};

struct Published {
    const void* topk_ids;  // [T, K]
    int64_t num_slots;     // T * K
    int32_t* ids;          // in the window
    int32_t num_experts;
    bool ids_are_int64;
    PublishedRows x, dout;
    CallHeader header;
};

struct PublishParams {
    PeerGroup group;
    Published inputs;
};

}  // namespace mok
