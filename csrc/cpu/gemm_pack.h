// Packing. Every factor becomes 32-bit words, one per (index, step): an FP32, a BF16 widened to FP32, or on
// instruction sets with BF16 pairs two BF16 of neighbouring k (the earlier in the low half, 0 past an odd
// end).
//
//   packed B   [panel of kTileColumns][step][column]     zeros past n
//   packed A   K-contiguous:  [row][step], a plain copy: rows are broadcast, so nothing is transposed
//              M-contiguous:  [panel of kTileRows][step][row]
#pragma once

#include "csrc/cpu/vec_common.h"

namespace mok::cpu::MOK_ISA {

constexpr int kTileColumns = kTileVectors * kLanes;

/// How elements of type T become words. kRound: FP32 data, BF16 factors. kPairs: two k per word.
template <typename T, bool kRound, bool kPairs>
struct Words4 {
    static constexpr bool kWide = sizeof(T) == 4;
    static constexpr int kPerStep = kPairs ? 2 : 1;
    /// Elements in a vector of raw words, and the steps each raw word holds.
    static constexpr int kSpan = kLanes * ((kWide && !kPairs) ? 1 : 2);
    static constexpr int kStepsPerRaw = (kWide || kPairs) ? 1 : 2;

    /// kSpan consecutive elements along k as kLanes raw words: BF16 stays as it lies, FP32 is rounded (and
    /// paired).
    static MOK_INLINE Words load_raw(const T* p) {
        if constexpr (!kWide) {
            return load_as<Words>(p);
        } else if constexpr (kPairs) {
            const Words low = round_words(load(p)), high = round_words(load(p + kLanes));
            return (shuffle<EverySecond<false>::template Source>(low, high) >> 16) |
                   (shuffle<EverySecond<true>::template Source>(low, high) & 0xffff0000u);
        } else {
            return one(load(p));
        }
    }

    /// kLanes consecutive steps along k.
    static MOK_INLINE Words load_steps(const T* p) {
        if constexpr (kPairs) return load_raw(p);
        return one(load(p));
    }

    /// One step of kLanes neighbouring indices, `count` of them there; `next` is the row of k + 1, null past
    /// the end.
    static MOK_INLINE Words load_indices(const T* p, const T* next, int64_t count) {
        if constexpr (kPairs) {
            const Words low = as_words(factor(load(p, count))) >> 16;
            return next ? low | (as_words(factor(load(next, count))) & 0xffff0000u) : low;
        }
        return one(load(p, count));
    }

  private:
    static MOK_INLINE Floats factor(Floats v) {
        if constexpr (kRound) return as_floats(round_words(v));
        return v;
    }
    static MOK_INLINE Words one(Floats v) {
        if constexpr (kRound) return as_words(round_to<bf16>(v));
        return as_words(v);
    }
};

inline int64_t num_steps(bool pairs, int64_t k) {
    return pairs ? ceil_div<int64_t>(k, 2) : k;
}

/// kLanes columns of a K-contiguous B, all of k, into `out` (the columns' place in their panel).
template <typename Source, typename T>
void pack_columns_transposed(const T* data, int64_t stride, int64_t columns, int64_t k, uint32_t* out) {
    for (int64_t k0 = 0; k0 < k; k0 += Source::kSpan) {
        Words rows[kLanes];
        if (columns >= kLanes && k0 + Source::kSpan <= k) {
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) rows[i] = Source::load_raw(data + i * stride + k0);
        } else {
            T corner[kLanes][Source::kSpan] = {};
            const int64_t there = k - k0 < Source::kSpan ? k - k0 : Source::kSpan;
            for (int64_t i = 0; i < columns && i < kLanes; ++i) {
                __builtin_memcpy(corner[i], data + i * stride + k0, static_cast<size_t>(there) * sizeof(T));
            }
            for (int i = 0; i < kLanes; ++i) rows[i] = Source::load_raw(corner[i]);
        }
        transpose(rows);
        const int64_t steps = ceil_div<int64_t>(k - k0, Source::kPerStep);
        if (steps >= kLanes * Source::kStepsPerRaw) {
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                if constexpr (Source::kStepsPerRaw == 1) {
                    store_as(out, rows[i]);
                } else {
                    store_as(out, rows[i] << 16);
                    store_as(out + kTileColumns, rows[i] & 0xffff0000u);
                }
                out += Source::kStepsPerRaw * kTileColumns;
            }
        } else {
            for (int64_t step = 0; step < steps; ++step, out += kTileColumns) {
                const Words raw = rows[step / Source::kStepsPerRaw];
                if constexpr (Source::kStepsPerRaw == 1) {
                    store_as(out, raw);
                } else {
                    store_as(out, step % 2 ? raw & 0xffff0000u : raw << 16);
                }
            }
        }
    }
}

