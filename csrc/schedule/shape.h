// What a schedule depends on besides the routing: sizes, pass, saving policy, wanted gradients, tile counts.
#pragma once

#include <cstdint>

#include "csrc/layout/types.h"
#include "csrc/schedule/config.h"

namespace mok::schedule {

enum class Pass : int32_t { kForward = 0, kRecompute = 1, kBackward = 2 };

/// What forward kept of the first chunk: nothing, gate and up, or the dispatched x as well.
enum class Save : int32_t { kNone = 0, kGateUp = 1, kAll = 2 };

/// Bits of the `gradients` mask, as the ops have it. kRouted and kShared are the first of gate, up, down;
/// three bits further are the routed biases.
enum Gradient : int64_t {
    kGradientX = 1 << 0,
    kGradientWeights = 1 << 1,
    kGradientSharedWeight = 1 << 2,
    kGradientRouted = 1 << 3,
    kGradientShared = 1 << 9,
};

/// The three matrices of an expert, in the order of their weight-gradient tiles.
enum Matrix : int32_t { kGate = 0, kUp = 1, kDown = 2, kNumMatrices = 3 };

/// Stages a row block goes through, in this order.
enum class Phase : int32_t { kGateUp = 0, kDown = 1, kDHidden = 2, kDx = 3, kWgrad = 4 };
constexpr int32_t kMaxPhases = 4;  // of one pass

/// What pull warps fetch.
enum class Pulled : int32_t { kNone = 0, kX = 1, kDout = 2 };

/// Tiles of one expert set: per row block, and per span (the rows of one expert in one chunk) for wgrad and
/// bias.
struct ExpertTiles {
    int32_t gate_up, down, dhidden, dx, router;
    int32_t wgrad_m[kNumMatrices], wgrad_n[kNumMatrices];  // 0: that gradient is not wanted
    int32_t bias[kNumMatrices];

    MOK_HD int32_t wgrad_tiles(int32_t matrix) const { return wgrad_m[matrix] * wgrad_n[matrix]; }
    MOK_HD int32_t span_tiles() const {
        int32_t tiles = 0;
        for (int32_t m = 0; m < kNumMatrices; ++m) tiles += wgrad_tiles(m) + bias[m];
        return tiles;
    }
    /// Tasks of a phase per row block; 0 for wgrad.
    MOK_HD int32_t per_block(Phase phase) const {
        switch (phase) {
            case Phase::kGateUp:
                return gate_up;
            case Phase::kDown:
                return down;
            case Phase::kDHidden:
                return dhidden;
            case Phase::kDx:
                return dx + router;
            case Phase::kWgrad:
                return 0;
        }
        return 0;
    }
};

/// One stage of the pass and its place in the order.
struct PhaseRule {
    Phase phase;
    int32_t lag_blocks;  // row blocks by which it trails the pass's first phase
    bool skips_first;    // no tasks for the first chunk: forward saved what they would make
    Pulled pulls_first;  // what is pulled for it in the first chunk,
    Pulled pulls_later;  // and in the others
};

struct ScheduleSizes {
    Pass pass;
    Save save;
    int64_t hidden, intermediate;
    int64_t shared_intermediate;  // 0: no shared expert
    int64_t num_tokens;           // of this rank: the shared expert's rows
    int32_t num_local_experts;
    int64_t ring_rows;
    int64_t gradients;  // mask; forward: 0
    bool zero_idle;     // weight gradients of idle experts are written as zeros
    int32_t num_sms;    // one CTA each
    int64_t row_bytes;  // of x and dout
};

struct ScheduleShape {
    ScheduleSizes sizes;
    int32_t block_m;
    int32_t ring_blocks;
    int32_t rows_per_store;
    int32_t wgrad_m;
    int32_t group_m;
    int32_t window_blocks;
    int32_t max_piece_blocks;  // longer stretches of a segment are interleaved in several groups
    int32_t pull_pieces;       // copies per row
    int32_t num_phases;
    PhaseRule phases[kMaxPhases];
    /// Before a piece's first phase come all phases of the pieces whose ring slots, `reuse_blocks` earlier,
    /// are used again: by the piece itself (forward), or by any row block of its chunk (backward, where a
    /// pull that the piece waits for may fill rows of the whole chunk).
    int32_t reuse_blocks;
    bool reuse_by_chunk;
    ExpertTiles routed, shared;
    int32_t num_shared_blocks;

