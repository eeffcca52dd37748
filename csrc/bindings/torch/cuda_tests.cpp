// torch.ops.mok._ptx_test: the test kernels of csrc/ptx over CUDA tensors.
#if defined(MOK_WITH_CUDA)

#include "csrc/bindings/torch/cuda_arguments.h"
#include "csrc/launch/ptx_tests.h"

namespace mok::bindings {

namespace {

std::vector<launch::TestBuffer> buffers(const std::vector<Tensor>& tensors, const char* name) {
    std::vector<launch::TestBuffer> result;
    for (const Tensor& tensor : tensors) {
        MOK_CHECK(tensor.is_cuda() && tensor.is_contiguous(), name, " must be contiguous CUDA tensors.");
        result.push_back({tensor.data_ptr(), tensor.numel() * static_cast<int64_t>(tensor.element_size())});
    }
    return result;
}

template <void (*kRun)(const std::string&, const launch::PtxTest&)>
void ptx_test(std::string name, std::vector<Tensor> inputs, std::vector<int64_t> numbers,
              std::vector<Tensor> outputs) {
    MOK_CHECK(!outputs.empty(), "outputs is empty: a test writes down what it saw.");
    const CudaCall call(outputs.front());
    kRun(name, {buffers(inputs, "inputs"), buffers(outputs, "outputs"), numbers, call.stream()});
}

}  // namespace

}  // namespace mok::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(mok, library) {
    library.def("_ptx_test(str name, Tensor[] inputs, int[] numbers, Tensor(a!)[] outputs) -> ()");
#if defined(MOK_WITH_SM90)
    library.def("_sm90_ptx_test(str name, Tensor[] inputs, int[] numbers, Tensor(a!)[] outputs) -> ()");
#endif
}

STABLE_TORCH_LIBRARY_IMPL(mok, CUDA, library) {
    library.impl("_ptx_test", TORCH_BOX(&mok::bindings::ptx_test<&mok::launch::run_ptx_test>));
#if defined(MOK_WITH_SM90)
    library.impl("_sm90_ptx_test", TORCH_BOX(&mok::bindings::ptx_test<&mok::launch::run_sm90_ptx_test>));
#endif
}

#endif  // MOK_WITH_CUDA
