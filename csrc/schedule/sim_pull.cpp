// A CTA's pull warp.
#include <algorithm>

#include "csrc/layout/check.h"
#include "csrc/schedule/simulator.h"

namespace mok::schedule {

int64_t Simulator::pull_index(const RankState& rank, int64_t element) const {
    return options_.bug.is(BugKind::kReversePulls) ? rank.model->table().num_pulls - 1 - element : element;
}

bool Simulator::claim_pulls(RankState& rank, Cta& cta) {
    const int64_t num_pulls = rank.model->table().num_pulls;
    int64_t begin = rank.next_pull;
    if (options_.bug.is(BugKind::kStaticPulls)) {
        const int64_t cta_idx = &cta - rank.ctas.data();
        begin = (cta.static_next++ * options_.num_ctas + cta_idx) * options_.pull_batch;
    } else {
        rank.next_pull += options_.pull_batch;
    }
    if (begin >= num_pulls) return false;
    cta.batch = Range{begin, std::min<int64_t>(begin + options_.pull_batch, num_pulls)};
    cta.cursor = begin;
    cta.loaded = false;
    return true;
}

double Simulator::pull_delay(RankState& rank, const Cta& cta) {
    const int64_t elements = cta.batch.end - cta.cursor;
    if (elements <= 0 || cta.loaded) return 0;
    int64_t remote = 0;
    for (int64_t e = cta.cursor; e < cta.batch.end; ++e) {
        const int32_t peer = rank.model->units.units[rank.model->pulls[pull_index(rank, e)].unit].peer;
        remote += peer != kZeroSource && peer != rank.model->rank ? 1 : 0;
    }
    rank.link_free = std::max(rank.link_free, clock_.now()) + static_cast<double>(remote) * costs_->link;
    return std::max(static_cast<double>(elements) * costs_->pull, rank.link_free - clock_.now());
}

void Simulator::step_pull(RankState& rank, int32_t cta_idx) {
    Cta& cta = rank.ctas[cta_idx];
    const int32_t own = agents_.agent(rank.model->rank, cta_idx, Role::kPull);
    if (cta.cursor == cta.batch.end) {
        if (cta.no_more_pulls) return;
        if (!claim_pulls(rank, cta)) {
            cta.no_more_pulls = true;
            maybe_exit(rank, cta_idx);
            return;
        }
        wake(own);
        return;
    }
    if (!cta.loaded) {
        cta.loaded = true;
        for (int64_t e = cta.batch.begin; e < cta.batch.end; ++e) {
            const PullElement& element = rank.model->pulls[pull_index(rank, e)];
            const PullUnit& unit = rank.model->units.units[element.unit];
            if (unit.peer == kZeroSource || ranks_[unit.peer].published) continue;
            fail(Violation{"read before written", 0, 1, 0,
                           concat("loads token ", unit.token, " of rank ", unit.peer,
                                  ", which has not published its inputs")},
                 rank, cta_idx, Role::kPull, "pull");
            break;
        }
    }
    if (cta.num_pending == kPendingPulls) return;  // the completion wakes us
    const int64_t begin = cta.cursor;
    while (cta.cursor < cta.batch.end && await_slots(own, rank, cta.cursor)) {
        issue_pull(rank, cta_idx, cta.cursor);
        ++cta.cursor;
    }
    if (cta.cursor > begin) {
        cta.pending[cta.num_pending++] = Range{begin, cta.cursor};
        wake(agents_.agent(rank.model->rank, cta_idx, Role::kPullDone));
    }
    if (status_[own] == Agent::kIdle) wake(own);
}

bool Simulator::await_slots(int32_t agent, RankState& rank, int64_t element) {
    const RankModel& model = *rank.model;
    const int32_t unit = model.pulls[pull_index(rank, element)].unit;
    int32_t last_block = -1;
    for (int32_t r = model.units.row_begin[unit]; r < model.units.row_begin[unit + 1]; ++r) {
        const int32_t block = model.units.rows[r] / model.shape().block_m;
        if (block == last_block) continue;
        last_block = block;
        Wait waits[kMaxWaits];
        const int32_t num_waits = pull_waits(model.shape(), model.table(), block, waits);
        if (!await(agent, rank, waits, num_waits)) return false;
    }
    return true;
}

void Simulator::issue_pull(RankState& rank, int32_t cta_idx, int64_t element_idx) {
    const RankModel& model = *rank.model;
    const PullElement& element = model.pulls[pull_index(rank, element_idx)];
    const Buffer buffer = element.what == Pulled::kX ? kBufferX : kBufferDout;
    const Counter counter = pull_counter(element.what);
    for (int32_t r = model.units.row_begin[element.unit]; r < model.units.row_begin[element.unit + 1]; ++r) {
        const int32_t block = model.units.rows[r] / model.shape().block_m;
        const Violation violation = rank.memory.begin_write(buffer, false, block);
        if (violation.type != nullptr)
            fail(violation, rank, cta_idx, Role::kPull, concat("pull row ", model.units.rows[r]));
        if (signals_early(counter)) signal(rank, counter, counter_block(model.shape(), false, block), 1);
    }
}

void Simulator::step_pull_done(RankState& rank, int32_t cta_idx) {
    Cta& cta = rank.ctas[cta_idx];
    const int32_t own = agents_.agent(rank.model->rank, cta_idx, Role::kPullDone);
    const int32_t pull = agents_.agent(rank.model->rank, cta_idx, Role::kPull);
    if (options_.bug.is(BugKind::kHoldSignals) && status_[pull] == Agent::kWaiting) return;
    const Range range = cta.pending[0];
    --cta.num_pending;
    for (int32_t i = 0; i < cta.num_pending; ++i) cta.pending[i] = cta.pending[i + 1];
    signal_pulls(rank, range);
    if (cta.num_pending > 0) wake(own);
    wake(pull);
    maybe_exit(rank, cta_idx);
}

void Simulator::signal_pulls(RankState& rank, const Range& range) {
    const RankModel& model = *rank.model;
    const ScheduleShape& shape = model.shape();
    for (int64_t e = range.begin; e < range.end; ++e) {
        const PullElement& element = model.pulls[pull_index(rank, e)];
        const Buffer buffer = element.what == Pulled::kX ? kBufferX : kBufferDout;
        const Counter counter = pull_counter(element.what);
        for (int32_t r = model.units.row_begin[element.unit]; r < model.units.row_begin[element.unit + 1];
             ++r) {
            const int32_t block = model.units.rows[r] / shape.block_m;
            const Violation violation = rank.memory.end_write(buffer, false, block, 1);
            if (violation.type != nullptr)
                fail(violation, rank, -1, Role::kPullDone, concat("pull row ", model.units.rows[r]));
            if (!signals_early(counter)) signal(rank, counter, counter_block(shape, false, block), 1);
        }
    }
}

}  // namespace mok::schedule
