// The parts of the emulator that need no machine, over NumPy arrays: wgmma's operands and products, boxes of
// tensors, the sigmoid.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "csrc/emu/descriptor.h"
#include "csrc/emu/matrix_multiply.h"
#include "csrc/emu/matrix_wgmma.h"
#include "csrc/emu/tensor_map_copy.h"
#include "csrc/launch/tensor_map.h"
#include "csrc/layout/check.h"
#include "csrc/ptx/host/convert.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style>;

emu::MatrixElement element_named(const std::string& name) {
    if (name == "bf16") return emu::MatrixElement::kBFloat16;
    if (name == "e4m3") return emu::MatrixElement::kE4M3;
    MOK_CHECK(name == "e5m2", "element is '", name, "'; it must be 'bf16', 'e4m3' or 'e5m2'.");
    return emu::MatrixElement::kE5M2;
}

emu::MultiplyFunction multiply_of(const std::string& isa) {
    for (const emu::MultiplyIsa& each : emu::multiply_isas()) {
        if (isa == each.name) return each.multiply;
    }
    MOK_CHECK(false, "isa is '", isa, "', which this processor does not run; see isas().");
    __builtin_unreachable();
}

/// d [16, N] (+)= one warp's part of a wgmma over an image of shared memory from address 0 on.
void wgmma(const std::string& isa, const Bytes& shared, uint64_t a, uint64_t b,
           const std::pair<std::string, std::string>& elements, const std::pair<bool, bool>& mn_major,
           uint32_t warp, py::array_t<float, py::array::c_style>& d, bool accumulate) {
    MOK_CHECK(d.ndim() == 2 && d.shape(0) == emu::kWarpRows && d.shape(1) % 8 == 0 &&
                  d.shape(1) <= emu::kMaxColumns,
              "d must have 16 rows and a multiple of 8 columns, at most 256.");
    const uint32_t columns = static_cast<uint32_t>(d.shape(1));
    const emu::MultiplyShape shape{columns, element_named(elements.first), element_named(elements.second),
                                   mn_major.first, mn_major.second};
    const auto operand = [&](uint64_t bits, bool is_mn_major, uint32_t first, uint32_t rows,
                             emu::RawOperand& raw) {
        const char* fault = emu::descriptor_fault(bits, is_mn_major);
        MOK_CHECK(fault == nullptr, "a descriptor is wrong: ", fault, ".");
        const emu::MatrixDescriptor descriptor = emu::decode_descriptor(bits);
        const emu::SharedRange range = emu::gathered_range(descriptor, is_mn_major, first, rows);
        MOK_CHECK(static_cast<py::ssize_t>(range.end) <= shared.size(), "an operand ends at ", range.end,
                  ", shared memory at ", shared.size(), ".");
        emu::gather(descriptor, is_mn_major, first, rows, shared.data(), raw);
    };
    static emu::RawOperand raw_a, raw_b;
    operand(a, mn_major.first, warp * emu::kWarpRows, emu::kWarpRows, raw_a);
    operand(b, mn_major.second, 0, columns, raw_b);
    multiply_of(isa)(shape, raw_a, raw_b, accumulate, d.mutable_data());
}

/// A C-contiguous tensor of 1, 2 (BF16) or 4 (FP32) byte elements, its box and the box's corner, all in
/// NumPy's order of dimensions.
std::unique_ptr<emu::Copy> box_copy(const py::array& tensor, const std::vector<uint32_t>& box,
                                    const std::vector<int32_t>& at, int swizzle, bool add) {
    launch::TensorMapSpec spec{};
    const int64_t bytes = tensor.itemsize();
    spec.type = bytes == 1   ? launch::TensorType::kUint8
                : bytes == 2 ? launch::TensorType::kBFloat16
                             : launch::TensorType::kFloat32;
    MOK_CHECK(tensor.ndim() >= 1 && tensor.ndim() <= py::ssize_t{launch::kMaxTensorRank}, "tensor has ",
              tensor.ndim(), " dimensions; it must have 1 to 5.");
    spec.rank = static_cast<uint32_t>(tensor.ndim());
    MOK_CHECK(box.size() == spec.rank && at.size() == spec.rank, "box and at must have ", spec.rank,
              " entries.");
    spec.base = const_cast<void*>(tensor.data());
    spec.swizzle = static_cast<launch::TensorSwizzle>(swizzle);
    int32_t corner[launch::kMaxTensorRank];
    for (uint32_t i = 0; i < spec.rank; ++i) {
        const uint32_t from = spec.rank - 1 - i;
        spec.sizes[i] = static_cast<uint64_t>(tensor.shape(from));
        spec.box[i] = box[from];
        corner[i] = at[from];
        if (i > 0) spec.stride_bytes[i - 1] = static_cast<uint64_t>(tensor.strides(from));
    }
    const ptx::TensorMap map = launch::make_tensor_map(spec);
    constexpr uint32_t kTileAddress = 0x2000;  // a multiple of 1024, as tiles have
    return emu::make_tensor_copy(emu::read_tensor_map(&map), corner, kTileAddress, add);
}

