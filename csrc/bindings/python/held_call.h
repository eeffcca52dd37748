// A call on a GPU that tests and benchmarks make again and again: its plan, schedule and header.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "csrc/launch/prepare.h"
#include "csrc/schedule/shape.h"
#include "csrc/symm/workspace.h"

#pragma GCC visibility push(hidden)  // as pybind11's types have it

namespace mok::python {

class HeldCall {
  public:
    /// `settings`: mok.simulation.schedule_settings. Throws std::invalid_argument.
    HeldCall(std::shared_ptr<Workspace> workspace, const pybind11::dict& settings, int32_t top_k,
             int64_t max_tokens);

    /// T of the calls that follow.
    void set_tokens(int64_t num_tokens);

    Workspace& workspace() const { return *workspace_; }
    const schedule::ScheduleSizes& sizes() const { return sizes_; }
    launch::Preparation& preparation() { return preparation_; }
    const launch::Preparation& preparation() const { return preparation_; }
    CallHeader header() const;

  private:
    std::shared_ptr<Workspace> workspace_;
    schedule::ScheduleSizes sizes_;
    schedule::KernelConfig config_;
    launch::Preparation preparation_;
};

}  // namespace mok::python

#pragma GCC visibility pop
