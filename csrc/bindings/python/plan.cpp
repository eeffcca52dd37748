// mok._C.plan: the host plan for tests and tools.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/layout/check.h"
#include "csrc/layout/plan_host.h"

namespace py = pybind11;

namespace mok::python {

namespace {

using IdArray = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

PlanShape make_shape(int rank, int num_ranks, int num_experts, int top_k, int64_t max_tokens, int64_t pad) {
    const PlanShape shape{rank, num_ranks, num_experts, top_k, max_tokens, pad};
    check_plan_shape(shape);
    return shape;
}

template <typename T>
py::array_t<T> to_array(const std::vector<T>& values) {
    return py::array_t<T>(values.size(), values.data());
}

py::dict plan_of(const std::vector<IdArray>& ids_per_rank, int rank, int num_experts, int64_t pad) {
    const int num_ranks = static_cast<int>(ids_per_rank.size());
    MOK_CHECK(num_ranks > 0, "ids_per_rank is empty: pass one [T, K] array per rank.");
    int64_t top_k = 1, max_tokens = 0;
    for (const IdArray& ids : ids_per_rank) {
        MOK_CHECK(ids.ndim() == 2, "ids must be [T, K], got ", ids.ndim(), " dimensions.");
        top_k = ids.shape(1);
        max_tokens = std::max<int64_t>(max_tokens, ids.shape(0));
    }
    const PlanShape shape =
        make_shape(rank, num_ranks, num_experts, static_cast<int>(top_k), max_tokens, pad);
    std::vector<std::vector<int32_t>> normalized(num_ranks);
    std::vector<RankRoutes> routes(num_ranks);
    for (int source = 0; source < num_ranks; ++source) {
        const IdArray& ids = ids_per_rank[source];
        MOK_CHECK(ids.shape(1) == top_k, "ids_per_rank[", source, "] has K = ", ids.shape(1), ", others ",
                  top_k, ".");
        normalized[source].resize(ids.size());
        for (py::ssize_t i = 0; i < ids.size(); ++i) {
            normalized[source][i] = normalized_expert(ids.data()[i], num_experts);
        }
        routes[source] = {normalized[source].data(), ids.shape(0)};
    }
    Plan plan;
    build_plan(shape, routes.data(), plan);
    py::dict result;
    result["segment_begin"] = to_array(plan.segment_begin);
    result["counts"] = to_array(plan.counts);
    result["row_peer"] = to_array(plan.row_peer);
    result["row_slot"] = to_array(plan.row_slot);
    return result;
}

std::vector<int64_t> chunks_of(const std::vector<int64_t>& segment_begin, int64_t ring_rows, int64_t pad) {
    MOK_CHECK(segment_begin.size() >= 2, "segment_begin needs at least two entries.");
    MOK_CHECK(ring_rows >= pad && ring_rows % pad == 0, "ring_rows = ", ring_rows,
              ": must be a positive multiple of ", pad, ".");
    const int32_t num_segments = static_cast<int32_t>(segment_begin.size()) - 1;
    std::vector<int64_t> bounds = {0};
    while (bounds.back() < segment_begin.back()) {
        bounds.push_back(chunk_end(bounds.back(), segment_begin.data(), num_segments, ring_rows));
    }
    return bounds;
}

}  // namespace

void bind_plan(py::module_& module) {
    module.attr("DEFAULT_PAD") = kDefaultPad;
    module.def(
        "build_plan", &plan_of, py::arg("ids_per_rank"), py::arg("rank"), py::arg("num_experts"),
        py::arg("pad") = kDefaultPad,
        "The plan of `rank` from one [T, K] id array per rank: a dict of segment_begin [E_local + 1], counts "
        "[E_local], row_peer and row_slot [rows] (-1 on padding).");
    module.def("chunk_bounds", &chunks_of, py::arg("segment_begin"), py::arg("ring_rows"),
               py::arg("pad") = kDefaultPad,
               "Ascending padded-row bounds of the chunks, from 0 to the last row.");
    module.def(
        "worst_case_rows",
        [](int num_ranks, int num_experts, int top_k, int64_t max_tokens, int64_t pad) {
            return worst_case_rows(make_shape(0, num_ranks, num_experts, top_k, max_tokens, pad));
        },
        py::arg("num_ranks"), py::arg("num_experts"), py::arg("top_k"), py::arg("max_tokens"),
        py::arg("pad") = kDefaultPad, "Padded rows of a rank when every route of every rank lands on it.");
    module.def(
        "default_ring_rows",
        [](int num_ranks, int num_experts, int top_k, int64_t max_tokens, int64_t pad) {
            return default_ring_rows(make_shape(0, num_ranks, num_experts, top_k, max_tokens, pad));
        },
        py::arg("num_ranks"), py::arg("num_experts"), py::arg("top_k"), py::arg("max_tokens"),
        py::arg("pad") = kDefaultPad,
        "1.25 x max_tokens x K plus one pad per local expert, at most the worst case.");
}

}  // namespace mok::python
