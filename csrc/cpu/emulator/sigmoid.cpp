// The sigmoid of emulated kernels is the executor's own code.
#include <cstddef>
#include <cstdint>
#include <utility>

#include "csrc/cpu/kernels.h"
#include "csrc/layout/types.h"
#include "csrc/ptx/host/convert.h"

#define MOK_ISA scalar
#define MOK_LANES 4
// clang-format off
#include "csrc/cpu/emulator/vec_scalar.h"
#include "csrc/cpu/activation_impl.h"
// clang-format on

namespace mok::ptx::convert_detail {

Sigmoid executor_sigmoid(float x) {
    const cpu::scalar::Sigmoid result = cpu::scalar::sigmoid(cpu::scalar::broadcast(x));
    return {result.value[0], result.complement[0]};
}

}  // namespace mok::ptx::convert_detail
