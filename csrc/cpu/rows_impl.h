// The elementwise rows of the contract.
#pragma once

#include "csrc/cpu/activation_impl.h"

namespace mok::cpu::MOK_ISA {

constexpr int64_t kPartialColumns = 64;  // of the contract: a partial sum of dw covers this many columns
static_assert(kPartialColumns % kLanes == 0);

template <typename T, Activation kKind>
void activation_forward_row(float limit_value, const float* g_acc, const float* u_acc, const float* b_g,
                            const float* b_u, T* g, T* u, T* h, int64_t n) {
    const Floats limit = broadcast(limit_value);
    for (int64_t j = 0; j < n; j += kLanes) {
        const int64_t there = n - j;
        Floats gate = load(g_acc + j, there), up = load(u_acc + j, there);
        if (b_g) gate = gate + load(b_g + j, there);
        if (b_u) up = up + load(b_u + j, there);
        gate = round_to<T>(gate);
        up = round_to<T>(up);
        if (g) store(g + j, gate, there);
        if (u) store(u + j, up, there);
        if (h) store(h + j, activate<kKind>(gate, up, limit).p, there);
    }
}

template <typename T, Activation kKind>
void activation_row(float limit_value, const T* g, const T* u, T* h, int64_t n) {
    const Floats limit = broadcast(limit_value);
    for (int64_t j = 0; j < n; j += kLanes) {
        const int64_t there = n - j;
        store(h + j, activate<kKind>(load(g + j, there), load(u + j, there), limit).p, there);
    }
}

template <typename T, Activation kKind>
void activation_backward_row(float limit_value, const T* g, const T* u, const float* a, float w, T* dg, T* du,
                             T* hw, float* dw_partials, int64_t n) {
    const Floats limit = broadcast(limit_value), weight = broadcast(w);
    for (int64_t j0 = 0; j0 < n; j0 += kPartialColumns) {
        const int64_t end = n - j0 < kPartialColumns ? n : j0 + kPartialColumns;
        Floats partial{};
        for (int64_t j = j0; j < end; j += kLanes) {
            const int64_t there = end - j;
            const Activated act = activate<kKind>(load(g + j, there), load(u + j, there), limit);
            const Floats grad = load(a + j, there);
            const Floats scaled = weight * grad;
            if (dg) store(dg + j, scaled * act.dp_dg, there);
            if (du) store(du + j, scaled * act.dp_du, there);
            if (hw) store(hw + j, weight * act.p, there);
            // Lanes past the end add 0 x 0: act(0, 0) and the gradient are both 0 there.
            partial = madd(act.p, grad, partial);
        }
        if (dw_partials) dw_partials[j0 / kPartialColumns] = sum_lanes(partial);
    }
}

template <typename T>
void store_row(const float* acc, const float* bias, T* out, int64_t n) {
    for (int64_t j = 0; j < n; j += kLanes) {
        Floats v = load(acc + j, n - j);
        if (bias) v = v + load(bias + j, n - j);
        store(out + j, v, n - j);
    }
}

/// kVectors vectors of the sum stay in registers over all rows.
template <typename T, int kVectors>
MOK_INLINE void sum_columns(const void* const* rows, const float* weights, int64_t num_rows, T* out,
                            int64_t at, int64_t n) {
    Floats sum[kVectors] = {};
    for (int64_t r = 0; r < num_rows; ++r) {
        const T* row = static_cast<const T*>(rows[r]) + at;
        const Floats weight = broadcast(weights ? weights[r] : 1.0f);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            sum[v] = fma(weight, load(row + v * kLanes, n - at - v * kLanes), sum[v]);
        }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(out + at + v * kLanes, sum[v], n - at - v * kLanes);
}

template <typename T>
void weighted_sum_row(const void* const* rows, const float* weights, int64_t num_rows, T* out, int64_t n) {
    constexpr int kVectors = 4;
    int64_t j = 0;
    for (; j + kVectors * kLanes <= n; j += kVectors * kLanes) {
        sum_columns<T, kVectors>(rows, weights, num_rows, out, j, n);
    }
    for (; j < n; j += kLanes) sum_columns<T, 1>(rows, weights, num_rows, out, j, n);
}

/// Four interleaved chains, added in order, then a tree over the lanes.
template <typename T>
float dot_row(const T* row, const float* b, int64_t n) {
    constexpr int kChains = 4;
    Floats sums[kChains] = {};
    for (int64_t j0 = 0; j0 < n; j0 += kChains * kLanes) {
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; ++chain) {
            const int64_t j = j0 + chain * kLanes;
            if (j < n) sums[chain] = madd(load(row + j, n - j), load(b + j, n - j), sums[chain]);
        }
    }
    return sum_lanes(((sums[0] + sums[1]) + sums[2]) + sums[3]);
}

template <typename T>
void axpy_row(float w, const T* row, float* acc, int64_t n) {
    const Floats weight = broadcast(w);
    for (int64_t j = 0; j < n; j += kLanes) {
        store(acc + j, fma(weight, load(row + j, n - j), load(acc + j, n - j)), n - j);
    }
}

template <typename T>
void store_gradient_row(const float* acc, T* out, bool accumulate, int64_t n) {
    for (int64_t j = 0; j < n; j += kLanes) {
        Floats v = load(acc + j, n - j);
        if (accumulate) v = load(out + j, n - j) + v;
        store(out + j, v, n - j);
    }
}

}  // namespace mok::cpu::MOK_ISA
