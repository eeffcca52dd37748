// What a rank publishes about a call before the first barrier, so that every rank can see that all mean the
// same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

namespace mok {

enum class CallKind : int64_t { kForward = 1, kBackward = 2, kRecompute = 3 };

/// Plain 64-bit fields: the same layout in every process.
struct CallHeader {
    // Data of this rank's call; may differ between ranks.
    int64_t num_tokens;
    int64_t x_offset;     // of x in this rank's window
    int64_t dout_offset;  // of dout, backward only

    // Settings; must be equal on all ranks.
    int64_t kind;
    int64_t num_experts;
    int64_t top_k;
    int64_t hidden;
    int64_t intermediate;
    int64_t shared_intermediate;
    int64_t dtype;
    int64_t activation;
    int64_t limit_bits;
    int64_t save;
    int64_t ring_rows;
    int64_t max_tokens;
    int64_t has_bias;
    int64_t shared_gate;
    int64_t gradients;  // bit mask of the gradients asked for
};
static_assert(std::is_trivially_copyable_v<CallHeader>);

// As words: first the data, then the settings.
inline constexpr uint32_t kHeaderWords = sizeof(CallHeader) / sizeof(int64_t);
inline constexpr uint32_t kHeaderDataWords = 3;
static_assert(offsetof(CallHeader, kind) == kHeaderDataWords * sizeof(int64_t));

/// Empty when `theirs` (of rank `their_rank`) agrees with `ours`; else one sentence that names the setting.
std::string describe_mismatch(const CallHeader& ours, int our_rank, const CallHeader& theirs, int their_rank);

}  // namespace mok
