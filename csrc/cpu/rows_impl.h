// The elementwise rows of the contract.
#pragma once

#include "csrc/cpu/activation_impl.h"

namespace mok::cpu::MOK_ISA {

constexpr int64_t kPartialColumns = 64;  // of the contract: a partial sum of dw covers this many columns
static_assert(kPartialColumns % kLanes == 0);

/// body(j, count) for each vector of columns [begin, end); count is Whole{} for all but a shorter last one.
template <typename Body>
MOK_INLINE void for_columns(int64_t begin, int64_t end, const Body& body) {
    int64_t j = begin;
    for (; j + kLanes <= end; j += kLanes) body(j, Whole{});
    if (j < end) body(j, end - j);
}

#define MOK_COLUMN_BODY [&](int64_t j, auto count) __attribute__((always_inline))

template <typename T, Activation kKind>
void activation_forward_row(float limit_value, const float* g_acc, const float* u_acc, const float* b_g,
                            const float* b_u, T* g, T* u, T* h, int64_t n) {
    const Floats limit = broadcast(limit_value);
    for_columns(
        0, n, MOK_COLUMN_BODY {
            Floats gate = load(g_acc + j, count), up = load(u_acc + j, count);
            if (b_g) gate = gate + load(b_g + j, count);
            if (b_u) up = up + load(b_u + j, count);
            gate = round_to<T>(gate);
            up = round_to<T>(up);
            if (g) store(g + j, gate, count);
            if (u) store(u + j, up, count);
            if (h) store(h + j, activate<kKind>(gate, up, limit).p, count);
        });
}

template <typename T, Activation kKind>
void activation_row(float limit_value, const T* g, const T* u, T* h, int64_t n) {
    const Floats limit = broadcast(limit_value);
    for_columns(
        0, n, MOK_COLUMN_BODY {
            store(h + j, activate<kKind>(load(g + j, count), load(u + j, count), limit).p, count);
        });
}

template <typename T, Activation kKind>
void activation_backward_row(float limit_value, const T* g, const T* u, const float* a, float w, T* dg, T* du,
                             T* hw, float* dw_partials, int64_t n) {
    const Floats limit = broadcast(limit_value), weight = broadcast(w);
    for (int64_t begin = 0; begin < n; begin += kPartialColumns) {
        const int64_t end = n - begin < kPartialColumns ? n : begin + kPartialColumns;
        Floats partial{};
        for_columns(
            begin, end, MOK_COLUMN_BODY {
                const Activated act = activate<kKind>(load(g + j, count), load(u + j, count), limit);
                const Floats grad = load(a + j, count);
                const Floats scaled = weight * grad;
                if (dg) store(dg + j, scaled * act.dp_dg, count);
                if (du) store(du + j, scaled * act.dp_du, count);
                if (hw) store(hw + j, weight * act.p, count);
                // Lanes past the end add 0 x 0: act(0, 0) and the gradient are both 0 there.
                partial = madd(act.p, grad, partial);
            });
        if (dw_partials) dw_partials[begin / kPartialColumns] = sum_lanes(partial);
    }
}

template <typename T>
void store_row(const float* acc, const float* bias, T* out, int64_t n) {
    for_columns(
        0, n, MOK_COLUMN_BODY {
            Floats v = load(acc + j, count);
            if (bias) v = v + load(bias + j, count);
            store(out + j, v, count);
        });
}

/// kVectors vectors of the sum, whose last has `count` columns, stay in registers over all rows.
template <int kVectors, typename T, typename Count>
MOK_INLINE void sum_columns(const void* const* rows, const float* weights, int64_t num_rows, T* out,
                            int64_t j, Count count) {
    Floats sum[kVectors] = {};
    for (int64_t r = 0; r < num_rows; ++r) {
        const T* row = static_cast<const T*>(rows[r]) + j;
        const Floats weight = broadcast(weights ? weights[r] : 1.0f);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[v] = fma(weight, load(row + v * kLanes, count), sum[v]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(out + j + v * kLanes, sum[v], count);
}

template <typename T>
void weighted_sum_row(const void* const* rows, const float* weights, int64_t num_rows, T* out, int64_t n) {
    constexpr int kVectors = 4;
    int64_t first = 0;
    for (; first + kVectors * kLanes <= n; first += kVectors * kLanes) {
        sum_columns<kVectors>(rows, weights, num_rows, out, first, Whole{});
    }
    for_columns(
        first, n, MOK_COLUMN_BODY { sum_columns<1>(rows, weights, num_rows, out, j, count); });
}

/// Four interleaved chains over whole groups of four vectors, the rest on the first; then the chains in order
/// and a tree over the lanes.
template <typename T>
float dot_row(const T* row, const float* b, int64_t n) {
    constexpr int kChains = 4;
    Floats sums[kChains] = {};
    int64_t first = 0;
    for (; first + kChains * kLanes <= n; first += kChains * kLanes) {
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; ++chain) {
            const int64_t j = first + chain * kLanes;
            sums[chain] = madd(load(row + j), load(b + j), sums[chain]);
        }
    }
    for_columns(
        first, n, MOK_COLUMN_BODY { sums[0] = madd(load(row + j, count), load(b + j, count), sums[0]); });
    return sum_lanes(((sums[0] + sums[1]) + sums[2]) + sums[3]);
}

template <typename T>
void axpy_row(float w, const T* row, float* acc, int64_t n) {
    const Floats weight = broadcast(w);
    for_columns(
        0, n,
        MOK_COLUMN_BODY { store(acc + j, fma(weight, load(row + j, count), load(acc + j, count)), count); });
}

template <typename T>
void store_gradient_row(const float* acc, T* out, bool accumulate, int64_t n) {
    for_columns(
        0, n, MOK_COLUMN_BODY {
            Floats v = load(acc + j, count);
            if (accumulate) v = load(out + j, count) + v;
            store(out + j, v, count);
        });
}

#undef MOK_COLUMN_BODY

}  // namespace mok::cpu::MOK_ISA
