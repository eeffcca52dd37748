// mok._C.kernels: the kernel tables over NumPy arrays, for tests and benchmarks. BF16 arrays are uint16 bit
// patterns; `compute` is "bf16" or "fp32"; `isa` is a name of available().
#include "csrc/cpu/kernels.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/cpu/isa_tables.h"
#include "csrc/layout/check.h"
#include "csrc/layout/types.h"

namespace py = pybind11;

namespace mok::python {
namespace {

using cpu::Activation;
using cpu::ActivationSpec;
using cpu::Operand;

struct FreeDeleter {
    void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, FreeDeleter>;

Buffer aligned(int64_t bytes) {
    return Buffer(std::aligned_alloc(64, static_cast<size_t>(round_up<int64_t>(bytes + 1, 64))));
}

DType compute_type(const std::string& name) {
    MOK_CHECK(name == "bf16" || name == "fp32", "compute is '", name, "'; it must be 'bf16' or 'fp32'.");
    return name == "bf16" ? DType::kBFloat16 : DType::kFloat32;
}

DType array_type(const char* what, const py::array& array) {
    const bool is_bf16 = py::isinstance<py::array_t<uint16_t>>(array);
    MOK_CHECK(is_bf16 || py::isinstance<py::array_t<float>>(array), what,
              " has another dtype than uint16 (BF16 bits) and float32; convert it.");
    return is_bf16 ? DType::kBFloat16 : DType::kFloat32;
}

/// The data of a one-dimensional contiguous array of `n` elements of that type; null for None.
void* row(const char* what, const std::optional<py::array>& array, DType dtype, int64_t n) {
    if (!array) return nullptr;
    MOK_CHECK(array_type(what, *array) == dtype && array->ndim() == 1 && array->shape(0) == n, what,
              " must have ", n, " elements of type ", dtype == DType::kBFloat16 ? "uint16" : "float32",
              " in one dimension.");
    MOK_CHECK(n <= 1 || array->strides(0) == dtype_bytes(dtype), what, " must be contiguous; copy it.");
    return const_cast<void*>(array->data());
}

const float* floats(const char* what, const std::optional<py::array>& array, int64_t n) {
    return static_cast<const float*>(row(what, array, DType::kFloat32, n));
}

py::array make_row(DType dtype, int64_t n) {
    if (dtype == DType::kBFloat16) return py::array_t<uint16_t>(n);
    return py::array_t<float>(n);
}

ActivationSpec activation_spec(const std::string& kind, float limit) {
    if (kind == "swiglu") return {Activation::kSwiglu, limit};
    if (kind == "swiglu_limit") return {Activation::kSwigluLimit, limit};
    MOK_CHECK(kind == "gpt_oss", "kind is '", kind, "'; it must be 'swiglu', 'swiglu_limit' or 'gpt_oss'.");
    return {Activation::kGptOss, limit};
}

Operand operand(const char* what, const py::array& array) {
    const DType dtype = array_type(what, array);
    MOK_CHECK(array.ndim() == 2, what, " has ", array.ndim(), " dimensions; it must have 2.");
    const int64_t bytes = dtype_bytes(dtype);
    const int64_t stride_i = array.strides(0) / bytes, stride_k = array.strides(1) / bytes;
    MOK_CHECK(stride_i == 1 || stride_k == 1 || array.size() == 0, what, " has strides ", stride_i, " and ",
              stride_k, "; one of them must be 1.");
    return {array.data(), dtype, stride_i, stride_k};
}

/// A packed B, so that a benchmark can time the product and the packing apart.
struct PackedB {
    Buffer data;
    int64_t n, k;
};

PackedB pack_b(const std::string& isa, const std::string& compute, const py::array& b_NK) {
    const auto& table = cpu::kernels(isa.c_str());
    const DType type = compute_type(compute);
    const Operand b = operand("b", b_NK);
    PackedB packed{nullptr, b_NK.shape(0), b_NK.shape(1)};
    packed.data = aligned(table.packed_b_bytes(type, packed.n, packed.k));
    table.pack_b(type, b, packed.n, packed.k, packed.data.get());
    return packed;
}

void gemm_packed(const std::string& isa, const std::string& compute, const py::array& a_MK, const PackedB& b,
                 py::array_t<float>& c_MN, bool accumulate) {
    const auto& table = cpu::kernels(isa.c_str());
    const DType type = compute_type(compute);
    const Operand a = operand("a", a_MK);
    const int64_t m = a_MK.shape(0), k = a_MK.shape(1), size = sizeof(float);
    MOK_CHECK(k == b.k, "a has ", k, " columns and b has ", b.k, "; they must be equal.");
    MOK_CHECK(c_MN.ndim() == 2 && c_MN.shape(0) == m && c_MN.shape(1) == b.n, "c must have the shape (", m,
              ", ", b.n, ").");
    MOK_CHECK(c_MN.strides(1) == size || b.n <= 1 || m == 0, "c must have contiguous rows.");
    const Buffer scratch = aligned(table.gemm_scratch_bytes(type, k));
    table.gemm(type, a, b.data.get(), m, b.n, k, c_MN.mutable_data(), c_MN.strides(0) / size, accumulate,
               scratch.get());
}

void gemm(const std::string& isa, const std::string& compute, const py::array& a_MK, const py::array& b_NK,
          py::array_t<float>& c_MN, bool accumulate) {
    gemm_packed(isa, compute, a_MK, pack_b(isa, compute, b_NK), c_MN, accumulate);
}

std::tuple<py::array, py::array, py::array> activation_forward(const std::string& isa,
                                                               const std::string& compute,
                                                               const std::string& kind, float limit,
                                                               const py::array& g_acc, const py::array& u_acc,
                                                               const std::optional<py::array>& b_g,
                                                               const std::optional<py::array>& b_u) {
    const DType type = compute_type(compute);
    const int64_t n = g_acc.size();
    py::array g = make_row(type, n), u = make_row(type, n), h = make_row(type, n);
    cpu::kernels(isa.c_str())
        .activation_forward(type, activation_spec(kind, limit), floats("g_acc", g_acc, n),
                            floats("u_acc", u_acc, n), floats("b_g", b_g, n), floats("b_u", b_u, n),
                            g.mutable_data(), u.mutable_data(), h.mutable_data(), n);
    return {g, u, h};
}

py::array activation(const std::string& isa, const std::string& compute, const std::string& kind, float limit,
                     const py::array& g, const py::array& u) {
    const DType type = compute_type(compute);
    const int64_t n = g.size();
    py::array h = make_row(type, n);
    cpu::kernels(isa.c_str())
        .activation(type, activation_spec(kind, limit), row("g", g, type, n), row("u", u, type, n),
                    h.mutable_data(), n);
    return h;
}

std::tuple<py::array, py::array, py::array, py::array> activation_backward(
    const std::string& isa, const std::string& compute, const std::string& kind, float limit,
    const py::array& g, const py::array& u, const py::array& a, float w) {
    const DType type = compute_type(compute);
    const int64_t n = g.size();
    py::array dg = make_row(type, n), du = make_row(type, n), hw = make_row(type, n);
    py::array_t<float> partials(ceil_div<int64_t>(n, 64));
    cpu::kernels(isa.c_str())
        .activation_backward(type, activation_spec(kind, limit), row("g", g, type, n), row("u", u, type, n),
                             floats("a", a, n), w, dg.mutable_data(), du.mutable_data(), hw.mutable_data(),
                             partials.mutable_data(), n);
    return {dg, du, hw, partials};
}

py::array store(const std::string& isa, const std::string& compute, const py::array& acc,
                const std::optional<py::array>& bias) {
    const DType type = compute_type(compute);
    const int64_t n = acc.size();
    py::array out = make_row(type, n);
    cpu::kernels(isa.c_str())
        .store(type, floats("acc", acc, n), floats("bias", bias, n), out.mutable_data(), n);
    return out;
}

py::array weighted_sum(const std::string& isa, const std::string& compute, const std::vector<py::array>& rows,
                       const std::optional<py::array>& weights, int64_t n) {
    const DType type = compute_type(compute);
    const int64_t num_rows = static_cast<int64_t>(rows.size());
    std::vector<const void*> pointers;
    for (const py::array& each : rows) pointers.push_back(row("rows", each, type, n));
    py::array out = make_row(type, n);
    cpu::kernels(isa.c_str())
        .weighted_sum(type, pointers.data(), floats("weights", weights, num_rows), num_rows,
                      out.mutable_data(), n);
    return out;
}

float dot(const std::string& isa, const std::string& compute, const py::array& values, const py::array& b) {
    const DType type = compute_type(compute);
    const int64_t n = b.size();
    return cpu::kernels(isa.c_str()).dot(type, row("row", values, type, n), floats("b", b, n), n);
}

void axpy(const std::string& isa, const std::string& compute, float w, const py::array& values,
          py::array& acc) {
    const DType type = compute_type(compute);
    const int64_t n = acc.size();
    cpu::kernels(isa.c_str())
        .axpy(type, w, row("row", values, type, n), static_cast<float*>(row("acc", acc, DType::kFloat32, n)),
              n);
}

void store_gradient(const std::string& isa, const py::array& acc, py::array& out, bool accumulate) {
    const DType type = array_type("out", out);
    const int64_t n = acc.size();
    cpu::kernels(isa.c_str())
        .store_gradient(type, floats("acc", acc, n), row("out", out, type, n), accumulate, n);
}

std::vector<std::string> available() {
    std::vector<std::string> names;
    for (const char* name : {"portable", "emulated", "avx2", "avx512"}) {
        if (cpu::has_isa(name)) names.emplace_back(name);
    }
    return names;
}

}  // namespace

void bind_kernels(py::module_& module) {
    py::module_ kernels =
        module.def_submodule("kernels", "The CPU kernels over NumPy arrays (BF16 as uint16), for tests.");
    kernels.def("available", &available,
                "Instruction sets this processor runs; 'emulated' is AVX-512's code path.");
    kernels.def(
        "selected", [] { return cpu::kernels().name; }, "The instruction set of this process.");
    py::class_<PackedB>(kernels, "PackedB", "A packed [N, K] operand.");
    kernels.def("pack_b", &pack_b, py::arg("isa"), py::arg("compute"), py::arg("b_NK"));
    kernels.def("gemm_packed", &gemm_packed, py::arg("isa"), py::arg("compute"), py::arg("a_MK"),
                py::arg("b"), py::arg("c_MN").noconvert(), py::arg("accumulate") = false);
    kernels.def("gemm", &gemm, "c (+)= a b^T; one stride of a and of b is one element.", py::arg("isa"),
                py::arg("compute"), py::arg("a_MK"), py::arg("b_NK"), py::arg("c_MN").noconvert(),
                py::arg("accumulate") = false);
    kernels.def("activation_forward", &activation_forward, "-> (g, u, h)", py::arg("isa"), py::arg("compute"),
                py::arg("kind"), py::arg("limit"), py::arg("g_acc"), py::arg("u_acc"),
                py::arg("b_g") = py::none(), py::arg("b_u") = py::none());
    kernels.def("activation", &activation, "-> h", py::arg("isa"), py::arg("compute"), py::arg("kind"),
                py::arg("limit"), py::arg("g"), py::arg("u"));
    kernels.def("activation_backward", &activation_backward, "-> (dg, du, hw, dw_partials)", py::arg("isa"),
                py::arg("compute"), py::arg("kind"), py::arg("limit"), py::arg("g"), py::arg("u"),
                py::arg("a"), py::arg("w"));
    kernels.def("store", &store, py::arg("isa"), py::arg("compute"), py::arg("acc"),
                py::arg("bias") = py::none());
    kernels.def("weighted_sum", &weighted_sum, py::arg("isa"), py::arg("compute"), py::arg("rows"),
                py::arg("weights"), py::arg("n"));
    kernels.def("dot", &dot, py::arg("isa"), py::arg("compute"), py::arg("row"), py::arg("b"));
    kernels.def("axpy", &axpy, py::arg("isa"), py::arg("compute"), py::arg("w"), py::arg("row"),
                py::arg("acc"));
    kernels.def("store_gradient", &store_gradient, py::arg("isa"), py::arg("acc"), py::arg("out"),
                py::arg("accumulate") = false);
}

}  // namespace mok::python