template <typename T, bool kRound, bool kPairs>
void pack_b_panels(const Operand& b, int64_t n, int64_t k, uint32_t* out) {
    using Source = Words4<T, kRound, kPairs>;
    const T* data = static_cast<const T*>(b.data);
    const int64_t steps = num_steps(kPairs, k);
    for (int64_t n0 = 0; n0 < n; n0 += kTileColumns, out += steps * kTileColumns) {
        if (b.stride_k == 1) {
            for (int v = 0; v < kTileVectors; ++v) {
                const int64_t column = n0 + v * kLanes;
                const T* first = column < n ? data + column * b.stride_i : data;
                pack_columns_transposed<Source>(first, b.stride_i, n - column, k, out + v * kLanes);
            }
            continue;
        }
        for (int64_t step = 0; step < steps; ++step) {
            const int64_t at = step * Source::kPerStep;
            const T* row = data + at * b.stride_k + n0;
            const T* next = at + 1 < k ? row + b.stride_k : nullptr;
            for (int v = 0; v < kTileVectors; ++v) {
                const int64_t there = n - n0 - v * kLanes;
                const Words words =
                    there > 0
                        ? Source::load_indices(row + v * kLanes, next ? next + v * kLanes : nullptr, there)
                        : Words{};
                store_as(out + step * kTileColumns + v * kLanes, words);
            }
        }
    }
}

/// One packed word: element k of row i, and k + 1 (when it exists) in pairs.
template <typename T, bool kRound, bool kPairs>
MOK_INLINE Words last_step(const T* p, int64_t there) {
    T elements[2 * kLanes] = {};
    __builtin_memcpy(elements, p, static_cast<size_t>(there) * sizeof(T));
    return Words4<T, kRound, kPairs>::load_steps(elements);
}

/// Rows of a K-contiguous A: `rows` x `steps` words at out + i * row_words, from element k0 of k.
template <typename T, bool kRound, bool kPairs>
void pack_a_rows(const T* data, int64_t stride, int64_t rows, int64_t k0, int64_t k_end, uint32_t* out,
                 int64_t row_words) {
    using Source = Words4<T, kRound, kPairs>;
    constexpr int kStride = kLanes * Source::kPerStep;
    for (int64_t i = 0; i < rows; ++i) {
        const T* row = data + i * stride;
        uint32_t* to = out + i * row_words;
        int64_t at = k0;
        for (; at + kStride <= k_end; at += kStride, to += kLanes) store_as(to, Source::load_steps(row + at));
        // The words past the end are scratch: row_words leaves room for a whole vector.
        if (at < k_end) store_as(to, last_step<T, kRound, kPairs>(row + at, k_end - at));
    }
}

/// Panels of kTileRows rows of an M-contiguous A. A vector is stored per step and panel: what it writes past
/// the panel's kTileRows words is overwritten by the next step, and panel_words leaves room for the last
/// one's.
template <typename T, bool kRound, bool kPairs>
void pack_a_panels(const T* data, int64_t stride_k, int64_t rows, int64_t rows_there, int64_t k0,
                   int64_t k_end, uint32_t* out, int64_t panel_words) {
    using Source = Words4<T, kRound, kPairs>;
    static_assert(kTileRows <= kLanes, "a step of a panel is one vector");
    for (int64_t at = k0; at < k_end; at += Source::kPerStep, out += kTileRows) {
        const T* row = data + at * stride_k;
        const T* next = at + 1 < k_end ? row + stride_k : nullptr;
        uint32_t* to = out;
        for (int64_t i = 0; i < rows; i += kTileRows, to += panel_words) {
            store_as(to, Source::load_indices(row + i, next ? next + i : nullptr, rows_there - i));
        }
    }
}

}  // namespace mok::cpu::MOK_ISA
