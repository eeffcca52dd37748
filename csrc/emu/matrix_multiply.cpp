#include "csrc/emu/matrix_multiply.h"

#include "csrc/emu/matrix_isas.h"

namespace mok::emu {

const std::vector<MultiplyIsa>& multiply_isas() {
    static const std::vector<MultiplyIsa> present = [] {
        std::vector<MultiplyIsa> isas;
#if defined(__x86_64__)
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
        if (avx512) isas.push_back({"avx512", kMultiplyAvx512});
        if (avx2) isas.push_back({"avx2", kMultiplyAvx2});
#endif
        isas.push_back({"portable", kMultiplyPortable});
        return isas;
    }();
    return present;
}

}  // namespace mok::emu
