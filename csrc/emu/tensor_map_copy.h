// Tensor copies as the machine carries them out: one box between a tensor and shared memory.
#pragma once

#include <cstdint>
#include <memory>

#include "csrc/emu/machine.h"
#include "csrc/emu/tensor_map.h"

namespace mok::emu {

/// Global to shared: box `at` (rank coordinates, innermost first) of the map at address `map`; completes the
/// bytes of the whole box on `barrier`, in each block of `blocks` (bit = cluster rank; 0: this one). Fails on
/// what the hardware answers with an illegal instruction. Called after enter().
void issue_tensor_load(const char* instruction, const void* map, uint32_t rank, const int32_t* at,
                       uint32_t shared, uint32_t barrier, uint16_t blocks = 0);

/// Fails where the load of that box would.
void check_tensor_prefetch(const void* map, uint32_t rank, const int32_t* at);

/// Shared to global; `add`: a reduction of the map's type.
void issue_tensor_store(const char* instruction, const void* map, uint32_t rank, const int32_t* at,
                        uint32_t shared, bool add);

/// The copy alone: the box of `map` at `at`, its shared side at address `shared`.
std::unique_ptr<Copy> make_tensor_copy(const TensorMapFields& map, const int32_t* at, uint32_t shared,
                                       bool add);

/// The fields of the map at `map`; fails where the emulator did not make it.
TensorMapFields read_tensor_map(const void* map);

}  // namespace mok::emu
