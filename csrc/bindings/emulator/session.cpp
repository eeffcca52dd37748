#include "csrc/bindings/emulator/session.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "csrc/emu/machine.h"
#include "csrc/layout/check.h"
#include "csrc/layout/types.h"

namespace py = pybind11;

namespace mok::emulator {

void Session::FreeDeleter::operator()(void* memory) const {
    std::free(memory);
}

void* Session::allocate(size_t bytes) {
    constexpr size_t kAlignment = 256;  // cudaMalloc's
    void* memory = std::aligned_alloc(kAlignment, round_up<size_t>(bytes > 0 ? bytes : 1, kAlignment));
    if (memory == nullptr) throw std::bad_alloc();
    memory_.emplace_back(memory);
    return memory;
}

void* Session::add(const std::string& name, const py::array& array, const Use& use, int rank) {
    void* memory = allocate(static_cast<size_t>(array.nbytes()));
    place(name, array, use, rank, memory);
    return memory;
}

std::vector<std::vector<void*>> Session::add_windows(const std::vector<WindowArray>& contents) {
    constexpr size_t kAlignment = 256, kGranularity = 4096;
    std::vector<size_t> offsets{0};
    for (const WindowArray& each : contents) {
        size_t most = 0;
        for (const py::array& array : each.of_rank)
            most = std::max(most, static_cast<size_t>(array.nbytes()));
        offsets.push_back(round_up<size_t>(offsets.back() + most + 1, kAlignment));
    }
    const size_t stride = round_up<size_t>(offsets.back(), kGranularity);
    char* base = static_cast<char*>(allocate(stride * contents.front().of_rank.size()));
    std::vector<std::vector<void*>> memory;
    for (size_t i = 0; i < contents.size(); ++i) {
        std::vector<void*>& ranks = memory.emplace_back();
        for (size_t rank = 0; rank < contents[i].of_rank.size(); ++rank) {
            ranks.push_back(base + rank * stride + offsets[i]);
            place(contents[i].name, contents[i].of_rank[rank], contents[i].use, static_cast<int>(rank),
                  ranks.back());
        }
    }
    return memory;
}

std::vector<void*> Session::add_windows(const std::string& name, const std::vector<py::array>& arrays,
                                        const Use& use) {
    return add_windows({{name, arrays, use}}).front();
}

void Session::place(const std::string& name, const py::array& array, const Use& use, int rank, void* memory) {
    MOK_CHECK((array.flags() & py::array::c_style) != 0, name, " is not C-contiguous; copy it.");
    MOK_CHECK(!use.is_output || array.writeable(), name, " is an output but not writeable; copy it.");
    const size_t bytes = static_cast<size_t>(array.nbytes());
    std::memcpy(memory, array.data(), bytes);
    add_region(name, memory, bytes, use, rank);
    if (use.is_output) outputs_.push_back({array, memory});
}

void Session::add_region(const std::string& name, void* memory, size_t bytes, const Use& use, int rank) {
    emu::Region& region = regions_.emplace_back();
    region.name = name;
    region.base = memory;
    region.bytes = bytes;
    region.rank = rank;
    region.peer_visible = use.peer_visible;
    region.is_input = use.is_input;
    region.is_output = use.is_output;
    region.is_constant = use.is_constant;
}

void* Session::scratch(const std::string& name, size_t bytes, int rank, bool peer_visible) {
    void* memory = allocate(bytes);
    std::memset(memory, emu::kPoison, bytes);
    add_region(name, memory, bytes, {false, false, peer_visible, /* is_input */ false}, rank);
    return memory;
}

void* Session::zeros(const std::string& name, size_t bytes, int rank, bool peer_visible) {
    void* memory = allocate(bytes);
    std::memset(memory, 0, bytes);
    add_region(name, memory, bytes, {false, false, peer_visible, /* is_input */ true}, rank);
    return memory;
}

ptx::WaitLimits Session::limits(int rank) {
    constexpr size_t kRecordAt = 64;
    constexpr uint64_t kLimitNs = 1'000'000'000;
    char* memory = static_cast<char*>(zeros("limits", kRecordAt + sizeof(ptx::WaitRecord), rank));
    set_end_word(rank, reinterpret_cast<uint32_t*>(memory));
    return {kLimitNs, reinterpret_cast<uint32_t*>(memory),
            reinterpret_cast<ptx::WaitRecord*>(memory + kRecordAt), rank};
}

launch::EmulatorStream& Session::stream(int rank) {
    launch::EmulatorStream& stream = streams_[rank];
    stream.rank = rank;
    return stream;
}

emu::RunResult Session::run(const emu::RunOptions& options_in) {
    emu::RunOptions options = options_in;
    if (options.ended.rank >= 0) {
        const auto word = end_words_.find(options.ended.rank);
        MOK_CHECK(word != end_words_.end(), "end is of rank ", options.ended.rank,
                  ", which has no limits in this run.");
        options.ended.word = word->second;
    }
    std::vector<emu::Launch> launches;
    for (auto& [rank, stream] : streams_) {
        for (emu::Launch& each : stream.launches) launches.push_back(std::move(each));
        stream.launches.clear();
    }
    emu::RunResult result = emu::run(regions_, launches, options);
    for (const Output& output : outputs_) {
        py::array array = output.array;
        std::memcpy(array.mutable_data(), output.memory, static_cast<size_t>(array.nbytes()));
    }
    last_result() = result;
    if (!result.ok) throw EmulatorError(result.error);
    return result;
}

emu::RunResult& Session::last_result() {
    static emu::RunResult result;
    return result;
}

}  // namespace mok::emulator
