// The KernelTable of one instruction set: run-time dtype and activation onto the templates.
#pragma once

#include "csrc/cpu/gemm_impl.h"
#include "csrc/cpu/rows_impl.h"

namespace mok::cpu::MOK_ISA {

template <typename T>
T* as(void* p) {
    return static_cast<T*>(p);
}

template <typename T>
const T* as(const void* p) {
    return static_cast<const T*>(p);
}

// One call for each (dtype, activation); `ROW` is a template over both.
#define MOK_FOR_ACTIVATION(ROW, T, ...)                                       \
    switch (spec.kind) {                                                      \
        case Activation::kSwiglu:                                             \
            return ROW<T, Activation::kSwiglu>(spec.limit, __VA_ARGS__);      \
        case Activation::kSwigluLimit:                                        \
            return ROW<T, Activation::kSwigluLimit>(spec.limit, __VA_ARGS__); \
        case Activation::kGptOss:                                             \
            return ROW<T, Activation::kGptOss>(spec.limit, __VA_ARGS__);      \
    }

template <typename T>
void activation_forward_as(const ActivationSpec& spec, const float* g_acc, const float* u_acc,
                           const float* b_g, const float* b_u, T* g, T* u, T* h, int64_t n) {
    MOK_FOR_ACTIVATION(activation_forward_row, T, g_acc, u_acc, b_g, b_u, g, u, h, n)
}

template <typename T>
void activation_as(const ActivationSpec& spec, const T* g, const T* u, T* h, int64_t n) {
    MOK_FOR_ACTIVATION(activation_row, T, g, u, h, n)
}

template <typename T>
void activation_backward_as(const ActivationSpec& spec, const T* g, const T* u, const float* a, float w,
                            T* dg, T* du, T* hw, float* dw_partials, int64_t n) {
    MOK_FOR_ACTIVATION(activation_backward_row, T, g, u, a, w, dg, du, hw, dw_partials, n)
}

#undef MOK_FOR_ACTIVATION

inline void activation_forward(DType compute, const ActivationSpec& spec, const float* g_acc,
                               const float* u_acc, const float* b_g, const float* b_u, void* g, void* u,
                               void* h, int64_t n) {
    if (compute == DType::kBFloat16) {
        return activation_forward_as(spec, g_acc, u_acc, b_g, b_u, as<bf16>(g), as<bf16>(u), as<bf16>(h), n);
    }
    activation_forward_as(spec, g_acc, u_acc, b_g, b_u, as<float>(g), as<float>(u), as<float>(h), n);
}

inline void activation(DType compute, const ActivationSpec& spec, const void* g, const void* u, void* h,
                       int64_t n) {
    if (compute == DType::kBFloat16) return activation_as(spec, as<bf16>(g), as<bf16>(u), as<bf16>(h), n);
    activation_as(spec, as<float>(g), as<float>(u), as<float>(h), n);
}

inline void activation_backward(DType compute, const ActivationSpec& spec, const void* g, const void* u,
                                const float* a, float w, void* dg, void* du, void* hw, float* dw_partials,
                                int64_t n) {
    if (compute == DType::kBFloat16) {
        return activation_backward_as(spec, as<bf16>(g), as<bf16>(u), a, w, as<bf16>(dg), as<bf16>(du),
                                      as<bf16>(hw), dw_partials, n);
    }
    activation_backward_as(spec, as<float>(g), as<float>(u), a, w, as<float>(dg), as<float>(du),
                           as<float>(hw), dw_partials, n);
}

inline void store_rounded(DType compute, const float* acc, const float* bias, void* out, int64_t n) {
    if (compute == DType::kBFloat16) return store_row(acc, bias, as<bf16>(out), n);
    store_row(acc, bias, as<float>(out), n);
}

inline void weighted_sum(DType compute, const void* const* rows, const float* weights, int64_t num_rows,
                         void* out, int64_t n) {
    if (compute == DType::kBFloat16) return weighted_sum_row(rows, weights, num_rows, as<bf16>(out), n);
    weighted_sum_row(rows, weights, num_rows, as<float>(out), n);
}

inline float dot(DType compute, const void* row, const float* b, int64_t n) {
    if (compute == DType::kBFloat16) return dot_row(as<bf16>(row), b, n);
    return dot_row(as<float>(row), b, n);
}

inline void axpy(DType compute, float w, const void* row, float* acc, int64_t n) {
    if (compute == DType::kBFloat16) return axpy_row(w, as<bf16>(row), acc, n);
    axpy_row(w, as<float>(row), acc, n);
}

inline void store_gradient(DType out_dtype, const float* acc, void* out, bool accumulate, int64_t n) {
    if (out_dtype == DType::kBFloat16) return store_gradient_row(acc, as<bf16>(out), accumulate, n);
    store_gradient_row(acc, as<float>(out), accumulate, n);
}

inline const KernelTable& table(const char* name) {
    static const KernelTable entries{name,          packed_b_bytes,     pack_b,     gemm_scratch_bytes,
                                     gemm,          activation_forward, activation, activation_backward,
                                     store_rounded, weighted_sum,       dot,        axpy,
                                     store_gradient};
    return entries;
}

}  // namespace mok::cpu::MOK_ISA
