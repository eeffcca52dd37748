// Test kernels of csrc/ptx: each runs a group of wrappers and writes down what they did.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mok::launch {

struct TestBuffer {
    void* data;
    int64_t bytes;
};

/// Device buffers and numbers of one test; tests/ptx_cases says what each test wants and expects.
struct PtxTest {
    std::vector<TestBuffer> inputs;
    std::vector<TestBuffer> outputs;
    std::vector<int64_t> numbers;
    void* stream;  // a cudaStream_t; an EmulatorStream in the emulator
};

/// Throws std::invalid_argument for an unknown name or buffers that are too small.
void run_ptx_test(const std::string& name, const PtxTest& test);

/// Those whose instructions only sm_90a has: wgmma.
void run_sm90_ptx_test(const std::string& name, const PtxTest& test);

}  // namespace mok::launch
