// RunOptions, RunResult and EmulatorError as Python sees them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>

#include "csrc/bindings/emulator/session.h"
#include "csrc/layout/check.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

constexpr struct {
    const char* name;
    emu::Policy policy;
} kPolicies[] = {
    {"by_seed", emu::Policy::kBySeed},
    {"random", emu::Policy::kRandom},
    {"run_until_blocked", emu::Policy::kRunUntilBlocked},
    {"starved_warps", emu::Policy::kStarvedWarps},
    {"held_copies", emu::Policy::kHeldCopies},
    {"late_rank", emu::Policy::kLateRank},
};

emu::Policy policy_of(const std::string& name) {
    for (const auto& each : kPolicies) {
        if (name == each.name) return each.policy;
    }
    std::string names;
    for (const auto& each : kPolicies) names += (names.empty() ? "" : ", ") + std::string(each.name);
    MOK_CHECK(false, "policy is '", name, "'; it must be one of ", names, ".");
    __builtin_unreachable();
}

emu::RunOptions make_options(uint64_t seed, const std::string& policy, bool time_outs, bool keep_log,
                             bool collect_sites, uint64_t max_steps,
                             const std::optional<std::tuple<std::string, std::string, uint32_t>>& left_out,
                             const std::optional<std::tuple<int, uint64_t>>& end) {
    emu::RunOptions options;
    options.seed = seed;
    options.policy = policy_of(policy);
    options.time_outs = time_outs;
    options.keep_log = keep_log;
    options.collect_sites = collect_sites;
    options.max_steps = max_steps;
    if (left_out) {
        options.left_out = {std::get<0>(*left_out), std::get<1>(*left_out), std::get<2>(*left_out)};
    }
    if (end) {
        std::tie(options.ended.rank, options.ended.step) = *end;
        MOK_CHECK(options.ended.rank >= 0, "end is of rank ", options.ended.rank, ": ranks count from 0.");
    }
    return options;
}

}  // namespace

void bind_run(py::module_& module) {
    py::register_exception<EmulatorError>(module, "EmulatorError", PyExc_RuntimeError);
    const emu::RunOptions defaults;
    py::class_<emu::RunOptions>(
        module, "RunOptions",
        "A schedule: `policy` is its character, `seed` every choice; `left_out` is "
        "(wrapper, file, line) of one synchronising call that does nothing; `end` is (rank, "
        "step): there the host ends the rank's waits.")
        .def(py::init(&make_options), py::arg("seed") = 1, py::arg("policy") = "by_seed",
             py::arg("time_outs") = false, py::arg("keep_log") = false, py::arg("collect_sites") = false,
             py::arg("max_steps") = defaults.max_steps, py::arg("left_out") = py::none(),
             py::arg("end") = py::none());
    module.attr("POLICIES") = [] {
        py::list names;
        for (const auto& each : kPolicies) names.append(each.name);
        return py::tuple(names);
    }();
    py::class_<emu::CallSite>(module, "CallSite", "A synchronising call of a kernel's source.")
        .def_readonly("wrapper", &emu::CallSite::wrapper)
        .def_readonly("file", &emu::CallSite::file)
        .def_readonly("line", &emu::CallSite::line)
        .def_readonly("calls", &emu::CallSite::calls);
    py::class_<emu::RunStats>(module, "RunStats")
        .def_readonly("threads", &emu::RunStats::threads)
        .def_readonly("steps", &emu::RunStats::steps)
        .def_readonly("switches", &emu::RunStats::switches)
        .def_readonly("copies", &emu::RunStats::copies)
        .def_readonly("wgmmas", &emu::RunStats::wgmmas)
        .def_readonly("clock_components", &emu::RunStats::clock_components)
        .def_readonly("virtual_ns", &emu::RunStats::virtual_ns);
    py::class_<emu::RunResult>(module, "RunResult", "What a run leaves besides its outputs.")
        .def_readonly("warnings", &emu::RunResult::warnings)
        .def_readonly("trapped", &emu::RunResult::trapped)
        .def_readonly("sites", &emu::RunResult::sites)
        .def_readonly("log", &emu::RunResult::log)
        .def_readonly("stats", &emu::RunResult::stats);
    module.def("last_result", &Session::last_result, py::return_value_policy::copy,
               "The RunResult of the last run, also where it ended in an EmulatorError: its log above all.");
    module.def("set_num_multiprocessors", &launch::set_num_multiprocessors, py::arg("count"),
               "How many multiprocessors launches find on every emulated device.");
    module.def("num_multiprocessors", &launch::num_multiprocessors);
}

}  // namespace mok::emulator
