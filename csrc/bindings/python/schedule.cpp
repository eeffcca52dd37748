// mok._C: the schedule of one rank as arrays, and the simulator.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/bindings/prepared_arrays.h"
#include "csrc/bindings/schedule_settings.h"
#include "csrc/layout/check.h"
#include "csrc/schedule/simulator.h"

namespace py = pybind11;

namespace mok::python {

namespace {

using namespace mok::schedule;
using IdArray = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

/// `settings` has every key that mok/simulation.py fills in.
SimProblem make_problem(const std::vector<IdArray>& ids_per_rank, const py::dict& settings) {
    MOK_CHECK(!ids_per_rank.empty(), "ids is empty: pass one [T, K] array per rank.");
    SimProblem problem;
    problem.num_experts = settings["num_experts"].cast<int32_t>();
    problem.pad = settings["pad"].cast<int64_t>();
    for (const IdArray& ids : ids_per_rank) {
        MOK_CHECK(ids.ndim() == 2 && ids.shape(1) >= 1, "ids must be [T, K] with K >= 1 for every rank.");
        MOK_CHECK(ids.shape(1) == ids_per_rank[0].shape(1), "ids of one rank have K = ", ids.shape(1),
                  ", of another ", ids_per_rank[0].shape(1), ": K must be equal on all ranks.");
        std::vector<int32_t>& own = problem.ids.emplace_back(ids.size());
        for (py::ssize_t i = 0; i < ids.size(); ++i) {
            own[i] = normalized_expert(ids.data()[i], problem.num_experts);
        }
    }
    problem.top_k = static_cast<int32_t>(ids_per_rank[0].shape(1));
    problem.sizes = bindings::schedule_sizes(settings);
    problem.config = bindings::kernel_config(settings);
    return problem;
}

SimOptions make_options(const py::dict& settings) {
    SimOptions options;
    options.policy = parse_policy(settings["policy"].cast<std::string>());
    options.bug = parse_bug(settings["bug"].cast<std::string>());
    options.num_ctas = settings["num_ctas"].cast<int32_t>();
    options.resident_ctas = settings["resident_ctas"].cast<int32_t>();
    options.late_after_exit = settings["late_after_exit"].cast<bool>();
    options.stalled_rank = settings["stalled_rank"].cast<int32_t>();
    options.pull_batch = settings["pull_batch"].cast<int32_t>();
    return options;
}

SimCosts make_costs(const py::dict& settings) {
    SimCosts costs;
    for (const auto& [key, value] : settings) {
        const std::string name = key.cast<std::string>();
        const double cost = value.cast<double>();
        MOK_CHECK(cost >= 0, "costs['", name, "'] = ", cost, ": must not be negative.");
        bool known = true;
        if (name == "claim") {
            costs.claim = cost;
        } else if (name == "store") {
            costs.store = cost;
        } else if (name == "pull") {
            costs.pull = cost;
        } else if (name == "link") {
            costs.link = cost;
        } else if (name == "launch") {
            costs.launch = cost;
        } else {
            known = false;
            for (int32_t k = 0; k < kNumTaskKinds; ++k) {
                if (name != task_kind_name(static_cast<TaskKind>(k))) continue;
                costs.tile[k] = cost;
                known = true;
            }
        }
        MOK_CHECK(
            known, "costs['", name,
            "'] is no cost: use task kinds ('gate_up', 'down', ...), 'claim', 'store', 'pull', 'link' or "
            "'launch'.");
    }
    return costs;
}

py::dict error_dict(const SimError& error, uint64_t seed) {
    py::dict result;
    result["type"] = error.type;
    result["rank"] = error.rank;
    result["cta"] = error.cta;
    result["agent"] = error.agent;
    result["task"] = error.task;
    result["counter"] = error.counter;
    result["expected"] = error.expected;
    result["seen"] = error.seen;
    result["message"] = error.message;
    result["seed"] = seed;
    return result;
}

py::dict stats_dict(const SimStats& stats) {
    py::dict result;
    result["steps"] = stats.steps;
    result["tasks"] = stats.tasks;
    result["pulls"] = stats.pulls;
    result["units"] = stats.units;
    result["chunks"] = stats.chunks;
    result["waits"] = stats.waits;
    result["duration"] = stats.duration;
    result["busy"] = stats.busy;
    return result;
}

py::list timeline_list(const std::vector<TimelineEntry>& timeline) {
    py::list result;
    for (const TimelineEntry& entry : timeline) {
        const std::string kind = std::string(entry.shared ? "shared_" : "") + task_kind_name(entry.kind);
        const py::object waited_for = entry.waited_for < 0
                                          ? py::object(py::none())
                                          : py::str(counter_name(static_cast<Counter>(entry.waited_for)));
        result.append(py::make_tuple(entry.rank, entry.cta, kind, entry.block, entry.tile, entry.start,
                                     entry.end, entry.wait, waited_for));
    }
    return result;
}

/// Runs seeds until one finds an error; all of them share the plan and the schedule.
py::dict simulate(const std::vector<IdArray>& ids, const py::dict& settings,
                  const std::vector<uint64_t>& seeds, const py::object& costs) {
    const SimProblem problem = make_problem(ids, settings);
    SimOptions options = make_options(settings);
    SimResult last;
    SimStats total;
    SimCosts timed_costs;
    if (!costs.is_none()) timed_costs = make_costs(costs.cast<py::dict>());
    const bool timed = !costs.is_none();
    options.timeline = timed;
    int64_t runs = 0;
    {
        const py::gil_scoped_release release;
        Simulator simulator(problem, options.bug);
        for (const uint64_t seed : seeds) {
            options.seed = seed;
            last = timed ? simulator.run_timed(options, timed_costs) : simulator.run(options);
            const int64_t steps = total.steps, waits = total.waits;
            total = last.stats;
            total.steps += steps;
            total.waits += waits;
            ++runs;
            if (!last.errors.empty()) break;
            if (runs % 64 == 0) {
                const py::gil_scoped_acquire acquire;
                if (PyErr_CheckSignals() != 0) throw py::error_already_set();
            }
        }
    }
    py::list errors;
    for (const SimError& error : last.errors) errors.append(error_dict(error, options.seed));
    py::dict result;
    result["errors"] = errors;
    result["stats"] = stats_dict(total);
    result["stats"]["interleavings"] = runs;
    result["timeline"] = timeline_list(last.timeline);
    return result;
}

template <typename T, typename Function>
py::array_t<T> column(int64_t size, const Function& value) {
    py::array_t<T> result(size);
    for (int64_t i = 0; i < size; ++i) result.mutable_data()[i] = static_cast<T>(value(i));
    return result;
}

/// One rank's schedule as columns, for tests and tools.
py::dict schedule_of(const std::vector<IdArray>& ids, int32_t rank, const py::dict& settings) {
    const SimProblem problem = make_problem(ids, settings);
    MOK_CHECK(rank >= 0 && rank < static_cast<int32_t>(ids.size()), "rank = ", rank, ": must lie in [0, ",
              ids.size(), ").");
    const RankModel model(problem, rank, Bug{});
    const std::vector<Task>& tasks = model.tasks;
    const int64_t n = static_cast<int64_t>(tasks.size());
    py::dict task_columns;
    py::list kinds;
    for (const Task& task : tasks) kinds.append(task_kind_name(task.kind));
    task_columns["kind"] = kinds;
    task_columns["shared"] = column<bool>(n, [&](int64_t i) { return tasks[i].shared; });
    const auto add = [&](const char* name, int32_t Task::*field) {
        task_columns[name] = column<int64_t>(n, [&](int64_t i) { return tasks[i].*field; });
    };
    add("expert", &Task::expert);
    add("chunk", &Task::chunk);
    add("begin", &Task::begin);
    add("end", &Task::end);
    add("m_tile", &Task::m_tile);
    add("n_tile", &Task::n_tile);
    add("cut_ordinal", &Task::cut_ordinal);
    task_columns["continues"] = column<bool>(n, [&](int64_t i) { return tasks[i].continues; });
    task_columns["unfinished"] = column<bool>(n, [&](int64_t i) { return tasks[i].unfinished; });

    const Table& table = model.table();
    py::dict runs;
    runs["task_begin"] =
        column<int64_t>(table.num_runs + 1, [&](int64_t i) { return table.runs[i].task_begin; });
    runs["pull_begin"] =
        column<int64_t>(table.num_runs + 1, [&](int64_t i) { return table.runs[i].pull_begin; });
    runs["piece"] = column<int64_t>(table.num_runs, [&](int64_t i) { return table.runs[i].piece; });
    runs["phase"] = column<int64_t>(table.num_runs, [&](int64_t i) { return table.runs[i].phase_idx; });
    py::dict pieces;
    const auto add_piece = [&](const char* name, int32_t Piece::*field) {
        pieces[name] = column<int64_t>(table.num_pieces, [&](int64_t i) { return table.pieces[i].*field; });
    };
    add_piece("begin", &Piece::begin);
    add_piece("end", &Piece::end);
    add_piece("expert", &Piece::expert);
    add_piece("chunk", &Piece::chunk);
    add_piece("span_begin", &Piece::span_begin);

    py::dict pulls;
    const int64_t num_pulls = static_cast<int64_t>(model.pulls.size());
    pulls["buffer"] =
        column<int64_t>(num_pulls, [&](int64_t i) { return model.pulls[i].what == Pulled::kX ? 0 : 1; });
    pulls["unit"] = column<int64_t>(num_pulls, [&](int64_t i) { return model.pulls[i].unit; });
    pulls["piece"] = column<int64_t>(num_pulls, [&](int64_t i) { return model.pulls[i].piece; });
    const PullUnits& units = model.units;
    py::dict unit_columns;
    unit_columns["peer"] = column<int64_t>(units.num_units, [&](int64_t i) { return units.units[i].peer; });
    unit_columns["token"] = column<int64_t>(units.num_units, [&](int64_t i) { return units.units[i].token; });
    unit_columns["row_begin"] =
        column<int64_t>(units.num_units + 1, [&](int64_t i) { return units.row_begin[i]; });
    unit_columns["rows"] =
        column<int64_t>(units.row_begin[units.num_units], [&](int64_t i) { return units.rows[i]; });

    py::dict counters;
    for (int32_t c = 0; c < kNumCounters; ++c) {
        const int64_t begin = model.layout.begin[c];
        counters[counter_name(static_cast<Counter>(c))] = column<int64_t>(
            model.layout.begin[c + 1] - begin, [&](int64_t i) { return model.finals[begin + i]; });
    }
    py::dict result;
    result["tasks"] = task_columns;
    result["runs"] = runs;
    result["pieces"] = pieces;
    result["pulls"] = pulls;
    result["units"] = unit_columns;
    result["counters"] = counters;
    py::list lags;
    for (int32_t k = 0; k < model.shape().num_phases; ++k) lags.append(model.shape().phases[k].lag_blocks);
    result["lag_blocks"] = lags;
    result["max_piece_blocks"] = model.shape().max_piece_blocks;
    result["chunk_ends"] = column<int64_t>(table.num_chunks, [&](int64_t i) { return table.chunks[i].end; });
    const TableCapacity capacity = table_capacity(model.shape(), model.schedule->plan().num_rows());
    result["capacity"] = py::make_tuple(capacity.chunks, capacity.pieces, capacity.runs);
    return result;
}

/// What a device's preparation must make of the same call.
py::dict prepared_by_host(const std::vector<IdArray>& ids, int32_t rank, const py::dict& settings) {
    const SimProblem problem = make_problem(ids, settings);
    MOK_CHECK(rank >= 0 && rank < static_cast<int32_t>(ids.size()), "rank = ", rank, ": must lie in [0, ",
              ids.size(), ").");
    return bindings::prepared_arrays(*RankModel(problem, rank, Bug{}).schedule);
}

py::list configs() {
    py::list result;
    for (const KernelConfig& config : kConfigs) {
        py::dict row;
        row["arch"] = static_cast<int32_t>(config.arch);
        row["min_intermediate"] = config.min_intermediate;
        row["block_m"] = config.block_m;
        row["lag_waves"] = config.lag_waves;
        row["group_m"] = config.group_m;
        result.append(row);
    }
    return result;
}

}  // namespace

void bind_schedule(py::module_& module) {
    module.def("simulate", &simulate, py::arg("ids"), py::arg("settings"), py::arg("seeds"), py::arg("costs"),
               "Runs the schedule of all ranks once per seed until a rule is broken; see mok.simulate.");
    module.def("schedule", &schedule_of, py::arg("ids"), py::arg("rank"), py::arg("settings"),
               "One rank's tasks, runs, pieces, pulls and final counters as columns.");
    module.def("prepared_by_host", &prepared_by_host, py::arg("ids"), py::arg("rank"), py::arg("settings"),
               "One rank's plan, table and pull units, array by array.");
    module.def("simulator_bugs", &all_bugs, "Every mistake that mok.simulate can plant.");
    module.def("kernel_configs", &configs, "The rows of the configuration table.");
    module.def(
        "choose_config",
        [](int32_t arch, int64_t intermediate) {
            const KernelConfig* row = choose_config(static_cast<Arch>(arch), intermediate);
            return row == nullptr ? -1 : static_cast<int32_t>(row - kConfigs);
        },
        py::arg("arch"), py::arg("intermediate"),
        "The row of the configuration table for a layer, -1: none.");
}

}  // namespace mok::python
