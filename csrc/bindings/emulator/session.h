// One run of the emulated machine from Python: NumPy buffers become memory of ranks, an error of a kernel
// becomes EmulatorError with the machine's report.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "csrc/emu/launch.h"
#include "csrc/launch/emulator/launch.h"
#include "csrc/ptx/wait_record.h"

namespace mok::emulator {

/// What kernels may do with a buffer, and how it relates to the host.
struct Use {
    bool is_output = false;     // copied back, and checked against what the host reads after the last launch
    bool is_constant = false;   // kernels only read it
    bool peer_visible = false;  // in the symmetric heap
    bool is_input = true;       // holds the array's data; otherwise poison until a kernel writes it
};
inline constexpr Use kInput{false, true, false, true};
inline constexpr Use kOutput{true, false, false, true};
inline constexpr Use kPeerInput{false, true, true, true};
inline constexpr Use kPeerOutput{true, false, true, true};

/// One array a rank, at the same place of the ranks' windows.
struct WindowArray {
    std::string name;
    std::vector<pybind11::array> of_rank;
    Use use;
};

/// Buffers and launches of one run. Arrays are copied to memory aligned as cudaMalloc aligns, and outputs
/// back after the run, whether it ended well or not.
class Session {
  public:
    /// Memory of `rank` with the array's bytes; the array must be C-contiguous, and writeable for outputs.
    void* add(const std::string& name, const pybind11::array& array, const Use& use, int rank = 0);
    /// Windows of a symmetric heap: the ranks' memories at equal distances, in each its arrays one behind the
    /// other, with a gap that no kernel may touch. Returns where they lie: [array][rank].
    std::vector<std::vector<void*>> add_windows(const std::vector<WindowArray>& contents);
    /// Windows of one array.
    std::vector<void*> add_windows(const std::string& name, const std::vector<pybind11::array>& arrays,
                                   const Use& use);
    /// Memory that the host neither fills nor reads.
    void* scratch(const std::string& name, size_t bytes, int rank = 0, bool peer_visible = false);
    /// Memory that is zero when the rank's first kernel starts.
    void* zeros(const std::string& name, size_t bytes, int rank = 0, bool peer_visible = false);

    /// Time limits that no schedule reaches, for kernels whose waits are to succeed.
    ptx::WaitLimits limits(int rank = 0);

    /// What RunOptions' `end` of this rank sets; the last one of limits() where nobody says.
    void set_end_word(int rank, uint32_t* word) { end_words_[rank] = word; }

    launch::EmulatorStream& stream(int rank = 0);

    /// Runs everything; throws EmulatorError where a kernel erred.
    emu::RunResult run(const emu::RunOptions& options);
    /// Of the process's last run, also where it threw: its log, warnings and statistics.
    static emu::RunResult& last_result();

  private:
    struct FreeDeleter {
        void operator()(void* memory) const;
    };
    struct Output {
        pybind11::array array;
        const void* memory;
    };

    void* allocate(size_t bytes);
    void add_region(const std::string& name, void* memory, size_t bytes, const Use& use, int rank);
    void place(const std::string& name, const pybind11::array& array, const Use& use, int rank, void* memory);

    std::vector<std::unique_ptr<void, FreeDeleter>> memory_;
    std::vector<emu::Region> regions_;
    std::vector<Output> outputs_;
    std::map<int, launch::EmulatorStream> streams_;  // by rank; addresses stay
    std::map<int, uint32_t*> end_words_;             // by rank
};

/// A run that a kernel ended: what() is the machine's report.
class EmulatorError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

}  // namespace mok::emulator
