#include "csrc/emu/shadow.h"

#include <algorithm>

#include "csrc/emu/report.h"
#include "csrc/emu/state.h"

namespace mok::emu {

namespace {

/// Things of one size that are all given back together.
template <typename T>
class Arena {
  public:
    T* take() {
        if (free_ != nullptr) {
            Slot* slot = free_;
            free_ = slot->next;
            return new (slot) T;
        }
        if (used_ == chunks_.size() * kChunk) chunks_.push_back(std::make_unique<Slot[]>(kChunk));
        Slot* slot = &chunks_[used_ / kChunk][used_ % kChunk];
        ++used_;
        return new (slot) T;
    }
    void give_back(T* thing) {
        Slot* slot = reinterpret_cast<Slot*>(thing);
        slot->next = free_;
        free_ = slot;
    }
    void reset() {
        free_ = nullptr;
        used_ = 0;
    }

  private:
    static constexpr size_t kChunk = 1024;
    union Slot {
        Slot() : next(nullptr) {}
        ~Slot() {}
        Slot* next;
        T thing;
    };
    std::vector<std::unique_ptr<Slot[]>> chunks_;
    Slot* free_ = nullptr;
    size_t used_ = 0;
};

Arena<ShadowPage>& pages() {
    static Arena<ShadowPage> arena;
    return arena;
}

Arena<ShadowNode>& nodes() {
    static Arena<ShadowNode> arena;
    return arena;
}

bool reaches(Scope scope, const Block& from, const Block& to) {
    switch (scope) {
        case Scope::kNone:
            return false;
        case Scope::kBlock:
            return &from == &to;
        case Scope::kCluster:
            return from.cluster == to.cluster;
        case Scope::kGpu:
            return from.launch->launch->rank == to.launch->launch->rank;
        case Scope::kSys:
            return true;
    }
    return false;
}

/// One new access, the same for all pages that it touches.
struct Request {
    const Shadow& shadow;
    Thread& thread;
    Thread* const* viewers;  // threads that must come after what was there
    uint32_t num_viewers;
    Access access;
    AsyncRecord* record;  // nullptr: an ordinary access
    ThreadStamp stamp;

    /// Fails unless the access comes after the node's (or may go beside it). `at`: where the page begins.
    void check(const ShadowNode& node, uint64_t at) const {
        if (!node.access.writes && !access.writes) return;
        if (record != nullptr && node.record == record) return;  // pieces of one copy
        if (access.scope != Scope::kNone && node.access.scope != Scope::kNone) {
            const Block &mine = thread.block(), &theirs = *node.stamp.warp->block;
            if (reaches(access.scope, mine, theirs) && reaches(node.access.scope, theirs, mine)) return;
        }
        for (uint32_t i = 0; i < num_viewers; ++i) {
            const Thread& viewer = *viewers[i];
            const bool known = node.record != nullptr ? is_known(*node.record, viewer, !node.access.writes)
                                                      : is_known(node.stamp, viewer, !node.access.writes);
            if (!known && !has_ended(node)) fail_order(shadow, at, viewer, access, record != nullptr, node);
            if (record != nullptr) check_proxy(viewer, node, at);
        }
    }

    /// Whether one of the two is of a rank that the host has ended (EndedRank).
    bool has_ended(const ShadowNode& node) const {
        if (!machine->has_ended_rank) return false;
        const Block& older = node.record != nullptr ? node.record->issuer->block() : *node.stamp.warp->block;
        const int rank = machine->options.ended.rank;
        return rank_of(thread) == rank || older.launch->launch->rank == rank;
    }

    void check_proxy(const Thread& viewer, const ShadowNode& node, uint64_t at) const {
        const bool is_read_after_write = node.access.writes && access.reads;
        if (node.record == nullptr) {
            if (is_fenced(node.stamp, viewer, shadow.space)) return;
        } else {
            // Inside of a block copies and wgmmas are one proxy, and an mbarrier orders them across a
            // cluster.
            if (shadow.space == Space::kShared || &node.record->issuer->block() == &viewer.block()) return;
            if (is_fenced(*node.record, viewer, shadow.space)) return;
        }
        if (has_ended(node)) return;
        const bool is_error = shadow.space == Space::kShared || is_read_after_write;
        report_proxy(shadow, at, viewer, access, node, is_error);
    }

