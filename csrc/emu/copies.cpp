#include "csrc/emu/copies.h"

#include <algorithm>
#include <cstring>

#include "csrc/emu/launch_state.h"
#include "csrc/emu/mbarrier.h"
#include "csrc/emu/memory.h"
#include "csrc/emu/report.h"
#include "csrc/emu/schedule.h"

namespace mok::emu {

namespace {

/// Calls f(first byte, bytes) for the pieces of global memory of a copy.
template <typename F>
void for_each_piece(const Copy& copy, F f) {
    copy.visit_global(
        [](void* context, uint8_t* first, size_t bytes) { (*static_cast<F*>(context))(first, bytes); }, &f);
}

void check_piece(const uint8_t* first, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(first) % 16 != 0 || bytes % 16 != 0) {
        fail(ErrorKind::kAlign, text("moves %zu bytes at global address %p: both must be multiples of 16",
                                     bytes, static_cast<const void*>(first)));
    }
}

void add_copy(std::unique_ptr<PendingCopy> copy) {
    Machine& m = *machine;
    ++copy->issuer->block().launch->copies;
    m.copies.push_back(std::move(copy));
    if (!chance(m.character.hold_chance)) std::swap(m.copies[m.num_active++], m.copies.back());
}

void remove_copy(size_t place) {
    Machine& m = *machine;
    LaunchState& launch = *m.copies[place]->issuer->block().launch;
    if (place < m.num_active) {
        std::swap(m.copies[place], m.copies[--m.num_active]);
        place = m.num_active;
    }
    std::swap(m.copies[place], m.copies.back());
    m.copies.pop_back();
    copy_done(launch);
}

/// A copy into shared memory of one block begins: the destination is undefined from here on.
AsyncRecord& begin_destination(Block& block, const CopyPlace& place, uint32_t barrier_offset) {
    Thread& me = *machine->current;
    Mbarrier& barrier = find_mbarrier_for_async(block, barrier_offset);
    if (barrier.component < 0) barrier.component = static_cast<int>(new_component());
    ++barrier.loads;
    AsyncRecord& record = new_record(me, barrier.component);
    barrier.last_load = &record;
    barrier.last_load_phase = barrier.phase + 1;
    block.shadow.access_async(me, place.shared, place.shared + place.bytes, kWrite, record);
    std::memset(block.shared + place.shared, kPoison, place.bytes);
    return record;
}

void complete_destination(Block& block, uint32_t barrier_offset, uint32_t bytes, AsyncRecord& record) {
    Mbarrier& barrier = block.mbarriers[static_cast<size_t>(block.mbarrier_of[barrier_offset / 8])];
    --barrier.loads;
    record.epoch = barrier.phase + 1;
    record.is_done = true;
    complete_bytes(block, barrier, bytes);
}

void step_load(PendingCopy& copy) {
    for (size_t i = 0; i < copy.targets.size(); ++i) {
        Block& block = *copy.targets[i];
        uint8_t* shared = block.shared + copy.place.shared;
        if (copy.kind == PendingCopy::Kind::kMessage) {
            std::memcpy(shared, copy.source.data(), copy.place.bytes);
        } else {
            copy.copy->load(shared);
        }
        complete_destination(block, copy.barrier, copy.place.bytes, *copy.records[i]);
    }
}

void wake_bulk_waiter(Thread& thread) {
    if (thread.wait.kind == WaitKind::kBulk || thread.wait.kind == WaitKind::kBulkRead) make_ready(thread);
}

/// Reads the source, later writes the destination; true when it has done both.
bool step_store(PendingCopy& copy) {
    Thread& issuer = *copy.issuer;
    BulkGroup& group = issuer.bulk->at(copy.group);
    if (!copy.has_read) {
        const uint8_t* shared = issuer.block().shared + copy.place.shared;
        copy.source.assign(shared, shared + copy.place.bytes);
        copy.has_read = true;
        copy.records[0]->is_done = true;
        --group.unread;
        wake_bulk_waiter(issuer);
        return false;
    }
    copy.copy->store(copy.source.data());
    copy.records[1]->is_done = true;
    --group.unwritten;
    wake_bulk_waiter(issuer);
    return true;
}

bool step(PendingCopy& copy) {
    note_progress();
    if (keeps_log()) {
        const AsyncRecord& record = *copy.records.front();
        const bool reads = copy.kind == PendingCopy::Kind::kStore && !copy.has_read;
        log_line(text("%s: %s at %s %s", describe(*copy.issuer).c_str(), record.instruction,
                      describe(record.site).c_str(), reads ? "has read its source" : "is complete"));
    }
    if (copy.kind == PendingCopy::Kind::kStore) return step_store(copy);
    step_load(copy);
    return true;
}

/// The blocks of a multicast's mask, or the own block.
std::vector<Block*> targets_of(uint16_t blocks) {
    Block& mine = machine->current->block();
    if (blocks == 0) return {&mine};
    std::vector<Block*> targets;
    const auto& cluster = mine.cluster->blocks;
    for (uint32_t rank = 0; rank < 16; ++rank) {
        if ((blocks >> rank & 1) == 0) continue;
        if (rank >= cluster.size()) {
            fail(ErrorKind::kBounds, text("names block %u of a cluster of %zu", rank, cluster.size()));
        }
        targets.push_back(cluster[rank]);
    }
    return targets;
}

}  // namespace

