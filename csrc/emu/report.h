// Sentences about threads, places and waits.
#pragma once

#include <string>

#include "csrc/emu/state.h"

namespace mok::emu {

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

std::string describe(const Thread& thread);
/// " lane 3", " lanes 1-31", nothing for all.
std::string describe_lanes(uint32_t lanes);
std::string describe_warp(const Warp& warp, uint32_t lanes);
std::string describe(Site site);
/// Shared memory of a block, by the launch's names.
std::string describe_shared(const Block& block, uint64_t address);
/// Global memory, by region.
std::string describe_global(const void* address);

[[noreturn]] void fail_order(const Shadow& shadow, uint64_t page_begin, const Thread& viewer, Access access,
                             bool is_async, const ShadowNode& node);
void report_proxy(const Shadow& shadow, uint64_t page_begin, const Thread& viewer, Access access,
                  const ShadowNode& node, bool is_error);
[[noreturn]] void fail_deadlock();
/// "rank 1's bulk_store (...) has written it", for the host's outputs.
std::string describe_access(const ShadowNode& node);

/// Whether a log is kept; ask before a line is made.
inline bool keeps_log() {
    return machine->options.keep_log;
}
/// "<step> <line>"
void log_line(const std::string& line);
/// What the current thread comes to.
void log_instruction();

}  // namespace mok::emu
