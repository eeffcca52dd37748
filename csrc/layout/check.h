// Host-side errors without torch: MOK_CHECK throws std::invalid_argument with a sentence for the user.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace mok {

template <typename... Parts>
std::string concat(const Parts&... parts) {
    std::ostringstream stream;
    (stream << ... << parts);
    return stream.str();
}

}  // namespace mok

/// The message names the argument, its value and the rule it breaks.
#define MOK_CHECK(condition, ...)                                                  \
    do {                                                                           \
        if (!(condition)) throw std::invalid_argument(::mok::concat(__VA_ARGS__)); \
    } while (0)
