// Bulk copies of contiguous bytes.
#pragma once

#include "csrc/emu/machine.h"

namespace mok::emu {

void issue_bulk_load(const char* instruction, uint32_t destination, const void* source, uint32_t bytes,
                     uint32_t barrier);
/// `adds`: FP32 sums instead of copies.
void issue_bulk_store(const char* instruction, void* destination, uint32_t source, uint32_t bytes, bool adds);
/// Bounds and alignment only.
void check_bulk_prefetch(const void* source, uint32_t bytes);

}  // namespace mok::emu
