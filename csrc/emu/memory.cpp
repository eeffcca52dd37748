#include "csrc/emu/memory.h"

#include "csrc/emu/report.h"
#include "csrc/emu/schedule.h"

namespace mok::emu {

namespace {

constexpr uint32_t kOffsetMask = (1u << kOffsetBits) - 1;

uint8_t* access_shared(Thread& thread, uint32_t address, uint32_t bytes, Access access) {
    const SharedPlace place = locate(address, bytes, bytes);
    Block& block = *place.block;
    if (block.mbarrier_of[place.offset / 8] >= 0 || block.mbarrier_of[(place.offset + bytes - 1) / 8] >= 0) {
        fail(ErrorKind::kBarrier,
             text("touches the mbarrier at %s as ordinary memory; mbar_invalidate comes first",
                  describe_shared(block, place.offset).c_str()));
    }
    block.shadow.access(thread, place.offset, bytes, access);
    if (access.writes) note_progress();
    return block.shared + place.offset;
}

/// The region that an address is nearest to, for the report.
std::string nearest_region(const uint8_t* address) {
    if (address == nullptr) return "a null pointer";
    const RegionState* nearest = nullptr;
    for (const auto& region : machine->regions) {
        if (region->begin <= address) nearest = region.get();
    }
    if (nearest == nullptr) return "before all regions";
    return text("%llu bytes past the end of %s", static_cast<unsigned long long>(address - nearest->end),
                nearest->region.name.c_str());
}

}  // namespace

SharedPlace locate(uint32_t address, uint32_t bytes, uint32_t alignment) {
    Block* block = &machine->current->block();
    const uint32_t rank = address >> kOffsetBits, offset = address & kOffsetMask;
    if (rank != 0) {
        const auto& blocks = block->cluster->blocks;
        if (rank > blocks.size()) {
            fail(ErrorKind::kBounds, text("names block %u of a cluster of %zu", rank - 1, blocks.size()));
        }
        block = blocks[rank - 1];
        if (block->has_exited) {
            fail(ErrorKind::kExited,
                 text("uses shared memory of block %u, which has left the kernel; a cluster "
                      "barrier before the end keeps it",
                      block->idx));
        }
    }
    if (offset < kDynamicShared || offset + bytes > block->shared_end()) {
        fail(ErrorKind::kBounds,
             text("touches shared bytes [%u, %u), but the block has [0, %u)", offset - kDynamicShared,
                  offset - kDynamicShared + bytes, block->shared_end() - kDynamicShared));
    }
    if (offset % alignment != 0) {
        fail(ErrorKind::kAlign, text("touches shared byte %u, which is not a multiple of %u",
                                     offset - kDynamicShared, alignment));
    }
    if (block != &machine->current->block()) use_remote(*block);
    return {block, offset};
}

void use_remote(Block& block) {
    Thread& me = *machine->current;
    block.remote_uses[&me] = {&me, stamp_of(me, Space::kShared), me.instruction, me.site};
}

RegionState& locate_global(const void* address, size_t bytes, bool writes) {
    Machine& m = *machine;
    const uint8_t* at = static_cast<const uint8_t*>(address);
    RegionState* region = m.last_region;
    if (region == nullptr || at < region->begin || at >= region->end) {
        region = nullptr;
        size_t low = 0, high = m.regions.size();
        while (low < high) {
            const size_t middle = (low + high) / 2;
            if (m.regions[middle]->begin <= at) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        if (low > 0 && at < m.regions[low - 1]->end) region = m.regions[low - 1].get();
        if (region == nullptr) {
            fail(ErrorKind::kBounds, text("touches %zu bytes of global memory at %p: %s", bytes, address,
                                          nearest_region(at).c_str()));
        }
        m.last_region = region;
    }
    if (static_cast<size_t>(region->end - at) < bytes) {
        fail(ErrorKind::kBounds,
             text("touches %zu bytes at %s, past its end", bytes, describe_global(address).c_str()));
    }
    const Region& r = region->region;
    const Thread& me = *m.current;
    if (r.rank != rank_of(me) && r.rank != Region::kAnyRank && !r.peer_visible) {
        fail(ErrorKind::kBounds,
             text("touches %s, which is private to rank %d", describe_global(address).c_str(), r.rank));
    }
    if (writes && r.is_constant) {
        fail(ErrorKind::kUsage, text("writes %s, which is constant", describe_global(address).c_str()));
    }
    if (region->start_component >= 0 && me.view.known[static_cast<uint32_t>(region->start_component)] == 0) {
        fail(ErrorKind::kOrder,
             text("touches %s before anything says that rank %d's kernel has begun; until then "
                  "the host may still write it",
                  describe_global(address).c_str(), r.rank));
    }
    return *region;
}

uint8_t* shared_access(uint32_t address, uint32_t bytes, Access access) {
    return access_shared(*machine->current, address, bytes, access);
}

uint8_t* shared_access_of_lane(uint32_t lane, uint32_t address, uint32_t bytes, Access access) {
    return access_shared(machine->current->warp->lanes[lane], address, bytes, access);
}

uint8_t* global_access(const void* address, uint32_t bytes, Access access) {
    if (reinterpret_cast<uintptr_t>(address) % bytes != 0) {
        fail(ErrorKind::kAlign,
             text("touches global address %p, which is not a multiple of %u", address, bytes));
    }
    RegionState& region = locate_global(address, bytes, access.writes);
    const uint8_t* at = static_cast<const uint8_t*>(address);
    if (!region.region.is_constant) {
        region.shadow.access(*machine->current, static_cast<uint64_t>(at - region.begin), bytes, access);
    }
    if (access.writes) note_progress();
    return region.begin + (at - region.begin);
}

uint32_t cluster_address(uint32_t address, uint32_t rank) {
    const size_t blocks = machine->current->block().cluster->blocks.size();
    if (rank >= blocks) {
        fail(ErrorKind::kBounds, text("names block %u of a cluster of %zu", rank, blocks));
    }
    return (address & kOffsetMask) | (rank + 1) << kOffsetBits;
}

}  // namespace mok::emu
