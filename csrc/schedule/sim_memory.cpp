#include "csrc/schedule/sim_memory.h"

#include "csrc/layout/check.h"

namespace mok::schedule {

const char* buffer_name(Buffer buffer) {
    constexpr const char* kNames[kNumBuffers] = {"x", "dout", "gate and up", "hidden"};
    return kNames[buffer];
}

void RankMemory::reset(const RankModel& model) {
    model_ = &model;
    for (int32_t b = 0; b < kNumBuffers; ++b) slots_[b].assign(model.buffers[b].num_slots(), Slot{});
}

Violation RankMemory::begin_write(Buffer buffer, bool shared, int32_t block) {
    const BufferModel& model = model_->buffers[buffer];
    if (model.given(shared, block)) {
        return Violation{
            "saved context overwritten", block, 0, 1,
            concat("stores ", buffer_name(buffer), " of row block ", block, " over the saved context")};
    }
    Slot& s = slot(buffer, shared, block);
    const int32_t owner = counter_block(model_->shape(), shared, block);
    if (s.owner == owner) return {};
    const Slot old = s;
    s = Slot{owner, 0, 0};
    if (old.owner < 0 || (old.writes == model.writes[old.owner] && old.reads == model.reads[old.owner]))
        return {};
    const int32_t old_block = old.owner - model_->shape().num_shared_blocks;
    if (old.writes != model.writes[old.owner]) {
        return Violation{
            "overwritten before written", block, model.writes[old.owner], old.writes,
            concat("stores ", buffer_name(buffer), " of row block ", block, " over row block ", old_block,
                   ", of which ", old.writes, " of ", model.writes[old.owner], " parts are stored")};
    }
    return Violation{
        "overwritten before last reader", block, model.reads[old.owner], old.reads,
        concat("stores ", buffer_name(buffer), " of row block ", block, " over row block ", old_block,
               ", which ", old.reads, " of ", model.reads[old.owner], " tasks have read")};
}

Violation RankMemory::end_write(Buffer buffer, bool shared, int32_t block, int32_t count) {
    Slot& s = slot(buffer, shared, block);
    const int32_t owner = counter_block(model_->shape(), shared, block);
    if (s.owner != owner) return {};  // overwritten meanwhile: begin_write has said so
    s.writes += count;
    const int32_t expected = model_->buffers[buffer].writes[owner];
    if (s.writes <= expected) return {};
    return Violation{"written twice", block, expected, s.writes,
                     concat("has stored ", s.writes, " parts of ", buffer_name(buffer), " of row block ",
                            block, " where there are ", expected)};
}

Violation RankMemory::check_present(const char* type, Buffer buffer, bool shared, int32_t block) const {
    const BufferModel& model = model_->buffers[buffer];
    if (model.given(shared, block)) return {};
    const Slot& s = slots_[buffer][model.slot(shared, block)];
    const int32_t owner = counter_block(model_->shape(), shared, block);
    const int32_t expected = model.writes[owner];
    if (s.owner == owner && s.writes == expected) return {};
    const int32_t stored = s.owner == owner ? s.writes : 0;
    const std::string held =
        s.owner == owner || s.owner < 0
            ? std::string()
            : concat("; its place holds row block ", s.owner - model_->shape().num_shared_blocks);
    return Violation{type, block, expected, stored,
                     concat("reads ", buffer_name(buffer), " of row block ", block, ", of which ", stored,
                            " of ", expected, " parts are stored", held)};
}

Violation RankMemory::begin_read(Buffer buffer, bool shared, int32_t block) const {
    return check_present("read before written", buffer, shared, block);
}

Violation RankMemory::end_read(Buffer buffer, bool shared, int32_t block) {
    Violation violation = check_present("overwritten while read", buffer, shared, block);
    if (violation.type != nullptr || model_->buffers[buffer].given(shared, block)) return violation;
    ++slot(buffer, shared, block).reads;
    return violation;
}

}  // namespace mok::schedule
