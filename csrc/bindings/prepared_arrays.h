// A prepared call as NumPy arrays, entry for entry, so that tests can compare what a device made with what
// the host makes.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "csrc/schedule/host_schedule.h"

namespace mok::bindings {

/// Everything in memory that the host can read.
struct PreparedView {
    const schedule::ScheduleShape* shape;
    const schedule::Table* table;
    schedule::PullUnits units;
    const int32_t* row_peer;
    const int32_t* row_slot;
    int32_t num_local_experts;
    int64_t num_rows;
};

template <typename T>
pybind11::array_t<T> to_array(const T* values, int64_t count) {
    return pybind11::array_t<T>(count, values);
}

/// Structs of T as rows of their words, padding excluded by the caller's choice of T.
template <typename T, typename Row, typename Words>
pybind11::array_t<T> to_rows(const Row* rows, int64_t count, int64_t columns, const Words& words) {
    pybind11::array_t<T> result({count, columns});
    for (int64_t i = 0; i < count; ++i) words(rows[i], result.mutable_data(i, 0));
    return result;
}

inline pybind11::dict prepared_arrays(const PreparedView& view) {
    using namespace schedule;
    const Table& table = *view.table;
    pybind11::dict result;
    result["segment_begin"] = to_array(table.segment_begin, view.num_local_experts + 1);
    result["counts"] = to_array(table.counts, view.num_local_experts);
    result["row_peer"] = to_array(view.row_peer, view.num_rows);
    result["row_slot"] = to_array(view.row_slot, view.num_rows);
    result["chunks"] =
        to_rows<int64_t>(table.chunks, table.num_chunks + 1, 3, [](const Chunk& chunk, int64_t* row) {
            const int64_t values[] = {chunk.begin, chunk.end, chunk.cut_ordinal};
            std::copy(std::begin(values), std::end(values), row);
        });
    result["pieces"] =
        to_rows<int64_t>(table.pieces, table.num_pieces + 1, 7, [](const Piece& piece, int64_t* row) {
            const int64_t values[] = {piece.begin,      piece.end,          piece.expert,   piece.chunk,
                                      piece.span_begin, piece.spans_before, piece.ends_span};
            std::copy(std::begin(values), std::end(values), row);
        });
    result["runs"] = to_rows<int64_t>(table.runs, table.num_runs + 1, 4, [](const Run& run, int64_t* row) {
        const int64_t values[] = {run.task_begin, run.pull_begin, run.piece, run.phase_idx};
        std::copy(std::begin(values), std::end(values), row);
    });
    result["unit_begin"] = to_array(table.unit_begin, table.num_pieces + 1);
    result["reused_piece"] = to_array(table.reused_piece, table.num_reused(*view.shape));
    result["idle_experts"] = to_array(table.idle_experts, table.num_idle);
    const PullUnits& units = view.units;
    result["units"] =
        to_rows<int32_t>(units.units, units.num_units, 2, [](const PullUnit& unit, int32_t* row) {
            row[0] = unit.peer;
            row[1] = unit.token;
        });
    result["row_begin"] = to_array(units.row_begin, units.num_units + 1);
    result["rows"] = to_array(units.rows, units.row_begin[units.num_units]);
    const int64_t totals[] = {table.num_chunks,       table.num_pieces, table.num_runs,
                              table.num_idle,         table.num_blocks, table.num_shared_tasks,
                              table.num_routed_tasks, table.num_pulls,  units.num_units};
    result["totals"] = to_array(totals, std::size(totals));
    return result;
}

inline pybind11::dict prepared_arrays(const schedule::HostSchedule& host) {
    const Plan& plan = host.plan();
    return prepared_arrays(PreparedView{&host.shape(), &host.table(), host.units(), plan.row_peer.data(),
                                        plan.row_slot.data(), static_cast<int32_t>(plan.counts.size()),
                                        plan.num_rows()});
}

}  // namespace mok::bindings
