#if defined(MOK_WITH_CUDA)

#include "csrc/launch/device_call.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "csrc/comm/errors.h"
#include "csrc/launch/error.h"
#include "csrc/launch/launch_shape.h"
#include "csrc/launch/peer_barrier.h"
#include "csrc/launch/stream_order.h"
#include "csrc/layout/check.h"
#include "csrc/schedule/host_schedule.h"
#include "csrc/symm/scratch.h"

namespace mok::launch {

namespace {

constexpr int64_t kAlign = 16;  // of rows that kernels copy

cudaStream_t cuda_stream(void* stream) {
    return static_cast<cudaStream_t>(stream);
}

StreamOrder& order_of(Workspace& workspace) {
    if (!workspace.launch_state) workspace.launch_state = std::make_shared<StreamOrder>();
    return *static_cast<StreamOrder*>(workspace.launch_state.get());
}

bool is_aligned(const InputRows& rows) {
    return reinterpret_cast<uintptr_t>(rows.data) % kAlign == 0 && rows.stride % kAlign == 0;
}

schedule::Pass pass_of(CallKind kind) {
    switch (kind) {
        case CallKind::kForward:
            return schedule::Pass::kForward;
        case CallKind::kRecompute:
            return schedule::Pass::kRecompute;
        case CallKind::kBackward:
            return schedule::Pass::kBackward;
    }
    throw std::invalid_argument(concat("kind of call ", static_cast<int64_t>(kind), ": must be 1 to 3."));
}

void copy_rows(const InputRows& rows, int64_t num_rows, int64_t row_bytes, char* to, void* stream) {
    check_cuda(
        cudaMemcpy2DAsync(to, static_cast<size_t>(row_bytes), rows.data, static_cast<size_t>(rows.stride),
                          static_cast<size_t>(row_bytes), static_cast<size_t>(num_rows),
                          cudaMemcpyDeviceToDevice, cuda_stream(stream)),
        "copying rows");
}

}  // namespace

DeviceCall::DeviceCall(Workspace& workspace, void* stream)
    : workspace_(workspace), lock_(workspace.mutex), stream_(stream) {
    if (workspace.closed || !workspace.device_comm) {
        throw WorkspaceClosed(concat("workspace ", workspace.name, " is closed; create a new one."));
    }
    if (!workspace.heap->in_owner_process()) {
        throw WorkspaceClosed(
            concat("workspace ", workspace.name,
                   " belongs to the process this one was forked from; start processes by spawn."));
    }
    workspace.device_comm->check();
    current_ = workspace.heap->device_mapping()->make_current();
    order_of(workspace).enter(cuda_stream(stream));
}

DeviceCall::~DeviceCall() {
    order_of(workspace_).leave(cuda_stream(stream_));
}

void DeviceCall::check(const CallHeader& header) const {
    MOK_CHECK(header.num_tokens <= header.max_tokens, "x has T = ", header.num_tokens,
              " tokens, more than max_tokens = ", header.max_tokens,
              ": pass max_tokens = the largest T any rank will pass when the layer is made.");
    if (workspace_.num_ranks() == 1) return;
    MOK_CHECK(header.max_tokens <= workspace_.max_tokens && header.hidden == workspace_.hidden &&
                  header.top_k == workspace_.top_k && header.dtype == static_cast<int64_t>(workspace_.dtype),
              "workspace '", workspace_.name, "' was made for max_tokens = ", workspace_.max_tokens,
              ", hidden_size = ", workspace_.hidden, ", top_k = ", workspace_.top_k,
              " and its dtype; this call has max_tokens = ", header.max_tokens,
              ", hidden_size = ", header.hidden, ", top_k = ", header.top_k,
              ": use a workspace made for these sizes.");
}

char* DeviceCall::scratch(int64_t bytes) {
    char* memory = workspace_.device_scratch.get(*workspace_.heap->device_mapping(), bytes,
                                                 is_capturing(cuda_stream(stream_)));
    if (poison_requested()) {
        check_cuda(cudaMemsetAsync(memory, 0xff, static_cast<size_t>(bytes), cuda_stream(stream_)),
                   "poisoning temporary memory");
    }
    return memory;
}

const PeerGroup& DeviceCall::group() const {
    return workspace_.device_comm->group();
}

ptx::WaitLimits DeviceCall::limits() const {
    return workspace_.device_comm->limits();
}

/// One rank's kernels read its tensors in place, unless they are not aligned.
InputRows DeviceCall::staged(const InputRows& rows, int64_t num_rows, int64_t row_bytes,
                             char*& memory) const {
    if (rows.data == nullptr || is_aligned(rows)) return rows;
    copy_rows(rows, num_rows, row_bytes, memory, stream_);
    const InputRows result{memory, row_bytes};
    memory += num_rows * row_bytes;
    return result;
}

/// Peers read a tensor that lies in the heap in place; another one is copied to `staging`.
/// `rows` then is where this rank reads them itself.
StagedRows DeviceCall::publish_rows(InputRows& rows, int64_t num_rows, int64_t row_bytes, int64_t staging,
                                    int64_t& offset) const {
    offset = staging;
    if (rows.data == nullptr || num_rows == 0) return {};
    const SymmHeap& heap = *workspace_.heap;
    const bool is_whole = num_rows == 1 || rows.stride == row_bytes;
    if (is_whole && is_aligned(rows) && heap.contains(rows.data, num_rows * row_bytes)) {
        offset = heap.offset(rows.data);
        return {};
    }
    if (is_aligned(rows)) return {rows.data, rows.stride, row_bytes, staging};
    char* in_window = group().window + staging;
    copy_rows(rows, num_rows, row_bytes, in_window, stream_);
    rows = {in_window, row_bytes};
    return {};
}

int64_t DeviceCall::preparation_memory(const Preparation& preparation, const CallHeader& header,
                                       const CallTensors& tensors) const {
    int64_t bytes = preparation_bytes(preparation);
    for (const InputRows* rows : {&tensors.x, &tensors.dout}) {
        if (workspace_.num_ranks() > 1 || rows->data == nullptr || is_aligned(*rows)) continue;
        bytes += header.num_tokens * preparation.shape.sizes.row_bytes;
    }
    return bytes;
}

CallMemory DeviceCall::memory(const Preparation& preparation, const CallHeader& header,
                              const CallTensors& tensors, int64_t row_bytes) {
    const int64_t prepared_bytes =
        round_up<int64_t>(preparation_memory(preparation, header, tensors), MemoryPlacer::kAlign);
    char* memory = scratch(prepared_bytes + row_bytes);
    return {memory, memory + prepared_bytes};
}

schedule::PreparedCall DeviceCall::prepare(const Preparation& preparation, const CallHeader& header,
                                           const CallTensors& tensors, char* memory, uint64_t* times) {
    check(header);
    const int64_t row_bytes = preparation.shape.sizes.row_bytes;
    PreparationInputs inputs{};
    inputs.header = header;
    inputs.topk_ids = tensors.topk_ids;
    inputs.ids_are_int64 = tensors.ids_are_int64;
    inputs.group = group();
    inputs.ids_offset = workspace_.layout.ids;
    inputs.limits = limits();
    own_x_ = tensors.x;
    own_dout_ = tensors.dout;
    if (workspace_.num_ranks() == 1) {
        char* rows = memory + preparation_bytes(preparation);
        inputs.x = own_x_ = staged(tensors.x, header.num_tokens, row_bytes, rows);
        inputs.dout = own_dout_ = staged(tensors.dout, header.num_tokens, row_bytes, rows);
    } else {
        const StagedRows x =
            publish_rows(own_x_, header.num_tokens, row_bytes, workspace_.layout.x, inputs.header.x_offset);
        const StagedRows dout = publish_rows(own_dout_, header.num_tokens, row_bytes, workspace_.layout.dout,
                                             inputs.header.dout_offset);
        return launch_publish_and_prepare(preparation, inputs, x, dout, memory, stream_, times);
    }
    return launch_prepare(preparation, inputs, memory, stream_, times);
}

void DeviceCall::meet_outputs() {
    if (workspace_.num_ranks() > 1) launch_peer_barrier(group(), PeerPhase::kOutputs, stream_);
}

Preparation layer_preparation(const Workspace& workspace, const CallHeader& header, bool zero_idle) {
    return layer_preparation({workspace.rank(), workspace.num_ranks(), 0, workspace.most_blocks}, header,
                             zero_idle);
}

Preparation layer_preparation(const CallPlace& place, const CallHeader& header, bool zero_idle) {
    Preparation result{};
    result.most_blocks = place.most_blocks;
    result.multiprocessors = place.multiprocessors;
    result.plan = PlanShape{place.rank,
                            place.num_ranks,
                            static_cast<int32_t>(header.num_experts),
                            static_cast<int32_t>(header.top_k),
                            header.max_tokens,
                            kDefaultPad};
    check_plan_shape(result.plan);
    schedule::ScheduleSizes sizes{};
    sizes.pass = pass_of(static_cast<CallKind>(header.kind));
    sizes.save = static_cast<schedule::Save>(header.save);
    sizes.hidden = header.hidden;
    sizes.intermediate = header.intermediate;
    sizes.shared_intermediate = header.shared_intermediate;
    sizes.num_tokens = header.num_tokens;
    sizes.num_local_experts = result.plan.num_local_experts();
    // A ring longer than the worst case would never be filled.
    sizes.ring_rows = std::min(header.ring_rows, std::max(worst_case_rows(result.plan), result.plan.pad));
    sizes.gradients = sizes.pass == schedule::Pass::kBackward ? header.gradients : 0;
    sizes.zero_idle = zero_idle;
    uint32_t num_sms = place.most_blocks > 0 ? place.most_blocks : place.multiprocessors;
    if (num_sms == 0) num_sms = num_multiprocessors();
    sizes.num_sms = static_cast<int32_t>(num_sms);
    sizes.row_bytes = header.hidden * dtype_bytes(static_cast<DType>(header.dtype));
    const schedule::KernelConfig* config =
        schedule::choose_config(schedule::Arch::kSm90, header.intermediate);
    schedule::check_schedule(result.plan, sizes, *config);
    result.shape = schedule::make_schedule_shape(sizes, *config);
    return result;
}

}  // namespace mok::launch

#endif  // MOK_WITH_CUDA
