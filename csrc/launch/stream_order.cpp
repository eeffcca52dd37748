#if defined(MOK_WITH_CUDA)

#include "csrc/launch/stream_order.h"

#include <cuda_runtime.h>

#include "csrc/launch/error.h"

namespace mok::launch {

namespace {

/// 0: not being captured.
unsigned long long capture_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    if (cudaStreamGetCaptureInfo(stream, &status, &id) != cudaSuccess) return 0;
    return status == cudaStreamCaptureStatusActive ? id : 0;
}

}  // namespace

StreamOrder::~StreamOrder() {
    for (const Last* last : {&eager_, &captured_}) {
        if (last->done != nullptr) cudaEventDestroy(last->done);
    }
}

void StreamOrder::enter(cudaStream_t stream) {
    const unsigned long long capture = capture_of(stream);
    if (capture != 0 && capture != capture_) captured_.is_recorded = false;
    Last& last = capture != 0 ? captured_ : eager_;
    if (capture != 0) capture_ = capture;
    if (last.done == nullptr) {
        check_cuda(cudaEventCreateWithFlags(&last.done, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    }
    if (last.is_recorded && last.stream != stream) {
        check_cuda(cudaStreamWaitEvent(stream, last.done), "waiting for the workspace's last call");
    }
}

void StreamOrder::leave(cudaStream_t stream) {
    Last& last = capture_of(stream) != 0 ? captured_ : eager_;
    last.stream = stream;
    last.is_recorded = last.done != nullptr && cudaEventRecord(last.done, stream) == cudaSuccess;
}

bool is_capturing(cudaStream_t stream) {
    return capture_of(stream) != 0;
}

}  // namespace mok::launch

#endif  // MOK_WITH_CUDA
