#include "csrc/layout/call_header.h"

#include "csrc/layout/check.h"

namespace mok {

namespace {

struct Setting {
    const char* name;
    int64_t CallHeader::*field;
};

constexpr Setting kSettings[] = {
    {"the kind of call (1 forward, 2 backward, 3 recompute)", &CallHeader::kind},
    {"num_experts", &CallHeader::num_experts},
    {"top_k", &CallHeader::top_k},
    {"hidden_size", &CallHeader::hidden},
    {"intermediate_size", &CallHeader::intermediate},
    {"shared_intermediate_size", &CallHeader::shared_intermediate},
    {"dtype (0 float32, 1 bfloat16)", &CallHeader::dtype},
    {"activation", &CallHeader::activation},
    {"swiglu_limit (bits)", &CallHeader::limit_bits},
    {"save (0 none, 1 gate_up, 2 all; none where no input requires grad)", &CallHeader::save},
    {"ring_rows", &CallHeader::ring_rows},
    {"max_tokens", &CallHeader::max_tokens},
    {"the set of biases (bits gate, up, down)", &CallHeader::has_bias},
    {"shared_weight", &CallHeader::shared_gate},
    {"the set of tensors that require grad (bit mask)", &CallHeader::gradients},
};

}  // namespace

std::string describe_mismatch(const CallHeader& ours, int our_rank, const CallHeader& theirs,
                              int their_rank) {
    for (const Setting& setting : kSettings) {
        if (ours.*setting.field == theirs.*setting.field) continue;
        return concat("The ranks of this expert-parallel group disagree on ", setting.name, ": rank ",
                      our_rank, " has ", ours.*setting.field, ", rank ", their_rank, " has ",
                      theirs.*setting.field,
                      "; make the call, its settings and its requires_grad flags equal on all ranks.");
    }
    return {};
}

}  // namespace mok