    MOK_HD bool wants(int64_t bits) const { return (sizes.gradients & bits) != 0; }
    MOK_HD bool backward() const { return sizes.pass == Pass::kBackward; }
    /// Whether x, gate and up of a chunk lie in the saved context instead of the ring.
    MOK_HD bool saves_x(int32_t chunk) const { return chunk == 0 && sizes.save == Save::kAll; }
    MOK_HD bool saves_gate_up(int32_t chunk) const { return chunk == 0 && sizes.save != Save::kNone; }
    /// Whether the pulls of a chunk write zeros to padding rows: wherever wgrad sums over them.
    MOK_HD bool zeroes_padding(int32_t chunk) const {
        return backward() ? routed.span_tiles() > 0 : saves_x(chunk);
    }
    MOK_HD Pulled pulled(int32_t phase_idx, int32_t chunk) const {
        return chunk == 0 ? phases[phase_idx].pulls_first : phases[phase_idx].pulls_later;
    }
    MOK_HD bool pulls(Pulled what, int32_t chunk) const {
        for (int32_t k = 0; k < num_phases; ++k) {
            if (pulled(k, chunk) == what) return true;
        }
        return false;
    }
    /// Index of a phase of this pass, -1 when the pass has no such stage.
    MOK_HD int32_t phase_index(Phase phase) const {
        for (int32_t k = 0; k < num_phases; ++k) {
            if (phases[k].phase == phase) return k;
        }
        return -1;
    }
    MOK_HD bool runs(Phase phase, int32_t chunk) const {
        const int32_t k = phase_index(phase);
        return k >= 0 && !(chunk == 0 && phases[k].skips_first);
    }
    /// Tasks of one phase of the shared expert; saved gate and up are not made again.
    MOK_HD int64_t shared_tasks(int32_t phase_idx) const {
        if (num_shared_blocks == 0 || phases[phase_idx].skips_first) return 0;
        if (phases[phase_idx].phase == Phase::kWgrad) return shared.span_tiles();
        return static_cast<int64_t>(num_shared_blocks) * shared.per_block(phases[phase_idx].phase);
    }
};

/// Tiles of an expert set of width `inner`; `matrices` and `biases` are bit masks over Matrix.
MOK_HD ExpertTiles expert_tiles(const ScheduleSizes& sizes, const KernelConfig& config, int64_t inner,
                                int64_t matrices, int64_t biases, bool want_x, bool want_weights) {
    const auto tiles = [](int64_t columns, int32_t width) {
        return static_cast<int32_t>(ceil_div<int64_t>(columns, width));
    };
    ExpertTiles result{};
    if (sizes.pass != Pass::kBackward) {
        result.gate_up = tiles(inner, config.gate_up_n);
        result.down = sizes.pass == Pass::kForward ? tiles(sizes.hidden, config.down_n) : 0;
        return result;
    }
    if (!want_x && !want_weights && matrices == 0 && biases == 0) return result;
    result.gate_up = tiles(inner, config.gate_up_n);
    result.dhidden = tiles(inner, config.dhidden_n);
    result.dx = want_x ? tiles(sizes.hidden, config.dx_n) : 0;
    // The first dx tile of a row block also finishes its router gradients; without dx a task of its own does.
    result.router = want_weights && !want_x ? 1 : 0;
    for (int32_t m = 0; m < kNumMatrices; ++m) {
        const int64_t rows = m == kDown ? sizes.hidden : inner;
        const int64_t columns = m == kDown ? inner : sizes.hidden;
        if ((matrices >> m & 1) != 0) {
            result.wgrad_m[m] = tiles(rows, config.wgrad_m);
            result.wgrad_n[m] = tiles(columns, config.wgrad_n);
        }
        if ((biases >> m & 1) != 0) result.bias[m] = tiles(rows, config.bias_n);
    }
    return result;
}

/// Fills phases, lags and the length of interleaved groups from the tile counts.
MOK_HD void set_phases(const KernelConfig& config, ScheduleShape& shape) {
    const Save save = shape.sizes.save;
    const bool replays_first = shape.backward() && save == Save::kNone;
    // x is an operand of gate and up, and of their weight gradients.
    const bool x_for_wgrad = shape.backward() && shape.wants(3 * kGradientRouted) && save == Save::kGateUp;
    const bool routed = shape.routed.gate_up > 0;
    const Pulled x = routed ? Pulled::kX : Pulled::kNone;
    const Pulled dout = routed ? Pulled::kDout : Pulled::kNone;
    const int64_t lag_tasks = static_cast<int64_t>(config.lag_waves) * shape.sizes.num_sms;
    int32_t lag = 0;
    const auto add = [&](Phase phase, bool skips_first, Pulled first, Pulled later) {
        shape.phases[shape.num_phases++] = PhaseRule{phase, lag, skips_first, first, later};
    };
    const auto trail = [&](int32_t tiles) {
        lag += static_cast<int32_t>(ceil_div<int64_t>(lag_tasks, tiles > 0 ? tiles : 1));
    };
    if (!shape.backward()) {
        add(Phase::kGateUp, false, x, x);
        trail(shape.routed.gate_up);
        if (shape.sizes.pass == Pass::kForward) add(Phase::kDown, false, Pulled::kNone, Pulled::kNone);
    } else {
        add(Phase::kGateUp, !replays_first, replays_first ? x : Pulled::kNone, x);
        trail(shape.routed.gate_up);
        add(Phase::kDHidden, false, dout, dout);
        trail(shape.routed.dhidden);
        if (shape.routed.per_block(Phase::kDx) + shape.shared.per_block(Phase::kDx) > 0) {
            add(Phase::kDx, false, Pulled::kNone, Pulled::kNone);
        }
        if (shape.routed.span_tiles() + shape.shared.span_tiles() > 0) {
            add(Phase::kWgrad, false, x_for_wgrad ? x : Pulled::kNone, Pulled::kNone);
        }
    }
    int32_t fewest = shape.routed.gate_up;
    if (shape.backward() && shape.routed.dhidden < fewest) fewest = shape.routed.dhidden;
    const int64_t group_tasks = static_cast<int64_t>(config.group_waves) * shape.sizes.num_sms;
    shape.max_piece_blocks = static_cast<int32_t>(
        round_up<int64_t>(ceil_div<int64_t>(group_tasks, fewest > 0 ? fewest : 1), config.group_m));
}

/// The shape of one call. The plan's pad is block_m, and ring_rows a multiple of it.
MOK_HD ScheduleShape make_schedule_shape(const ScheduleSizes& sizes, const KernelConfig& config) {
    ScheduleShape shape{};
    shape.sizes = sizes;
    shape.block_m = config.block_m;
    shape.ring_blocks = static_cast<int32_t>(sizes.ring_rows / config.block_m);
    shape.rows_per_store = config.rows_per_store;
    shape.wgrad_m = config.wgrad_m;
    shape.group_m = config.group_m;
    shape.window_blocks = config.window_blocks;
    shape.pull_pieces = static_cast<int32_t>(ceil_div<int64_t>(sizes.row_bytes, config.pull_bytes));
    shape.reuse_blocks = shape.ring_blocks;
    shape.reuse_by_chunk = shape.backward();
    shape.routed = expert_tiles(sizes, config, sizes.intermediate, sizes.gradients / kGradientRouted & 7,
                                sizes.gradients / kGradientRouted >> kNumMatrices & 7,
                                shape.wants(kGradientX), shape.wants(kGradientWeights));
    // dx of a token is the sum over its routes and the shared expert, so wanting it runs both.
    if (sizes.shared_intermediate > 0) {
        shape.shared =
            expert_tiles(sizes, config, sizes.shared_intermediate, sizes.gradients / kGradientShared & 7, 0,
                         shape.wants(kGradientX), shape.wants(kGradientSharedWeight));
        shape.num_shared_blocks = static_cast<int32_t>(ceil_div<int64_t>(sizes.num_tokens, config.block_m));
    }
    set_phases(config, shape);
    return shape;
}

}  // namespace mok::schedule
