// Sizes and tuning of a schedule from the dict that mok.simulation.schedule_settings fills in.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "csrc/layout/check.h"
#include "csrc/schedule/shape.h"

namespace mok::bindings {

inline schedule::Pass parse_pass(const std::string& name) {
    if (name == "forward") return schedule::Pass::kForward;
    if (name == "recompute") return schedule::Pass::kRecompute;
    MOK_CHECK(name == "backward", "direction = '", name, "': must be 'forward', 'backward' or 'recompute'.");
    return schedule::Pass::kBackward;
}

inline schedule::Save parse_save(const std::string& name) {
    if (name == "none") return schedule::Save::kNone;
    if (name == "gate_up") return schedule::Save::kGateUp;
    MOK_CHECK(name == "all", "save = '", name, "': must be 'all', 'gate_up' or 'none'.");
    return schedule::Save::kAll;
}

/// All but num_tokens and num_local_experts, which are a rank's.
inline schedule::ScheduleSizes schedule_sizes(const pybind11::dict& settings) {
    const auto integer = [&](const char* name) { return settings[name].cast<int64_t>(); };
    schedule::ScheduleSizes sizes{};
    sizes.pass = parse_pass(settings["direction"].cast<std::string>());
    sizes.save = parse_save(settings["save"].cast<std::string>());
    sizes.hidden = integer("hidden");
    sizes.intermediate = integer("intermediate");
    sizes.shared_intermediate = integer("shared_intermediate");
    sizes.ring_rows = integer("ring_rows");
    sizes.gradients = sizes.pass == schedule::Pass::kBackward ? integer("gradients") : 0;
    sizes.zero_idle = sizes.pass == schedule::Pass::kBackward && settings["zero_idle"].cast<bool>();
    sizes.num_sms = settings["num_sms"].cast<int32_t>();
    sizes.row_bytes = integer("row_bytes");
    return sizes;
}

/// The row of kConfigs for these sizes, with what `settings["tuning"]` changes.
inline schedule::KernelConfig kernel_config(const pybind11::dict& settings) {
    schedule::KernelConfig config =
        *schedule::choose_config(schedule::Arch::kSm90, settings["intermediate"].cast<int64_t>());
    const pybind11::dict tuning = settings["tuning"].cast<pybind11::dict>();
    const auto tune = [&](const char* name, int32_t& value) {
        if (!tuning.contains(name)) return;
        value = tuning[name].cast<int32_t>();
        MOK_CHECK(value >= 1, name, " = ", value, ": must be at least 1.");
    };
    tune("block_m", config.block_m);
    tune("group_m", config.group_m);
    tune("lag_waves", config.lag_waves);
    tune("group_waves", config.group_waves);
    tune("window_blocks", config.window_blocks);
    tune("rows_per_store", config.rows_per_store);
    tune("pull_bytes", config.pull_bytes);
    return config;
}

}  // namespace mok::bindings
