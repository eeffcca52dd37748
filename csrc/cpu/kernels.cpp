#include "csrc/cpu/kernels.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "csrc/cpu/isa_tables.h"
#include "csrc/layout/check.h"

namespace mok::cpu {
namespace {

constexpr const char* kBestFirst[] = {"avx512", "avx2", "portable"};

std::string present() {
    std::string names;
    for (const char* name : kBestFirst) {
        if (has_isa(name)) names += (names.empty() ? "" : ", ") + std::string(name);
    }
    return names;
}

const KernelTable& table_of(const char* name) {
#if defined(__x86_64__)
    if (std::strcmp(name, "avx512") == 0) return avx512_table();
    if (std::strcmp(name, "avx2") == 0) return avx2_table();
#endif
    if (std::strcmp(name, "emulated") == 0) return emulated_table();
    return portable_table();
}

const KernelTable& choose() {
    const char* wanted = std::getenv("MOK_CPU_ISA");
    if (wanted != nullptr && wanted[0] != '\0') {
        MOK_CHECK(has_isa(wanted) && std::strcmp(wanted, "emulated") != 0, "MOK_CPU_ISA is '", wanted,
                  "', but this processor has ", present(), "; set it to one of these or unset it.");
        return table_of(wanted);
    }
    for (const char* name : kBestFirst) {
        if (has_isa(name)) return table_of(name);
    }
    return portable_table();
}

}  // namespace

bool has_isa(const char* name) {
#if defined(__x86_64__)
    // These ask cpuid and, for the wide registers, whether the operating system saves them.
    if (std::strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (std::strcmp(name, "avx512") == 0) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx2") &&
               __builtin_cpu_supports("fma");
    }
#endif
    return std::strcmp(name, "portable") == 0 || std::strcmp(name, "emulated") == 0;
}

const KernelTable& kernels() {
    static const KernelTable& chosen = choose();
    return chosen;
}

const KernelTable& kernels(const char* name) {
    MOK_CHECK(has_isa(name), "The instruction set is '", name, "', but this processor has ", present(),
              "; choose one of these.");
    return table_of(name);
}

}  // namespace mok::cpu
