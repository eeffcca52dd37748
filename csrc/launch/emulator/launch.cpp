#include "csrc/launch/emulator/launch.h"

#include "csrc/layout/check.h"

namespace mok::launch {

namespace {

uint32_t multiprocessors = 4;

}  // namespace

uint32_t num_multiprocessors() {
    return multiprocessors;
}

void set_num_multiprocessors(uint32_t count) {
    MOK_CHECK(count >= 1 && count <= 256, "count is ", count, " multiprocessors; it must be 1 to 256.");
    multiprocessors = count;
}

}  // namespace mok::launch
