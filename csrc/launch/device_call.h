// One call of a workspace on a GPU: what all of its kernels have in common, from the checks to the last
// launch.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "csrc/launch/prepare.h"
#include "csrc/symm/workspace.h"

namespace mok::launch {

/// What a rank brings to a call. Tensors lie on the workspace's device.
struct CallTensors {
    const void* topk_ids;  // [T, K], contiguous
    bool ids_are_int64;
    InputRows x;     // [T, H]
    InputRows dout;  // [T, H], backward only
};

/// Temporary memory of a whole call.
struct CallMemory {
    char* preparation = nullptr;
    char* rows = nullptr;  // for a MemoryPlacer
};

class DeviceCall {
  public:
    /// Takes the workspace for as long as the object lives, and makes `stream` (a cudaStream_t) wait for its
    /// last call. Throws what has ended the workspace, WorkspaceClosed, and CudaError.
    DeviceCall(Workspace& workspace, void* stream);
    DeviceCall(const DeviceCall&) = delete;
    DeviceCall& operator=(const DeviceCall&) = delete;
    ~DeviceCall();

    /// Checks sizes that `header` and the workspace must agree on. Throws std::invalid_argument.
    void check(const CallHeader& header) const;

    /// Device memory until the call ends, with unspecified contents. To be asked for once.
    char* scratch(int64_t bytes);

    /// scratch() for the preparation and, behind it, `row_bytes`.
    CallMemory memory(const Preparation& preparation, const CallHeader& header, const CallTensors& tensors,
                      int64_t row_bytes);

    /// Publishes this rank's inputs, waits (on the device) for the peers', and makes plan, table and pull
    /// lists. `header` has the call's settings and T; the offsets are filled in here. `memory` is
    /// preparation_memory() of scratch. `times` as in launch_prepare.
    schedule::PreparedCall prepare(const Preparation& preparation, const CallHeader& header,
                                   const CallTensors& tensors, char* memory, uint64_t* times = nullptr);
    int64_t preparation_memory(const Preparation& preparation, const CallHeader& header,
                               const CallTensors& tensors) const;

    /// This rank's rows where its own kernels read them, once prepared: in place, or a copy where TMA could
    /// not read them there.
    const InputRows& own_x() const { return own_x_; }
    const InputRows& own_dout() const { return own_dout_; }

    /// All ranks are done with everyone's windows: rows have come home. One rank: nothing.
    void meet_outputs();

    void* stream() const { return stream_; }
    const PeerGroup& group() const;
    ptx::WaitLimits limits() const;

  private:
    InputRows staged(const InputRows& rows, int64_t num_rows, int64_t row_bytes, char*& memory) const;
    StagedRows publish_rows(InputRows& rows, int64_t num_rows, int64_t row_bytes, int64_t staging,
                            int64_t& offset) const;

    Workspace& workspace_;
    std::unique_lock<std::mutex> lock_;
    std::shared_ptr<void> current_;  // the device
    void* stream_;
    InputRows own_x_{};
    InputRows own_dout_{};
};

/// Places arrays one behind the other, aligned to kAlign bytes; from nullptr, only to count their bytes.
class MemoryPlacer {
  public:
    static constexpr int64_t kAlign = 256;

    explicit MemoryPlacer(char* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

    /// [rows, columns] elements; nullptr if they are not used.
    template <typename T = void>
    T* take(bool is_used, int64_t rows, int64_t columns, int64_t element_bytes) {
        if (!is_used) return nullptr;
        const uintptr_t at = base_ + static_cast<uintptr_t>(bytes_);
        bytes_ += round_up<int64_t>(rows * columns * element_bytes, kAlign);
        return reinterpret_cast<T*>(at);
    }
    int64_t bytes() const { return bytes_; }

  private:
    uintptr_t base_;
    int64_t bytes_ = 0;
};

/// Whose call it is: a rank, and the multiprocessors of its GPU (0: the current one is asked) of which it may
/// use so many (0: all).
struct CallPlace {
    int32_t rank = 0;
    int32_t num_ranks = 1;
    uint32_t multiprocessors = 0;
    uint32_t most_blocks = 0;
};

/// What the preparation of a layer's call needs, from its header. `zero_idle` is for backward. Throws
/// std::invalid_argument where sizes do not fit each other.
Preparation layer_preparation(const CallPlace& place, const CallHeader& header, bool zero_idle);
Preparation layer_preparation(const Workspace& workspace, const CallHeader& header, bool zero_idle);

}  // namespace mok::launch
