#include "csrc/comm/interrupt.h"

#include <utility>

namespace mok {
namespace {

std::function<bool()>& installed_check() {
    static std::function<bool()> check;
    return check;
}

}  // namespace

void set_interrupt_check(std::function<bool()> check) {
    installed_check() = std::move(check);
}

bool interrupted() {
    return installed_check() && installed_check()();
}

}  // namespace mok
