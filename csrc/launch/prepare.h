// The preparation of a call on the device: from a rank's ids to what its megakernel takes, in one
// launch or two.
#pragma once

#include <cstdint>

#include "csrc/layout/peer_record.h"
#include "csrc/layout/plan.h"
#include "csrc/ptx/wait_record.h"
#include "csrc/schedule/prepared.h"

namespace mok::launch {

/// What is known before the routing is.
struct Preparation {
    PlanShape plan;  // of at most 32 choices a token; its pad is the shape's row block
    schedule::ScheduleShape shape;
    uint32_t most_blocks = 0;      // multiprocessors that may be used; 0: all
    uint32_t warps = 0;            // of a block; 0: as many as fit
    bool may_be_small = true;      // false: a small call is prepared as a large one is
    uint32_t multiprocessors = 0;  // of the GPU; 0: the current one is asked
};

/// Rows [num_tokens, H] of a tensor; nullptr where there is none.
struct InputRows {
    const void* data;
    int64_t stride;  // bytes
};

/// One rank's part in one call.
struct PreparationInputs {
    CallHeader header;     // offsets of x and dout in the window are those that the peers are to use
    const void* topk_ids;  // [T, K], on this device
    bool ids_are_int64;
    InputRows x, dout;
    PeerGroup group;
    int64_t ids_offset;  // of the published ids in every window; several ranks
    ptx::WaitLimits limits;
};

/// Rows that are to be copied into the window, 16-byte aligned with sizes and strides of multiples of 16.
struct StagedRows {
    const void* from;  // nullptr: they lie in the heap already
    int64_t from_stride;
    int64_t row_bytes;
    int64_t to_offset;  // in the window
};

/// Makes the kernels below resident on the current device, as load_peer_kernels does.
void load_prepare_kernels();

/// Device memory for launch_prepare's arrays, 256-byte aligned; its contents do not matter.
int64_t preparation_bytes(const Preparation& preparation);

/// nanoseconds [blocks, stamps] that launch_prepare can record (csrc/kernels/prepare_params.h).
int64_t preparation_stamps(const Preparation& preparation);

/// Plan, table, pull units, zeroed counters, from the ids that all ranks have published (one rank: from its
/// own). On `stream` (a cudaStream_t); returns at once; right under graph capture and replay for any routing.
/// `times`: device memory for preparation_stamps, or nullptr. Throws std::invalid_argument where the shape
/// does not fit, and CudaError.
schedule::PreparedCall launch_prepare(const Preparation& preparation, const PreparationInputs& inputs,
                                      void* scratch, void* stream, uint64_t* times = nullptr);

/// Several ranks: the same, but first this rank's ids, header and staged rows become visible to the peers,
/// and theirs to it.
schedule::PreparedCall launch_publish_and_prepare(const Preparation& preparation,
                                                  const PreparationInputs& inputs, const StagedRows& x,
                                                  const StagedRows& dout, void* scratch, void* stream,
                                                  uint64_t* times = nullptr);

}  // namespace mok::launch