void issue_load(const char* instruction, std::unique_ptr<Copy> copy, const CopyPlace& place, uint32_t barrier,
                uint16_t blocks) {
    Thread& me = *machine->current;
    me.instruction = instruction;
    auto pending = std::make_unique<PendingCopy>();
    pending->kind = PendingCopy::Kind::kLoad;
    pending->issuer = &me;
    pending->place = place;
    pending->place.shared = locate(place.shared, place.bytes, place.alignment).offset;
    pending->barrier = locate(barrier, 8, 8).offset;
    pending->targets = targets_of(blocks);
    for (Block* block : pending->targets) {
        if (block->has_exited) {
            fail(ErrorKind::kExited,
                 text("writes shared memory of block %u, which has left the kernel", block->idx));
        }
        if (block != &me.block()) use_remote(*block);
        pending->records.push_back(&begin_destination(*block, pending->place, pending->barrier));
    }
    for_each_piece(*copy, [&](uint8_t* first, size_t bytes) {
        check_piece(first, bytes);
        RegionState& region = locate_global(first, bytes, false);
        if (region.region.is_constant) return;
        const uint64_t begin = static_cast<uint64_t>(first - region.begin);
        region.shadow.access_async(me, begin, begin + bytes, kRead, *pending->records.front());
    });
    pending->copy = std::move(copy);
    add_copy(std::move(pending));
}

void issue_store(const char* instruction, std::unique_ptr<Copy> copy, const CopyPlace& place) {
    Thread& me = *machine->current;
    me.instruction = instruction;
    auto pending = std::make_unique<PendingCopy>();
    pending->kind = PendingCopy::Kind::kStore;
    pending->issuer = &me;
    pending->place = place;
    const SharedPlace source = locate(place.shared, place.bytes, place.alignment);
    if (source.block != &me.block()) fail(ErrorKind::kBounds, "reads another block's shared memory");
    pending->place.shared = source.offset;
    if (me.bulk == nullptr) me.bulk = std::make_unique<BulkGroups>();
    const int component = static_cast<int>(component_of(me));
    AsyncRecord &read = new_record(me, component), &written = new_record(me, component);
    me.block().shadow.access_async(me, source.offset, source.offset + place.bytes, kRead, read);
    written.is_reduction = copy->is_reduction();
    for_each_piece(*copy, [&](uint8_t* first, size_t bytes) {
        check_piece(first, bytes);
        RegionState& region = locate_global(first, bytes, true);
        const uint64_t begin = static_cast<uint64_t>(first - region.begin);
        region.shadow.access_async(me, begin, begin + bytes, {written.is_reduction, true, Scope::kNone},
                                   written);
        if (!written.is_reduction) std::memset(first, kPoison, bytes);
    });
    pending->records = {&read, &written};
    BulkGroup& open = me.bulk->open;
    open.reads.push_back(&read);
    open.writes.push_back(&written);
    ++open.unread;
    ++open.unwritten;
    pending->group = me.bulk->num_retired + me.bulk->committed.size();
    pending->copy = std::move(copy);
    add_copy(std::move(pending));
}

void store_async(uint32_t address, const uint32_t (&words)[4], uint32_t barrier) {
    Thread& me = *machine->current;
    const SharedPlace place = locate(address, sizeof(words), sizeof(words)), at = locate(barrier, 8, 8);
    if (place.block != at.block) {
        fail(ErrorKind::kBarrier,
             text("writes block %u, but completes on block %u", place.block->idx, at.block->idx));
    }
    auto pending = std::make_unique<PendingCopy>();
    pending->kind = PendingCopy::Kind::kMessage;
    pending->issuer = &me;
    pending->place = {place.offset, sizeof(words), sizeof(words)};
    pending->barrier = at.offset;
    pending->targets = {place.block};
    pending->source.resize(sizeof(words));
    std::memcpy(pending->source.data(), words, sizeof(words));
    pending->records.push_back(&begin_destination(*place.block, pending->place, at.offset));
    add_copy(std::move(pending));
}

void bulk_commit() {
    Thread& me = *machine->current;
    if (me.bulk == nullptr) me.bulk = std::make_unique<BulkGroups>();
    me.bulk->committed.push_back(std::move(me.bulk->open));
    me.bulk->open = {};
}

