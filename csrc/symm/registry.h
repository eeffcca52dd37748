// The process-wide registry: ops name their workspace by a string, which is all that fits torch's schemas and
// what deepcopy and opcheck cannot duplicate.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/layout/types.h"

namespace mok {

struct Workspace;

struct WorkspaceSpec {
    std::string name;
    int rank = 0;
    int num_ranks = 1;
    int64_t max_tokens = 0;
    int64_t hidden = 0;
    int64_t top_k = 0;
    DType dtype = DType::kFloat32;
    int64_t arena_bytes = 0;
    int device = -1;  // a CUDA device, or SymmHeap's kHostDevice
};

/// Allocates this rank's window; neither connected nor registered. Throws HeapError.
std::shared_ptr<Workspace> create_workspace(const WorkspaceSpec& spec);
/// The connected workspaces of spec.num_ranks ranks that this process plays itself on spec.device, each with
/// an equal share of its multiprocessors; named spec.name and a number. Not registered. Throws HeapError.
std::vector<std::shared_ptr<Workspace>> create_virtual_workspaces(const WorkspaceSpec& spec,
                                                                  uint32_t multiprocessors);
/// Maps the peers' windows (see SymmHeap::connect); barriers work from then on.
void connect_workspace(Workspace& workspace, const std::vector<std::string>& addresses, double timeout_s);

/// Throws std::invalid_argument if the name is taken.
void register_workspace(std::shared_ptr<Workspace> workspace);
/// Throws WorkspaceClosed if no open workspace has this name.
std::shared_ptr<Workspace> find_workspace(const std::string& name);

/// Leaves the open call, or makes the next one to leave it: the peers raise PeerAborted with the reason in
/// it. On a GPU it is launch/device_workspace.h that tells the peers.
void abort_workspace(Workspace& workspace, const std::string& reason);
/// How long one barrier may wait; on a GPU also in graphs that were captured before.
void set_workspace_timeout(Workspace& workspace, double seconds);
/// Throws what broke the workspace, or WorkspaceClosed. Makes no CUDA call.
void check_workspace(Workspace& workspace);
/// Takes the workspace from the registry, tells the peers, waits for theirs at most `seconds` (0: not at all,
/// not even for a call that another thread has under way) and frees the memory. Returns the ranks that did
/// not close in time. On a GPU nobody waits for peers, who keep what they have mapped: the work that this
/// rank has launched is waited for, and if `seconds` is 0 its barriers give up first.
std::vector<int> close_workspace(Workspace& workspace, double seconds);

}  // namespace mok