size_t box_bytes(const py::array& tensor, const std::vector<uint32_t>& box) {
    size_t bytes = static_cast<size_t>(tensor.itemsize());
    for (const uint32_t extent : box) bytes *= extent;
    return bytes;
}

Bytes load_box(const py::array& tensor, const std::vector<uint32_t>& box, const std::vector<int32_t>& at,
               int swizzle) {
    const auto copy = box_copy(tensor, box, at, swizzle, /* add */ false);
    Bytes tile(static_cast<py::ssize_t>(box_bytes(tensor, box)));
    copy->load(tile.mutable_data());
    return tile;
}

void store_box(const Bytes& tile, py::array& tensor, const std::vector<uint32_t>& box,
               const std::vector<int32_t>& at, int swizzle, bool add) {
    MOK_CHECK(tensor.writeable(), "tensor is not writeable; copy it.");
    const auto copy = box_copy(tensor, box, at, swizzle, add);
    MOK_CHECK(static_cast<size_t>(tile.size()) == box_bytes(tensor, box), "tile has ", tile.size(),
              " bytes, the box ", box_bytes(tensor, box), ".");
    copy->store(tile.data());
}

std::tuple<py::array, py::array> sigmoid(const py::array_t<float, py::array::c_style>& x) {
    py::array_t<float> value(x.size()), complement(x.size());
    for (py::ssize_t i = 0; i < x.size(); ++i) {
        const ptx::Sigmoid result = ptx::sigmoid(x.data()[i]);
        value.mutable_data()[i] = result.value;
        complement.mutable_data()[i] = result.complement;
    }
    return {value, complement};
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const emu::MultiplyIsa& each : emu::multiply_isas()) names.emplace_back(each.name);
    return names;
}

}  // namespace

void bind_arithmetic(py::module_& module) {
    module.def("isas", &isas, "Instruction sets of wgmma's arithmetic that this processor runs, best first.");
    module.def("wgmma", &wgmma, py::arg("isa"), py::arg("shared"), py::arg("a"), py::arg("b"),
               py::arg("elements"), py::arg("mn_major"), py::arg("warp"), py::arg("d").noconvert(),
               py::arg("accumulate"), "One warp's 16 rows: d (+)= a b^T of two descriptors over `shared`.");
    module.def(
        "descriptor_fault",
        [](uint64_t bits, bool mn_major) -> std::optional<std::string> {
            const char* fault = emu::descriptor_fault(bits, mn_major);
            return fault ? std::optional<std::string>(fault) : std::nullopt;
        },
        py::arg("bits"), py::arg("mn_major"), "What is wrong with a wgmma descriptor, or None.");
    module.def("load_box", &load_box, py::arg("tensor"), py::arg("box"), py::arg("at"), py::arg("swizzle"),
               "The bytes of a box as TMA puts them into shared memory.");
    module.def("store_box", &store_box, py::arg("tile"), py::arg("tensor"), py::arg("box"), py::arg("at"),
               py::arg("swizzle"), py::arg("add") = false);
    module.def("sigmoid", &sigmoid, py::arg("x"), "-> (value, complement), with the CPU executor's bits.");
}

}  // namespace mok::emulator
