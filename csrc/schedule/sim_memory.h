// What lies where in one rank's buffers: versions by row block, and the rules that reads and writes must
// obey.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/schedule/sim_model.h"

namespace mok::schedule {

/// The outcome of an access; `type` is null when it is legal.
struct Violation {
    const char* type = nullptr;
    int32_t block = 0;
    int64_t expected = 0;
    int64_t seen = 0;
    std::string text;
};

class RankMemory {
  public:
    void reset(const RankModel& model);

    /// A store to a row block begins: what its slot held must have been written and read completely.
    Violation begin_write(Buffer buffer, bool shared, int32_t block);
    /// `count` parts or pieces of it are complete.
    Violation end_write(Buffer buffer, bool shared, int32_t block, int32_t count);
    /// A task starts to read a row block: every part must be there.
    Violation begin_read(Buffer buffer, bool shared, int32_t block) const;
    /// It has read the block, which must still be there.
    Violation end_read(Buffer buffer, bool shared, int32_t block);

  private:
    struct Slot {
        int32_t owner = -1;  // counter_block of what lies here
        int32_t writes = 0;
        int32_t reads = 0;
    };
    Slot& slot(Buffer buffer, bool shared, int32_t block) {
        return slots_[buffer][model_->buffers[buffer].slot(shared, block)];
    }
    Violation check_present(const char* type, Buffer buffer, bool shared, int32_t block) const;

    const RankModel* model_ = nullptr;
    std::vector<Slot> slots_[kNumBuffers];
};

const char* buffer_name(Buffer buffer);

}  // namespace mok::schedule
