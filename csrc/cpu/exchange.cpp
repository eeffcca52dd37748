#include "csrc/cpu/exchange.h"

#include <cstring>

#include "csrc/layout/check.h"
#include "csrc/layout/window.h"

namespace mok::cpu {

namespace {

int64_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

CallHeader make_header(const CallInputs& inputs) {
    const LayerShape& shape = inputs.layer->shape;
    const ExpertWeights& routed = inputs.layer->routed;
    CallHeader header{};
    header.num_tokens = shape.num_tokens;
    header.kind = static_cast<int64_t>(inputs.kind);
    header.num_experts = shape.num_experts;
    header.top_k = shape.top_k;
    header.hidden = shape.hidden;
    header.intermediate = shape.intermediate;
    header.shared_intermediate = shape.shared_intermediate;
    header.dtype = static_cast<int64_t>(shape.compute);
    header.activation = static_cast<int64_t>(shape.activation.kind);
    header.limit_bits = bits_of(shape.activation.limit);
    header.save = static_cast<int64_t>(shape.save);
    header.ring_rows = shape.ring_rows;
    header.max_tokens = shape.max_tokens;
    header.has_bias =
        (routed.b_gate.data ? 1 : 0) | (routed.b_up.data ? 2 : 0) | (routed.b_down.data ? 4 : 0);
    header.shared_gate = inputs.layer->shared_gated ? 1 : 0;
    header.gradients = inputs.gradients;
    return header;
}

void normalize_ids(const LayerInputs& layer, int32_t* out) {
    const int64_t count = layer.shape.num_tokens * layer.shape.top_k;
    const int32_t num_experts = static_cast<int32_t>(layer.shape.num_experts);
    for (int64_t i = 0; i < count; ++i) {
        const int64_t id = layer.ids_are_int64 ? static_cast<const int64_t*>(layer.topk_ids)[i]
                                               : static_cast<const int32_t*>(layer.topk_ids)[i];
        out[i] = normalized_expert(id, num_experts);
    }
}

void copy_rows(const char* source, int64_t source_stride, int64_t rows, int64_t row_bytes, char* target) {
    for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(target + row * row_bytes, source + row * source_stride, row_bytes);
    }
}

}  // namespace

Exchange::Exchange(Workspace& workspace, const CallInputs& inputs)
    : workspace_(workspace),
      shape_(inputs.layer->shape),
      rank_(workspace.rank()),
      num_ranks_(workspace.num_ranks()),
      header_(make_header(inputs)),
      ranks_(num_ranks_) {
    if (num_ranks_ == 1) {
        publish_local(inputs);
    } else {
        publish_in_window(inputs);
    }
}

void Exchange::publish_local(const CallInputs& inputs) {
    const LayerInputs& layer = *inputs.layer;
    const int64_t elem = dtype_bytes(shape_.compute);
    const int64_t slots = shape_.num_tokens * shape_.top_k;
    Scratch& scratch = workspace_.scratch;
    int32_t* ids = scratch.get<int32_t>(ScratchSlot::kIds, slots);
    normalize_ids(layer, ids);
    RankView& view = ranks_[0];
    view.num_tokens = shape_.num_tokens;
    view.ids = ids;
    view.weights = layer.topk_weights;
    view.x = static_cast<const char*>(layer.x);
    view.x_stride = layer.x_row_stride * elem;
    view.dout = static_cast<const char*>(inputs.dout);
    view.dout_stride = inputs.dout_row_stride * elem;
    view.rows = static_cast<char*>(scratch.get(ScratchSlot::kHomeRows, slots * shape_.hidden * elem));
    view.dweights = scratch.get<float>(ScratchSlot::kHomeDweights, slots);
}

void Exchange::publish_in_window(const CallInputs& inputs) {
    const LayerInputs& layer = *inputs.layer;
    SymmHeap& heap = *workspace_.heap;
    const WindowLayout& layout = workspace_.layout;
    const int64_t row_bytes = shape_.hidden * dtype_bytes(shape_.compute);
    char* window = heap.window(rank_);

    normalize_ids(layer, reinterpret_cast<int32_t*>(window + layout.ids));
    if (layer.topk_weights != nullptr && shape_.num_tokens > 0) {
        std::memcpy(window + layout.weights, layer.topk_weights,
                    shape_.num_tokens * shape_.top_k * sizeof(float));
    }
    // A tensor that lies in the heap is published by its offset; another one is staged.
    const auto publish = [&](const void* data, int64_t row_stride, int64_t staging) {
        const char* source = static_cast<const char*>(data);
        const bool contiguous = row_stride == shape_.hidden;
        const int64_t bytes = shape_.num_tokens * row_bytes;
        if (bytes > 0 && contiguous && heap.contains(source, bytes)) return heap.offset(source);
        copy_rows(source, row_stride * dtype_bytes(shape_.compute), shape_.num_tokens, row_bytes,
                  window + staging);
        return staging;
    };
    header_.x_offset = publish(layer.x, layer.x_row_stride, layout.x);
    header_.dout_offset = inputs.dout ? publish(inputs.dout, inputs.dout_row_stride, layout.dout) : 0;
    std::memcpy(workspace_.comm->my_header(), &header_, sizeof(header_));
}

void Exchange::open() {
    if (num_ranks_ == 1) return;
    workspace_.comm->barrier();
    std::vector<CallHeader> headers(num_ranks_);
    for (int rank = 0; rank < num_ranks_; ++rank) {
        std::memcpy(&headers[rank], workspace_.comm->header(rank), sizeof(CallHeader));
    }
    // Every rank looks at the same headers in the same order, so all raise or none does.
    for (int rank = 1; rank < num_ranks_; ++rank) {
        const std::string mismatch = describe_mismatch(headers[0], 0, headers[rank], rank);
        if (mismatch.empty()) continue;
        workspace_.comm->barrier();  // headers may be rewritten only when all have read them
        throw std::invalid_argument(mismatch);
    }
    const WindowLayout& layout = workspace_.layout;
    const int64_t row_bytes = shape_.hidden * dtype_bytes(shape_.compute);
    for (int rank = 0; rank < num_ranks_; ++rank) {
        char* window = workspace_.heap->window(rank);
        const CallHeader& header = headers[rank];
        RankView& view = ranks_[rank];
        view.num_tokens = header.num_tokens;
        view.ids = reinterpret_cast<const int32_t*>(window + layout.ids);
        view.weights = reinterpret_cast<const float*>(window + layout.weights);
        view.x = window + header.x_offset;
        view.x_stride = row_bytes;
        view.dout = window + header.dout_offset;
        view.dout_stride = row_bytes;
        view.rows = window + layout.rows;
        view.dweights = reinterpret_cast<float*>(window + layout.dweights);
    }
}

void Exchange::close() {
    if (num_ranks_ > 1) workspace_.comm->barrier();
}

PlanShape Exchange::plan_shape() const {
    return PlanShape{rank_,
                     num_ranks_,
                     static_cast<int32_t>(shape_.num_experts),
                     static_cast<int32_t>(shape_.top_k),
                     shape_.max_tokens,
                     kDefaultPad};
}

}  // namespace mok::cpu
