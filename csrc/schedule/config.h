// Tile shapes and the tunable numbers of the megakernels as data, and the pure function that picks a row.
//
// A row may change speed, never bits: no tile splits its contraction, and the order of rows inside a segment
// is the plan's.
#pragma once

#include <cstdint>

namespace mok::schedule {

enum class Arch : int32_t { kSm90 = 90 };

struct KernelConfig {
    Arch arch = Arch::kSm90;
    int64_t min_intermediate = 0;  // the row serves layers at least this wide
    int32_t block_m = 128;         // rows of a row block: what readiness is counted for
    int32_t gate_up_n = 128;       // columns of I per tile: gate's and up's lie side by side as N = 256
    int32_t down_n = 256;          // columns of H
    int32_t dhidden_n = 256;       // columns of I
    int32_t dx_n = 256;            // columns of H
    int32_t wgrad_m = 128;
    int32_t wgrad_n = 256;
    int32_t bias_n = 256;         // columns per bias-gradient task
    int32_t rows_per_store = 64;  // rows of a tile stored and signalled together: one consumer warpgroup's
    int32_t group_m = 16;         // row tiles that run side by side through all column tiles
    int32_t lag_waves = 2;        // waves of tasks between a row block's production and its consumption
    int32_t group_waves = 2;      // a long segment is interleaved in groups of about this many waves
    int32_t window_blocks = 8;    // row blocks within which pulls rotate over source ranks
    int32_t pull_bytes = 4096;    // the largest piece of a row that moves as one copy
};

/// The last row that serves a layer wins. From the design study on H200, without a record here: a lag of two
/// waves is best at I = 768, three at I >= 1536.
constexpr KernelConfig kConfigs[] = {
    {.arch = Arch::kSm90, .min_intermediate = 0, .lag_waves = 2},
    {.arch = Arch::kSm90, .min_intermediate = 1536, .lag_waves = 3},
};

/// The row of kConfigs for a layer of this width; null when none serves the architecture.
constexpr const KernelConfig* choose_config(Arch arch, int64_t intermediate) {
    const KernelConfig* chosen = nullptr;
    for (const KernelConfig& row : kConfigs) {
        if (row.arch == arch && intermediate >= row.min_intermediate) chosen = &row;
    }
    return chosen;
}

}  // namespace mok::schedule
