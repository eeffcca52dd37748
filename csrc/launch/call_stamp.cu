#include "csrc/kernels/call_stamp.cuh"
#include "csrc/launch/call_stamp.h"
#include "csrc/launch/launch.cuh"

namespace mok::launch {

void load_call_stamp() {
    load_kernel("loading mok's stamp of a traced call", call_stamp_kernel);
}

void launch_call_stamp(CallStamps* stamps, CallMoment moment, const schedule::ScheduleShape& shape,
                       const schedule::PreparedCall* call, void* stream) {
    CallStampParams params{stamps, moment, shape, nullptr, nullptr};
    if (call != nullptr) {
        params.table = call->table;
        params.expired = call->expired;
    }
    launch("mok's stamp of a traced call", call_stamp_kernel, {1, ptx::kWarpThreads}, stream, params);
}

}  // namespace mok::launch
