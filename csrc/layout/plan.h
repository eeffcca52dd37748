// The plan: which row of this rank's expert-major row space is which (source rank, slot), and where segments
// start.
//
// Row order is (expert, source rank, slot), each expert's segment padded at its end to a multiple of `pad`
// rows. Only integer functions live here, so that the host and the device build the same plan from the same
// rules.
#pragma once

#include <cstdint>

#include "csrc/layout/types.h"

namespace mok {

/// Rows a segment is padded to: the tallest tile of the kernels (BLOCK_M). 256 serves CTA pairs.
constexpr int64_t kDefaultPad = 128;

struct PlanShape {
    int32_t rank;
    int32_t num_ranks;
    int32_t num_experts;  // in all; a multiple of num_ranks
    int32_t top_k;
    int64_t max_tokens;  // the largest T of any rank
    int64_t pad;

    MOK_HD int32_t num_local_experts() const { return num_experts / num_ranks; }
    MOK_HD int32_t first_expert() const { return rank * num_local_experts(); }
    MOK_HD int64_t max_routes() const { return num_ranks * max_tokens * top_k; }
};

/// An id outside [0, E) is no route; published ids are already -1 or valid.
MOK_HD int32_t normalized_expert(int64_t id, int32_t num_experts) {
    return id >= 0 && id < num_experts ? static_cast<int32_t>(id) : -1;
}

/// The local index of a published id on this rank, or -1 when it has no row here.
MOK_HD int32_t local_expert(int32_t id, const PlanShape& shape) {
    const int32_t local = id - shape.first_expert();
    return id >= 0 && local >= 0 && local < shape.num_local_experts() ? local : -1;
}

/// Padded rows when every route of every rank lands here in the least favourable split over the experts.
MOK_HD int64_t worst_case_rows(const PlanShape& shape) {
    const int64_t routes = shape.max_routes();
    const int64_t segments = routes < shape.num_local_experts() ? routes : shape.num_local_experts();
    return (routes + segments * (shape.pad - 1)) / shape.pad * shape.pad;
}

/// 1.25 x max_tokens x K plus one pad per local expert, in whole pads, at most the worst case, at least one
/// pad.
MOK_HD int64_t default_ring_rows(const PlanShape& shape) {
    const int64_t routes = shape.max_tokens * shape.top_k;
    const int64_t wanted = round_up((5 * routes + 3) / 4, shape.pad) + shape.pad * shape.num_local_experts();
    const int64_t worst = worst_case_rows(shape);
    const int64_t rows = wanted < worst ? wanted : worst;
    return rows < shape.pad ? shape.pad : rows;
}

/// The segment that holds padded row `row`: the last one whose begin is <= row among those with rows.
/// `segment_begin` has num_segments + 1 ascending entries; row < segment_begin[num_segments].
MOK_HD int32_t find_segment(int64_t row, const int64_t* segment_begin, int32_t num_segments) {
    int32_t low = 0, high = num_segments;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (segment_begin[middle] <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/// Where the chunk (macrobatch) that starts at padded row `begin` ends. Chunks are cut at segment boundaries
/// where a segment fits into the ring; a longer segment starts a chunk of its own and is cut at multiples of
/// ring_rows (a multiple of the pad) from its start, so that one set of FP32 accumulators lives at a time.
MOK_HD int64_t chunk_end(int64_t begin, const int64_t* segment_begin, int32_t num_segments,
                         int64_t ring_rows) {
    int64_t end = begin;
    for (int32_t segment = find_segment(begin, segment_begin, num_segments); segment < num_segments;
         ++segment) {
        const int64_t rows =
            segment_begin[segment + 1] - (end > segment_begin[segment] ? end : segment_begin[segment]);
        if (end - begin + rows > ring_rows) return end == begin ? begin + ring_rows : end;
        end += rows;
    }
    return end;
}

}  // namespace mok
