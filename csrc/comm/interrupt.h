// Lets Ctrl-C end a long wait: the layer that knows the language's signals installs a check, waits ask it.
#pragma once

#include <functional>

namespace mok {

/// The check returns true when the wait should end. It is called without any lock of mok's, from the waiting
/// thread.
void set_interrupt_check(std::function<bool()> check);
/// To be asked when a wait returned early (a signal) and at least each second.
bool interrupted();

}  // namespace mok
