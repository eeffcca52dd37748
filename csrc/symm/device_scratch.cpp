#include "csrc/symm/device_scratch.h"

#include <utility>

#include "csrc/layout/check.h"
#include "csrc/layout/types.h"

namespace mok {

char* DeviceScratch::get(DeviceMapping& mapping, int64_t bytes, bool is_capturing) {
    if (bytes > bytes_) {
        MOK_CHECK(!is_capturing, "a call that is captured needs ", bytes,
                  " bytes of temporary memory and the workspace has ", bytes_,
                  ": make one call with these sizes before the capture.");
        constexpr int64_t kGranularity = 2 << 20;
        const int64_t rounded = round_up(bytes, kGranularity);
        if (was_captured_) {
            kept_.push_back(std::move(memory_));
        } else {
            total_bytes_ -= bytes_;
        }
        memory_.reset();  // before the new one exists: the old contents are dead
        bytes_ = 0;
        was_captured_ = false;
        memory_ = mapping.allocate(rounded);
        bytes_ = rounded;
        total_bytes_ += rounded;
    }
    was_captured_ = was_captured_ || is_capturing;
    return static_cast<char*>(memory_.get());
}

void DeviceScratch::release() {
    memory_.reset();
    kept_.clear();
    bytes_ = total_bytes_ = 0;
    was_captured_ = false;
}

}  // namespace mok
