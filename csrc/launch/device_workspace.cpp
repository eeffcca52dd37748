#if defined(MOK_WITH_CUDA)

#include "csrc/launch/device_workspace.h"

#include <cuda_runtime.h>

#include "csrc/launch/error.h"
#include "csrc/launch/peer_barrier.h"
#include "csrc/launch/prepare.h"
#include "csrc/launch/router_top_k.h"
#include "csrc/launch/sm90_bf16_moe_backward.h"
#include "csrc/launch/sm90_bf16_moe_forward.h"
#include "csrc/launch/stream_order.h"
#include "csrc/launch/weighted_sum.h"
#include "csrc/layout/check.h"
#include "csrc/symm/registry.h"

namespace mok::launch {

namespace {

/// Neither closed nor ended; the device is current while the result lives.
std::shared_ptr<void> enter(Workspace& workspace) {
    if (workspace.closed || !workspace.device_comm) {
        throw WorkspaceClosed(concat("workspace ", workspace.name, " is closed; create a new one."));
    }
    workspace.device_comm->check();
    return workspace.heap->device_mapping()->make_current();
}

/// On a stream of its own, behind nothing.
void end_now(const PeerGroup& group, const std::string& reason) {
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    launch_peer_end(group, reason, stream);
    cudaStreamDestroy(stream);  // once the kernel is done
}

}  // namespace

void prepare_device_workspace(Workspace& workspace) {
    const std::lock_guard lock(workspace.mutex);
    const std::shared_ptr<void> current = enter(workspace);
    load_peer_kernels();
    load_prepare_kernels();
    load_weighted_sum();
    load_router_top_k();
#if defined(MOK_WITH_SM90)
    load_sm90_bf16_moe_forward();
    load_sm90_bf16_moe_backward();
#endif
}

void device_barrier(Workspace& workspace, PeerPhase phase, void* stream) {
    const std::lock_guard lock(workspace.mutex);
    const std::shared_ptr<void> current = enter(workspace);
    launch_peer_barrier(workspace.device_comm->group(), phase, stream);
}

void abort_device_workspace(Workspace& workspace, const std::string& reason, void* stream) {
    const std::lock_guard lock(workspace.mutex);
    const std::shared_ptr<void> current = enter(workspace);
    const PeerGroup& group = workspace.device_comm->group();
    if (is_capturing(static_cast<cudaStream_t>(stream))) {
        end_now(group, reason);
    } else {
        launch_peer_end(group, reason, stream);
    }
    workspace.device_comm->end(reason);
}

void close_device_workspace(Workspace& workspace, double seconds) {
    std::unique_lock lock(workspace.mutex, std::defer_lock);
    if (workspace.heap->in_owner_process() && (seconds > 0 ? (lock.lock(), true) : lock.try_lock())) {
        try {
            const std::shared_ptr<void> current = enter(workspace);
            // What was launched before is to arrive everywhere, unless nobody is to be waited for.
            if (seconds > 0) workspace.heap->device_mapping()->synchronize();
            end_now(workspace.device_comm->group(), "closed the workspace");
        } catch (const std::exception&) {
            // It has ended before, or its context is lost: the peers know or will time out.
        }
        lock.unlock();
    }
    close_workspace(workspace, seconds);
}

}  // namespace mok::launch

#endif  // MOK_WITH_CUDA
