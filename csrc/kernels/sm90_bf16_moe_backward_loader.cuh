// The loader warp of the BF16 backward megakernel: operands as they lie, and the chunks of epilogues.
#pragma once

#include "csrc/gemm/sm90_dhidden.cuh"
#include "csrc/kernels/sm90_bf16_moe_backward_params.cuh"

namespace mok::moe_backward_detail {

/// A product whose B lies N-major: rows of A (of K columns) times a matrix of K rows.
struct RowProduct {
    const ptx::TensorMap* a;  // [rows, K]
    int32_t a_row;
    uint32_t a_parts;
    const ptx::TensorMap* b;  // [matrices, K, N]
    int32_t b_column;
    int32_t matrix;
};

MOK_DEVICE bool load_row_product(StageFiller& filler, const RowProduct& product, int32_t steps) {
    for (int32_t step = 0; step < steps; ++step) {
        if (!filler.begin_stage(product.a_parts * kRowBoxBytes + 2 * kWeightBoxBytes)) return false;
        const int32_t k = step * static_cast<int32_t>(kTileK);
        const uint32_t full = filler.full();
        for (uint32_t part = 0; part < product.a_parts; ++part) {
            ptx::tma_load_2d(filler.box(part), product.a, k,
                             product.a_row + static_cast<int32_t>(part * kPartRows), full);
        }
#pragma unroll
        for (uint32_t panel = 0; panel < kChunks; ++panel) {
            ptx::tma_load_3d(filler.box(kParts + panel), product.b,
                             product.b_column + static_cast<int32_t>(panel * kBoxColumns), k, product.matrix,
                             full);
        }
        filler.end_stage();
    }
    return true;
}

/// gate and up from x: both operands K-major.
MOK_DEVICE bool load_gate_up(const MoeBackwardParams& params, StageFiller& filler, const BackwardTask& task) {
    const MoeBackwardExperts& experts = experts_of(params, task);
    const ptx::TensorMap* x = &rows_of(params, task).x;
    for (int32_t step = 0; step < task.steps; ++step) {
        if (!filler.begin_stage(task.parts() * kRowBoxBytes + 2 * kWeightBoxBytes)) return false;
        const int32_t k = step * static_cast<int32_t>(kTileK);
        const uint32_t full = filler.full();
        for (uint32_t part = 0; part < task.parts(); ++part) {
            ptx::tma_load_2d(filler.box(part), x, k, task.row + static_cast<int32_t>(part * kPartRows), full);
        }
        const uint32_t b = filler.box(kParts);
        ptx::tma_load_3d(b, &experts.gate_rows, k, task.column, task.expert, full);
        ptx::tma_load_3d(b + kWeightBoxBytes, &experts.up_rows, k, task.column, task.expert, full);
        filler.end_stage();
    }
    return true;
}

/// dout W_down, then the chunks of gate and up.
MOK_DEVICE bool load_dhidden(const MoeBackwardParams& params, StageFiller& filler, const BackwardTask& task) {
    const MoeBackwardRows& rows = rows_of(params, task);
    const RowProduct product{&rows.dout,  task.row,   task.parts(), &experts_of(params, task).down,
                             task.column, task.expert};
    if (!load_row_product(filler, product, task.steps)) return false;
    const bool is_saved = has(task, kSavedGateUp);
    const ptx::TensorMap* gate = is_saved ? &params.saved_gate : &rows.gate;
    const ptx::TensorMap* up = is_saved ? &params.saved_up : &rows.up;
    const int32_t first = is_saved ? task.row_block * static_cast<int32_t>(kTileM) : task.row;
    for (int32_t chunk = 0; chunk < task.chunks; ++chunk) {
        if (!filler.begin_stage(2 * task.parts() * kRowBoxBytes)) return false;
        const int32_t column = task.column + chunk * static_cast<int32_t>(kChunkColumns);
        for (uint32_t part = 0; part < task.parts(); ++part) {
            const int32_t row = first + static_cast<int32_t>(part * kPartRows);
            ptx::tma_load_2d(filler.box(kGateBox + part), gate, column, row, filler.full());
            ptx::tma_load_2d(filler.box(kUpBox + part), up, column, row, filler.full());
        }
        filler.end_stage();
    }
    return true;
}

/// All of dg W_gate, then du W_up.
MOK_DEVICE bool load_dx(const MoeBackwardParams& params, StageFiller& filler, const BackwardTask& task) {
    const MoeBackwardExperts& experts = experts_of(params, task);
    const MoeBackwardRows& rows = rows_of(params, task);
    RowProduct product{&rows.dgate, task.row, task.parts(), &experts.gate, task.column, task.expert};
    if (!load_row_product(filler, product, task.steps / 2)) return false;
    product.a = &rows.dup;
    product.b = &experts.up;
    return load_row_product(filler, product, task.steps / 2);
}

/// A gradient's chunks as they lie in memory, or (with `map` null) stages for the consumers to fill.
MOK_DEVICE bool load_chunks(StageFiller& filler, const BackwardTask& task, const ptx::TensorMap* map,
                            int32_t matrix, bool is_float, int32_t columns) {
    const uint32_t boxes = is_float ? 2 : 1;
    const int32_t box_columns = static_cast<int32_t>(kChunkColumns / boxes);
    for (int32_t chunk = 0; chunk < task.chunks; ++chunk) {
        const int32_t first = task.column + chunk * static_cast<int32_t>(kChunkColumns);
        // An FP32 chunk's second box may lie outside the matrix.
        const uint32_t inside = is_float && first + box_columns >= columns ? 1 : boxes;
        if (!filler.begin_stage(map == nullptr ? 0 : task.parts() * inside * kRowBoxBytes)) return false;
        for (uint32_t part = 0; map != nullptr && part < task.parts(); ++part) {
            for (uint32_t box = 0; box < inside; ++box) {
                ptx::tma_load_3d(filler.box(2 * part + box), map,
                                 first + static_cast<int32_t>(box) * box_columns,
                                 task.row + static_cast<int32_t>(part * kPartRows), matrix, filler.full());
            }
        }
        filler.end_stage();
    }
    return true;
}

/// Operands of dW = A^T B over a span's rows.
struct SpanProduct {
    const ptx::TensorMap* a;
    const ptx::TensorMap* b;
    bool b_in_ring;  // otherwise at its own rows
};

MOK_DEVICE SpanProduct span_product(const MoeBackwardParams& params, const BackwardTask& task) {
    const MoeBackwardRows& rows = rows_of(params, task);
    const bool is_saved = has(task, kSavedX);
    const ptx::TensorMap* x = is_saved ? &params.saved_x : &rows.x;
    switch (matrix_of(task)) {
        case Matrix::kGate:
            return {&rows.dgate, x, !is_saved};
        case Matrix::kUp:
            return {&rows.dup, x, !is_saved};
        default:
            return {&rows.dout, &rows.hidden, true};
    }
}

MOK_DEVICE bool load_wgrad(const MoeBackwardParams& params, StageFiller& filler, const BackwardTask& task) {
    const int32_t matrix = matrix_of(task), columns = gradient_columns(params, task);
    if (has(task, kContinues) &&
        !load_chunks(filler, task, &params.accumulators.weight[matrix], 0, true, columns)) {
        return false;
    }
    const SpanProduct product = span_product(params, task);
    const bool in_ring = !is_shared(task);
    StepRows a_rows = step_rows(params, task, in_ring);
    StepRows b_rows = step_rows(params, task, in_ring && product.b_in_ring);
    for (int32_t step = 0; step < task.steps; ++step) {
        if (!filler.begin_stage(task.parts() * kRowBoxBytes + 2 * kWeightBoxBytes)) return false;
        for (uint32_t part = 0; part < task.parts(); ++part) {
            ptx::tma_load_2d(filler.box(part), product.a, task.row + static_cast<int32_t>(part * kPartRows),
                             a_rows.row, filler.full());
        }
#pragma unroll
        for (uint32_t panel = 0; panel < kChunks; ++panel) {
            ptx::tma_load_2d(filler.box(kParts + panel), product.b,
                             task.column + static_cast<int32_t>(panel * kBoxColumns), b_rows.row,
                             filler.full());
        }
        filler.end_stage();
        a_rows.next();
        b_rows.next();
    }
    if (!has(task, kLeavesChunks)) return true;
    const ptx::TensorMap* before =
        has(task, kAddsChunks) ? &gradients_of(params, task).weight[matrix] : nullptr;
    return load_chunks(filler, task, before, task.expert, has(task, kFloatChunks), columns);
}

/// Rows of dg, du or dout where B of a product would lie.
MOK_DEVICE bool load_bias(const MoeBackwardParams& params, StageFiller& filler, const BackwardTask& task) {
    const MoeBackwardRows& rows = rows_of(params, task);
    const int32_t matrix = matrix_of(task);
    const ptx::TensorMap* map = matrix == Matrix::kGate ? &rows.dgate
                                : matrix == Matrix::kUp ? &rows.dup
                                                        : &rows.dout;
    const uint32_t panels = static_cast<uint32_t>(chunks_of(gradient_rows(params, task) - task.column));
    StepRows rows_of_step = step_rows(params, task, true);
    for (int32_t step = 0; step < task.steps; ++step) {
        if (!filler.begin_stage(panels * kRowBoxBytes)) return false;
        for (uint32_t panel = 0; panel < panels; ++panel) {
            ptx::tma_load_2d(filler.box(kParts + panel), map,
                             task.column + static_cast<int32_t>(panel * kBoxColumns), rows_of_step.row,
                             filler.full());
        }
        filler.end_stage();
        rows_of_step.next();
    }
    return true;
}

MOK_DEVICE bool load_task(const MoeBackwardParams& params, StageFiller& filler, const BackwardTask& task) {
    switch (static_cast<TaskKind>(task.kind)) {
        case TaskKind::kGateUp:
            return load_gate_up(params, filler, task);
        case TaskKind::kDHidden:
            return load_dhidden(params, filler, task);
        case TaskKind::kDx:
            return load_dx(params, filler, task);
        case TaskKind::kRouterGrad:
            return true;
        default:
            return is_wgrad(task) ? load_wgrad(params, filler, task) : load_bias(params, filler, task);
    }
}

/// One thread.
MOK_DEVICE bool run_loader(const MoeBackwardParams& params, const Shared& shared) {
    ptx::Deadline deadline = deadline_at(params, WaitPlace::kLoader);
    TaskCursor cursor;
    StageFiller filler{shared, deadline};
    for (;;) {
        const BackwardTask task = read_task<BackwardTask>(shared, cursor, deadline);
        if (task.kind == kExitTask) break;
        free_task(shared, cursor);
        // Rows that other blocks stored, as the scheduler has acquired; TMA reads them by another proxy.
        ptx::fence_proxy_async_global();
        filler.begin_task(stages_of(task));
        if (!load_task(params, filler, task)) break;
    }
    wait_stages_landed(shared, filler.cursor, deadline);
    return deadline.expired;
}

}  // namespace mok::moe_backward_detail
