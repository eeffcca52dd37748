// 8x8 matrices of 16-bit elements between registers and shared memory. Lane l gives the address of row l % 8
// of matrix l / 8 (16 bytes, aligned); its register i holds columns 2 (l % 4) and the next of row l / 4 of
// matrix i, or, transposed, rows 2 (l % 4) and the next of column l / 4.
#pragma once

#include "csrc/ptx/device/base.cuh"

namespace mok::ptx {

/// ldmatrix.x4 (sm_75).
MOK_DEVICE void load_matrix_x4(uint32_t address, uint32_t (&matrices)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

/// ldmatrix.x4.trans (sm_75).
MOK_DEVICE void load_matrix_x4_transposed(uint32_t address, uint32_t (&matrices)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
                 : "r"(address)
                 : "memory");
}

/// stmatrix.x4 (sm_90).
MOK_DEVICE void store_matrix_x4(uint32_t address, const uint32_t (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
}

/// stmatrix.x4.trans (sm_90).
MOK_DEVICE void store_matrix_x4_transposed(uint32_t address, const uint32_t (&matrices)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
                 : "memory");
}

}  // namespace mok::ptx
