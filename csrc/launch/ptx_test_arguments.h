// Checked access to a PtxTest's buffers and numbers. Its last output is the test's WaitLimits memory.
#pragma once

#include <algorithm>

#include "csrc/kernels/ptx_test_params.cuh"
#include "csrc/launch/ptx_tests.h"
#include "csrc/layout/check.h"

namespace mok::launch {

inline int64_t number(const PtxTest& test, size_t index) {
    MOK_CHECK(index < test.numbers.size(), "numbers has ", test.numbers.size(), " entries, needs ", index + 1,
              ".");
    return test.numbers[index];
}

inline void* buffer(const std::vector<TestBuffer>& buffers, const char* name, size_t index, int64_t bytes) {
    MOK_CHECK(index < buffers.size(), name, " has ", buffers.size(), " tensors, needs ", index + 1, ".");
    MOK_CHECK(buffers[index].bytes >= bytes, name, "[", index, "] has ", buffers[index].bytes,
              " bytes, needs ", bytes, ".");
    return buffers[index].data;
}

inline void* input(const PtxTest& test, size_t index, int64_t bytes) {
    return buffer(test.inputs, "inputs", index, bytes);
}

inline void* output(const PtxTest& test, size_t index, int64_t bytes) {
    return buffer(test.outputs, "outputs", index, bytes);
}

/// The first two inputs, outputs and four numbers; the last output is `expired` (word 0) and a WaitRecord
/// (from byte 64).
inline PtxTestParams test_params(const PtxTest& test, uint64_t limit_ns = 500000000) {
    PtxTestParams params{};
    for (size_t i = 0; i < std::min<size_t>(2, test.inputs.size()); ++i) params.in[i] = test.inputs[i].data;
    for (size_t i = 0; i < std::min<size_t>(2, test.outputs.size()); ++i)
        params.out[i] = test.outputs[i].data;
    std::copy_n(test.numbers.begin(), std::min<size_t>(4, test.numbers.size()), params.numbers);
    char* limits = static_cast<char*>(output(test, test.outputs.size() - 1, 64 + sizeof(ptx::WaitRecord)));
    params.limits = {limit_ns, reinterpret_cast<uint32_t*>(limits),
                     reinterpret_cast<ptx::WaitRecord*>(limits + 64),
                     /* rank */ 5};
    return params;
}

}  // namespace mok::launch
