// A layer's arguments as the launches of csrc/launch take them: BF16 on one GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "csrc/bindings/torch/arguments.h"
#include "csrc/bindings/torch/op_errors.h"
#include "csrc/launch/device_workspace.h"
#include "csrc/launch/weight_view.h"
#include "csrc/layout/call_header.h"
#include "csrc/symm/registry.h"

#pragma GCC visibility push(hidden)

namespace mok::bindings {

constexpr int64_t kElementBytes = 2, kAlign = 16;

/// The workspace, which must be on x's device.
std::shared_ptr<Workspace> device_workspace(const std::string& name, const Tensor& x);

bool is_aligned(const void* data, int64_t stride_bytes);

/// What the kernels cannot take of `inputs` for this workspace: another compute dtype, a wrong number of
/// experts. Throws std::invalid_argument, as the functions below.
void check_for_kernels(const Workspace& workspace, const cpu::LayerInputs& inputs);

launch::MoeExpertViews routed_views(const cpu::LayerInputs& inputs);
launch::MoeExpertViews shared_views(const cpu::LayerInputs& inputs);

CallHeader call_header(CallKind kind, const cpu::LayerInputs& inputs, int64_t gradients);

/// What `make` returns, once all arguments are checked; the peers hear why if they do not fit.
template <typename Make>
auto checked(Workspace& workspace, void* stream, const Make& make) {
    return telling_peers(
        [&](const char* reason) { launch::abort_device_workspace(workspace, reason, stream); }, make);
}

}  // namespace mok::bindings

#pragma GCC visibility pop
