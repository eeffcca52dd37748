// Loads, stores, rounding and shuffles over the primitives of vec_<instruction set>.h, which comes before it.
//
// A multiplication never feeds an addition except through fma() or madd(): the compiler then has no
// contraction to choose, and the same formula has the same bits wherever it is inlined.
#pragma once

#include "csrc/cpu/vec_types.h"

namespace mok::cpu::MOK_ISA {

/// BF16 in the upper half of each word; the lower half is not cleared. As mok::round_to_bf16.
MOK_INLINE Words round_words(Floats v) {
    const Words bits = as_words(v);
    const Words rounded = bits + (((bits >> 16) & 1u) + 0x7fffu);
    return v == v ? rounded : bits | 0x00400000u;
}

MOK_INLINE Floats load(const float* p) {
    return load_as<Floats>(p);
}
MOK_INLINE Floats load(const bf16* p) {
    return as_floats(widen(load_as<Halves>(p)) << 16);
}
MOK_INLINE void store(float* p, Floats v) {
    store_as(p, v);
}
MOK_INLINE void store(bf16* p, Floats v) {
    store_as(p, narrow(round_words(v) >> 16));
}

/// The value a store of type T keeps: rn(.) of the contract.
template <typename T>
MOK_INLINE Floats round_to(Floats v);
template <>
MOK_INLINE Floats round_to<float>(Floats v) {
    return v;
}
template <>
MOK_INLINE Floats round_to<bf16>(Floats v) {
    return as_floats(round_words(v) & 0xffff0000u);
}

/// A count of exactly kLanes elements, known to the compiler.
struct Whole {};

template <typename T>
MOK_INLINE Floats load(const T* p, Whole) {
    return load(p);
}

template <typename T>
MOK_INLINE void store(T* p, Floats v, Whole) {
    store(p, v);
}

/// The first `count` elements, zeros behind them; touches no other memory.
template <typename T>
MOK_INLINE Floats load(const T* p, int64_t count) {
    if (count >= kLanes) return load(p);
    T elements[kLanes] = {};
    __builtin_memcpy(elements, p, static_cast<size_t>(count) * sizeof(T));
    return load(elements);
}

template <typename T>
MOK_INLINE void store(T* p, Floats v, int64_t count) {
    if (count >= kLanes) return store(p, v);
    T elements[kLanes];
    store(elements, v);
    __builtin_memcpy(p, elements, static_cast<size_t>(count) * sizeof(T));
}

/// A fixed tree: lane i + lane i + width/2, halving.
MOK_INLINE float sum_lanes(Floats v) {
    float lanes[kLanes];
    store(lanes, v);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

// Shuffles.

template <int... kIndex>
struct Lanes {};

template <template <int> class Source, typename Sequence>
struct MakeLanes;
template <template <int> class Source, size_t... kLane>
struct MakeLanes<Source, std::index_sequence<kLane...>> {
    using type = Lanes<Source<static_cast<int>(kLane)>::value...>;
};

template <int... kIndex>
MOK_INLINE Words shuffle(Words a, Words b, Lanes<kIndex...>) {
    return __builtin_shufflevector(a, b, kIndex...);
}

/// shuffle<S>(a, b): lane i of the result is lane S<i>::value of a followed by b.
template <template <int> class Source>
MOK_INLINE Words shuffle(Words a, Words b) {
    return shuffle(a, b, typename MakeLanes<Source, std::make_index_sequence<kLanes>>::type{});
}

/// Interleaves units of kUnit words inside each group of four lanes: the low (high) half of a's group with
/// b's.
template <int kUnit, bool kHigh>
struct Interleave {
    template <int i>
    struct Source {
        static constexpr int in_group = i % 4, unit = in_group / kUnit, half = kHigh ? 2 : 0;
        static constexpr int value =
            i - in_group + half + (unit / 2) * kUnit + in_group % kUnit + (unit % 2 ? kLanes : 0);
    };
};

/// Blocks of kBlock lanes: the even (odd) ones of a and b, alternating.
template <int kBlock, bool kOdd>
struct TakeBlocks {
    template <int i>
    struct Source {
        static constexpr int block = i / kBlock;
        static constexpr int value =
            (block / 2 * 2 + (kOdd ? 1 : 0)) * kBlock + i % kBlock + (block % 2 ? kLanes : 0);
    };
};

/// Every second lane of a followed by b.
template <bool kOdd>
struct EverySecond {
    template <int i>
    struct Source {
        static constexpr int value = 2 * i + (kOdd ? 1 : 0);
    };
};

template <int kBlock>
MOK_INLINE void exchange_blocks(Words (&rows)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
        if (i & kBlock) continue;
        const Words a = rows[i], b = rows[i + kBlock];
        rows[i] = shuffle<TakeBlocks<kBlock, false>::template Source>(a, b);
        rows[i + kBlock] = shuffle<TakeBlocks<kBlock, true>::template Source>(a, b);
    }
}

/// rows[i] lane j <-> rows[j] lane i.
MOK_INLINE void transpose(Words (&rows)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i += 4) {
        const Words low01 = shuffle<Interleave<1, false>::Source>(rows[i], rows[i + 1]);
        const Words high01 = shuffle<Interleave<1, true>::Source>(rows[i], rows[i + 1]);
        const Words low23 = shuffle<Interleave<1, false>::Source>(rows[i + 2], rows[i + 3]);
        const Words high23 = shuffle<Interleave<1, true>::Source>(rows[i + 2], rows[i + 3]);
        rows[i] = shuffle<Interleave<2, false>::Source>(low01, low23);
        rows[i + 1] = shuffle<Interleave<2, true>::Source>(low01, low23);
        rows[i + 2] = shuffle<Interleave<2, false>::Source>(high01, high23);
        rows[i + 3] = shuffle<Interleave<2, true>::Source>(high01, high23);
    }
    if constexpr (kLanes >= 8) exchange_blocks<4>(rows);
    if constexpr (kLanes >= 16) exchange_blocks<8>(rows);
}

}  // namespace mok::cpu::MOK_ISA
