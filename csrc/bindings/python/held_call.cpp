#if defined(MOK_WITH_CUDA)

#include "csrc/bindings/python/held_call.h"

#include "csrc/bindings/schedule_settings.h"
#include "csrc/schedule/host_schedule.h"

namespace py = pybind11;

namespace mok::python {

namespace {

CallKind kind_of(schedule::Pass pass) {
    switch (pass) {
        case schedule::Pass::kForward:
            return CallKind::kForward;
        case schedule::Pass::kRecompute:
            return CallKind::kRecompute;
        case schedule::Pass::kBackward:
            break;
    }
    return CallKind::kBackward;
}

}  // namespace

HeldCall::HeldCall(std::shared_ptr<Workspace> workspace, const py::dict& settings, int32_t top_k,
                   int64_t max_tokens)
    : workspace_(std::move(workspace)),
      sizes_(bindings::schedule_sizes(settings)),
      config_(bindings::kernel_config(settings)) {
    PlanShape& plan = preparation_.plan;
    plan.rank = workspace_->rank();
    plan.num_ranks = workspace_->num_ranks();
    plan.num_experts = settings["num_experts"].cast<int32_t>();
    plan.top_k = top_k;
    plan.max_tokens = max_tokens;
    plan.pad = settings["pad"].cast<int64_t>();
    sizes_.num_local_experts = plan.num_local_experts();
    schedule::check_schedule(plan, sizes_, config_);
    preparation_.most_blocks = workspace_->most_blocks;
    set_tokens(0);
}

void HeldCall::set_tokens(int64_t num_tokens) {
    sizes_.num_tokens = num_tokens;
    preparation_.shape = schedule::make_schedule_shape(sizes_, config_);
}

CallHeader HeldCall::header() const {
    CallHeader header{};
    header.kind = static_cast<int64_t>(kind_of(sizes_.pass));
    header.num_tokens = sizes_.num_tokens;
    header.num_experts = preparation_.plan.num_experts;
    header.top_k = preparation_.plan.top_k;
    header.hidden = sizes_.hidden;
    header.intermediate = sizes_.intermediate;
    header.shared_intermediate = sizes_.shared_intermediate;
    header.dtype = static_cast<int64_t>(workspace_->dtype);
    header.save = static_cast<int64_t>(sizes_.save);
    header.ring_rows = sizes_.ring_rows;
    header.max_tokens = preparation_.plan.max_tokens;
    header.gradients = sizes_.gradients;
    return header;
}

}  // namespace mok::python

#endif  // MOK_WITH_CUDA