    /// Whether a new read makes an older one redundant: by the same operation or barrier, or the same lane.
    bool repeats(const ShadowNode& node) const {
        if (access.writes || node.access.writes || node.access.scope != access.scope) return false;
        if (record != nullptr) {
            return node.record != nullptr && node.record != record &&
                   node.record->component == record->component;
        }
        return node.record == nullptr && node.stamp.warp == stamp.warp &&
               (node.stamp.lanes & stamp.lanes) != 0;
    }

    /// Whether a new write leaves nothing of an older access to be looked at: later ones come after both.
    bool covers(const ShadowNode& node) const {
        if (!access.writes) return false;
        if (access.scope == Scope::kNone || node.access.scope == Scope::kNone) return true;
        return node.stamp.warp == stamp.warp && (node.stamp.lanes & ~stamp.lanes) == 0;
    }

    /// Whether an older read stands for the new one as well.
    bool joins(ShadowNode& node, uint32_t begin, uint32_t end) const {
        if (access.writes || node.access.writes || node.access.scope != access.scope) return false;
        if (record != nullptr) return node.record == record && node.begin <= begin && node.end >= end;
        ThreadStamp& older = node.stamp;
        if (node.record != nullptr || node.begin != begin || node.end != end || older.warp != stamp.warp ||
            older.warp_epoch != stamp.warp_epoch || older.fences != stamp.fences || older.thread_epoch != 1 ||
            stamp.thread_epoch != 1) {
            return false;
        }
        older.lanes |= stamp.lanes;
        return true;
    }
};

/// Takes [begin, end) out of a node; returns the link behind what is left of it.
ShadowNode** cut(ShadowNode** link, uint32_t begin, uint32_t end, int& nodes_added) {
    ShadowNode& node = **link;
    if (begin <= node.begin && node.end <= end) {
        *link = node.next;
        nodes().give_back(&node);
        --nodes_added;
        return link;
    }
    if (begin <= node.begin) {
        node.begin = static_cast<uint16_t>(end);
    } else if (end >= node.end) {
        node.end = static_cast<uint16_t>(begin);
    } else {
        ShadowNode* tail = nodes().take();
        *tail = node;
        tail->begin = static_cast<uint16_t>(end);
        node.end = static_cast<uint16_t>(begin);
        node.next = tail;
        ++nodes_added;
        return &tail->next;
    }
    return &node.next;
}

/// Checks the nodes of a list that overlap [begin, end) and takes out what the new access makes redundant.
/// Returns by how many nodes the list has grown.
int walk(ShadowNode** list, const Request& request, uint64_t at, uint32_t begin, uint32_t end) {
    int nodes_added = 0;
    for (ShadowNode** link = list; *link != nullptr;) {
        ShadowNode& node = **link;
        if (node.begin >= end || node.end <= begin) {
            link = &node.next;
            continue;
        }
        request.check(node, at);
        if (request.covers(node)) {
            link = cut(link, begin, end, nodes_added);
        } else if (request.repeats(node) && begin <= node.begin && node.end <= end) {
            if (request.record == nullptr) node.stamp.lanes &= ~request.stamp.lanes;
            link = request.record != nullptr || node.stamp.lanes == 0 ? cut(link, begin, end, nodes_added)
                                                                      : &node.next;
        } else {
            link = &node.next;
        }
    }
    return nodes_added;
}

void visit(ShadowPage& page, const Request& request, uint64_t at, uint32_t begin, uint32_t end) {
    walk(&page.ranges, request, at, begin, end);
    const uint32_t first_cell = begin / ShadowPage::kCellBytes;
    const uint32_t last_cell = (end - 1) / ShadowPage::kCellBytes;
    if (page.num_in_cells != 0) {
        for (uint32_t cell = first_cell; cell <= last_cell; ++cell) {
            if (page.cells[cell] == nullptr) continue;
            page.num_in_cells += static_cast<uint32_t>(walk(&page.cells[cell], request, at, begin, end));
        }
    }
    const bool is_cell = first_cell == last_cell;
    ShadowNode** list = is_cell ? &page.cells[first_cell] : &page.ranges;
    for (ShadowNode* node = *list; node != nullptr; node = node->next) {
        if (request.joins(*node, begin, end)) return;
    }
    ShadowNode* node = nodes().take();
    *node = {*list,
             request.record,
             request.stamp,
             machine->current->instruction,
             machine->current->site,
             static_cast<uint16_t>(begin),
             static_cast<uint16_t>(end),
             request.access};
    *list = node;
    page.num_in_cells += is_cell ? 1 : 0;
}

/// f(page index, first byte in the page, end in the page) for the pages of [begin, end).
template <typename F>
void for_each_page(uint64_t begin, uint64_t end, const F& f) {
    while (begin < end) {
        const uint64_t index = begin / ShadowPage::kBytes, page_begin = index * ShadowPage::kBytes;
        const uint64_t stop = std::min<uint64_t>(end, page_begin + ShadowPage::kBytes);
        f(index, static_cast<uint32_t>(begin - page_begin), static_cast<uint32_t>(stop - page_begin));
        begin = stop;
    }
}

}  // namespace

ShadowPage& Shadow::page(uint64_t index) {
    ShadowPage*& page = pages_[index];
    if (page == nullptr) page = pages().take();
    return *page;
}

void Shadow::access(Thread& thread, uint64_t begin, uint32_t bytes, Access access) {
    Thread* const viewers[] = {&thread};
    const Request request{*this, thread, viewers, 1, access, nullptr, stamp_of(thread, space)};
    const uint64_t index = begin / ShadowPage::kBytes, at = index * ShadowPage::kBytes;
    const uint32_t first = static_cast<uint32_t>(begin - at);
    visit(page(index), request, at, first, first + bytes);
}

void Shadow::access_async(Thread& thread, uint64_t begin, uint64_t end, Access access, AsyncRecord& record) {
    Thread* const viewers[] = {&thread};
    const Request request{*this, thread, viewers, 1, access, &record, {}};
    for_each_page(begin, end, [&](uint64_t index, uint32_t first, uint32_t stop) {
        visit(page(index), request, index * ShadowPage::kBytes, first, stop);
    });
}

void Shadow::access_wgmma(Warp& warp, uint64_t begin, uint64_t end, AsyncRecord& record) {
    Thread* viewers[kLanes];
    uint32_t num_viewers = 0;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
        if (num_viewers == 0 || !warp.lanes[lane].view.is_same(viewers[num_viewers - 1]->view)) {
            viewers[num_viewers++] = &warp.lanes[lane];
        }
    }
    const Request request{*this, *machine->current, viewers, num_viewers, kRead, &record, {}};
    for_each_page(begin, end, [&](uint64_t index, uint32_t first, uint32_t stop) {
        visit(page(index), request, index * ShadowPage::kBytes, first, stop);
    });
}

const ShadowNode* Shadow::unknown_write(const View& view, uint64_t* at) const {
    const auto is_unknown = [&](const ShadowNode& node) {
        if (!node.access.writes) return false;
        return node.record != nullptr ? !is_known(*node.record, view, false)
                                      : !is_known(node.stamp, view, false);
    };
    for (uint64_t index = 0; index < pages_.size(); ++index) {
        const ShadowPage* page = pages_[index];
        if (page == nullptr) continue;
        const ShadowNode* found = nullptr;
        for (const ShadowNode* node = page->ranges; node != nullptr; node = node->next) {
            if (is_unknown(*node)) found = node;
        }
        for (uint32_t cell = 0; page->num_in_cells != 0 && cell < ShadowPage::kCells; ++cell) {
            for (const ShadowNode* node = page->cells[cell]; node != nullptr; node = node->next) {
                if (is_unknown(*node)) found = node;
            }
        }
        if (found == nullptr) continue;
        *at = index * ShadowPage::kBytes + found->begin;
        return found;
    }
    return nullptr;
}

void reset_shadows() {
    nodes().reset();
    pages().reset();
}

}  // namespace mok::emu