void bulk_wait(int groups, bool reads_only) {
    Thread& me = *machine->current;
    if (me.bulk == nullptr) return;
    BulkGroups& bulk = *me.bulk;
    const uint64_t committed = bulk.num_retired + bulk.committed.size();
    const uint64_t covered = committed - std::min(committed, static_cast<uint64_t>(groups));
    const auto is_done = [&] {
        for (uint64_t group = bulk.num_retired; group < covered; ++group) {
            const BulkGroup& g = bulk.at(group);
            if (g.unread != 0 || (!reads_only && g.unwritten != 0)) return false;
        }
        return true;
    };
    const WaitKind kind = reads_only ? WaitKind::kBulkRead : WaitKind::kBulk;
    while (!is_done()) block_current({kind, static_cast<uint32_t>(groups)});
    for (uint64_t group = bulk.num_retired; group < covered; ++group) {
        for (AsyncRecord* record : bulk.at(group).reads) record->epoch = std::min(record->epoch, me.epoch);
    }
    while (bulk.num_retired < covered && bulk.committed.front().unwritten == 0) {
        for (AsyncRecord* record : bulk.committed.front().writes) {
            bulk.unawaited.emplace_back(bulk.num_retired, record);
        }
        bulk.committed.pop_front();
        ++bulk.num_retired;
    }
    if (reads_only) return;
    std::erase_if(bulk.unawaited, [&](const auto& write) {
        if (write.first >= covered) return false;
        write.second->epoch = me.epoch;
        return true;
    });
}

Machine::Machine() = default;
Machine::~Machine() = default;

bool has_active_copies() {
    return machine->num_active != 0 || !machine->multiplying.empty();
}

void step_copies() {
    Machine& m = *machine;
    const size_t place = random_below(static_cast<uint32_t>(m.num_active + m.multiplying.size()));
    if (place >= m.num_active) {
        step_wgmma(*m.multiplying[place - m.num_active]);
        return;
    }
    ++m.result.stats.copies;
    if (step(*m.copies[place])) {
        remove_copy(place);
    } else if (chance(m.character.hold_chance)) {
        std::swap(m.copies[place], m.copies[--m.num_active]);  // its write may be late again
    }
}

bool let_held_copy_go() {
    Machine& m = *machine;
    const size_t held = m.copies.size() - m.num_active;
    if (held == 0) return false;
    std::swap(m.copies[m.num_active], m.copies[m.num_active + random_below(static_cast<uint32_t>(held))]);
    ++m.num_active;
    return true;
}

void drop_copies(const LaunchState& launch) {
    Machine& m = *machine;
    for (size_t place = m.copies.size(); place-- > 0;) {
        if (m.copies[place]->issuer->block().launch != &launch) continue;
        if (place < m.num_active) {
            std::swap(m.copies[place], m.copies[--m.num_active]);
            std::swap(m.copies[m.num_active], m.copies.back());
        } else {
            std::swap(m.copies[place], m.copies.back());
        }
        m.copies.pop_back();
    }
}

void check_copies_at_exit(Block& block) {
    for (const Mbarrier& barrier : block.mbarriers) {
        if (barrier.last_load == nullptr) continue;
        const uint32_t known = block.end.known[static_cast<uint32_t>(barrier.component)];
        if (barrier.loads == 0 && known >= barrier.last_load_phase) continue;
        const AsyncRecord& load = *barrier.last_load;
        fail(
            ErrorKind::kExited,
            text("ends the block, but no thread of it has waited for phase %u of %s, on which %s at %s by %s "
                 "into its shared memory completes%s: a load is waited for before the end, or it lands in "
                 "the memory of whoever comes next",
                 barrier.last_load_phase - 1, describe_shared(block, barrier.address).c_str(),
                 load.instruction, describe(load.site).c_str(), describe(*load.issuer).c_str(),
                 load.is_done ? "" : " (it is still in flight)"));
    }
    for (uint32_t i = 0; i < block.num_threads; ++i) {
        Thread& thread = block.threads[i];
        if (thread.bulk == nullptr) continue;
        const auto check = [&](const BulkGroup& group) {
            for (const AsyncRecord* record : group.reads) {
                if (record->epoch != AsyncRecord::kOpen) continue;
                fail(ErrorKind::kExited,
                     text("ends the block, but %s has not waited for its %s at %s, which may still read the "
                          "block's shared memory: bulk_wait_read comes before the end",
                          describe(thread).c_str(), record->instruction, describe(record->site).c_str()));
            }
        };
        for (const BulkGroup& group : thread.bulk->committed) check(group);
        check(thread.bulk->open);
    }
}

}  // namespace mok::emu
