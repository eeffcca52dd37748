// Leaving out one synchronising call.

#include <bit>
#include <cstring>

#include "csrc/emu/report.h"
#include "csrc/emu/state.h"

namespace mok::emu {

namespace {

bool ends_with(const char* text, const std::string& end) {
    const size_t length = std::strlen(text);
    return length >= end.size() && std::strcmp(text + length - end.size(), end.c_str()) == 0;
}

}  // namespace

bool is_left_out(const char* wrapper, Site site) {
    Machine& m = *machine;
    if (m.options.collect_sites) {
        CallSite& call = m.sites[std::bit_cast<const void*>(site)];
        if (call.calls++ == 0) {
            const std::string place = describe(site);
            call.wrapper = wrapper;
            call.file = place.substr(0, place.rfind(':'));
            call.line = site.line();
        }
    }
    const LeftOut& left_out = m.options.left_out;
    return left_out.line == site.line() && left_out.wrapper == wrapper &&
           ends_with(site.file_name(), left_out.file);
}

}  // namespace mok::emu
