// The vector types every kernel is written in, over GCC vector extensions: kLanes FP32 lanes of the
// instruction set that the including isa_*.cpp has switched on. These headers are included after that file's
// target pragma and live in its namespace (MOK_ISA), so that no two instruction sets share a symbol.
#pragma once

#if !defined(MOK_ISA) || !defined(MOK_LANES)
#error "vec_types.h is included by isa_*.cpp only, which say what MOK_ISA and MOK_LANES are"
#endif

#define MOK_INLINE inline __attribute__((always_inline))

namespace mok::cpu::MOK_ISA {

constexpr int kLanes = MOK_LANES;

typedef float Floats __attribute__((vector_size(4 * MOK_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * MOK_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * MOK_LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * MOK_LANES)));

MOK_INLINE Floats broadcast(float value) {
    return Floats{} + value;
}
MOK_INLINE Words broadcast(uint32_t value) {
    return Words{} + value;
}

MOK_INLINE Floats as_floats(Words v) {
    return (Floats)v;
}
MOK_INLINE Words as_words(Floats v) {
    return (Words)v;
}

template <typename Vector>
MOK_INLINE Vector load_as(const void* p) {
    Vector v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
}

template <typename Vector>
MOK_INLINE void store_as(void* p, Vector v) {
    __builtin_memcpy(p, &v, sizeof(v));
}

}  // namespace mok::cpu::MOK_ISA
