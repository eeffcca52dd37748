#include "csrc/symm/registry.h"

#include <map>
#include <mutex>
#include <utility>

#include "csrc/layout/check.h"
#include "csrc/symm/device_heap.h"
#include "csrc/symm/workspace.h"

namespace mok {
namespace {

struct Registry {
    std::mutex mutex;
    std::map<std::string, std::shared_ptr<Workspace>> by_name;
};

// Never destroyed: ops may run while the process ends.
Registry& registry() {
    static Registry& instance = *new Registry;
    return instance;
}

void require_open(const Workspace& workspace) {
    if (workspace.closed) {
        throw WorkspaceClosed(concat("workspace ", workspace.name, " is closed; create a new one."));
    }
    if (workspace.heap && !workspace.heap->in_owner_process()) {
        throw WorkspaceClosed(
            concat("workspace ", workspace.name,
                   " belongs to the process this one was forked from; create one of its own."));
    }
}

std::shared_ptr<Workspace> make_workspace(const WorkspaceSpec& spec) {
    auto workspace = std::make_shared<Workspace>();
    workspace->name = spec.name;
    workspace->max_tokens = spec.max_tokens;
    workspace->hidden = spec.hidden;
    workspace->top_k = spec.top_k;
    workspace->dtype = spec.dtype;
    if (spec.num_ranks > 1) {
        workspace->layout = window_layout(PeerComm::control_bytes(spec.num_ranks), spec.max_tokens,
                                          spec.top_k, spec.hidden, spec.dtype);
    }
    return workspace;
}

/// One rank passes its tensors by pointer: its heap is the arena, and on a GPU the control block.
int64_t fixed_bytes(const WorkspaceSpec& spec, const Workspace& workspace) {
    if (spec.num_ranks > 1) return workspace.layout.bytes;
    return spec.device == kHostDevice ? 1 : PeerComm::control_bytes(spec.num_ranks);
}

}  // namespace

std::shared_ptr<Workspace> create_workspace(const WorkspaceSpec& spec) {
    std::shared_ptr<Workspace> workspace = make_workspace(spec);
    workspace->heap = std::make_shared<SymmHeap>(spec.rank, spec.num_ranks, fixed_bytes(spec, *workspace),
                                                 spec.arena_bytes, spec.device);
    return workspace;
}

std::vector<std::shared_ptr<Workspace>> create_virtual_workspaces(const WorkspaceSpec& spec,
                                                                  uint32_t multiprocessors) {
    std::vector<std::shared_ptr<Workspace>> workspaces;
    for (int rank = 0; rank < spec.num_ranks; ++rank) {
        workspaces.push_back(make_workspace(spec));
        workspaces.back()->name += concat("/", rank);
        workspaces.back()->most_blocks = multiprocessors / static_cast<uint32_t>(spec.num_ranks);
    }
    const std::vector<std::shared_ptr<SymmHeap>> heaps = SymmHeap::create_virtual(
        spec.num_ranks, fixed_bytes(spec, *workspaces[0]), spec.arena_bytes, spec.device);
    for (int rank = 0; rank < spec.num_ranks; ++rank) {
        workspaces[static_cast<size_t>(rank)]->heap = heaps[static_cast<size_t>(rank)];
        workspaces[static_cast<size_t>(rank)]->device_comm =
            make_device_comm(*heaps[static_cast<size_t>(rank)]);
    }
    return workspaces;
}

void connect_workspace(Workspace& workspace, const std::vector<std::string>& addresses, double timeout_s) {
    SymmHeap& heap = *workspace.heap;
    heap.connect(addresses, timeout_s);
    if (workspace.is_device()) {
        workspace.device_comm = make_device_comm(heap);
    } else if (heap.num_ranks() > 1) {
        workspace.comm = std::make_unique<PeerComm>(heap.window(heap.rank()), heap.stride(), heap.rank(),
                                                    heap.num_ranks());
    }
}

void register_workspace(std::shared_ptr<Workspace> workspace) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    const std::string name = workspace->name;
    MOK_CHECK(all.by_name.emplace(name, std::move(workspace)).second, "name is '", name,
              "', but an open workspace has it already; close that one first.");
}

std::shared_ptr<Workspace> find_workspace(const std::string& name) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto found = all.by_name.find(name);
    if (found == all.by_name.end()) {
        throw WorkspaceClosed(
            concat("no open workspace is named '", name, "'; it was closed or never created."));
    }
    return found->second;
}

void set_workspace_timeout(Workspace& workspace, double seconds) {
    const std::lock_guard lock(workspace.mutex);
    if (workspace.comm) workspace.comm->set_timeout(seconds);
    if (workspace.device_comm && !workspace.closed)
        set_device_timeout(*workspace.heap, *workspace.device_comm, seconds);
}

void abort_workspace(Workspace& workspace, const std::string& reason) {
    require_open(workspace);
    const std::lock_guard lock(workspace.mutex);
    require_open(workspace);
    if (!workspace.comm) return;
    if (!workspace.comm->in_call()) workspace.comm->begin_call();
    workspace.comm->abort_call(reason);
}

void check_workspace(Workspace& workspace) {
    require_open(workspace);
    const std::lock_guard lock(workspace.mutex);
    require_open(workspace);
    if (workspace.comm) workspace.comm->check();
    if (workspace.device_comm) workspace.device_comm->check();
}

std::vector<int> close_workspace(Workspace& workspace, double seconds) {
    {
        Registry& all = registry();
        const std::lock_guard lock(all.mutex);
        const auto found = all.by_name.find(workspace.name);
        if (found != all.by_name.end() && found->second.get() == &workspace) all.by_name.erase(found);
    }
    if (workspace.heap && !workspace.heap->in_owner_process()) return {};
    std::unique_lock lock(workspace.mutex, std::defer_lock);
    if (seconds > 0) {
        lock.lock();
    } else if (!lock.try_lock()) {
        return {};
    }
    if (workspace.closed) return {};
    workspace.closed = true;
    std::vector<int> missing;
    if (workspace.comm) missing = workspace.comm->close(seconds);
    if (workspace.device_comm && seconds <= 0) end_device_waits(*workspace.heap);
    workspace.launch_state.reset();
    workspace.device_scratch.release();
    if (workspace.heap) workspace.heap->close();
    workspace.scratch.release();
    return missing;
}

}  // namespace mok
