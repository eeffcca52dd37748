"""Runs the test kernels of csrc/ptx on the GPU."""

import numpy as np
import torch

from tests.ptx_cases import Case, Runner

_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}  # torch has no other uints' views


def to_gpu(array: np.ndarray) -> torch.Tensor:
    """The array's bytes."""
    return torch.from_numpy(array.view(_SIGNED[array.itemsize])).cuda()


class GpuRunner(Runner):
    is_device = True

    @property
    def multiprocessors(self) -> int:
        return torch.cuda.get_device_properties(0).multi_processor_count

    def launch(self, name, inputs, numbers, outputs, sm90, time_outs) -> None:
        op = torch.ops.mok._sm90_ptx_test if sm90 else torch.ops.mok._ptx_test
        tensors = [to_gpu(each) for each in outputs]
        op(name, [to_gpu(each) for each in inputs], numbers, tensors)
        torch.cuda.synchronize()
        for array, tensor in zip(outputs, tensors, strict=True):
            array.view(_SIGNED[array.itemsize])[...] = tensor.cpu().numpy()


def check_on_gpu(case: Case) -> None:
    case.check(GpuRunner(), *case.arguments)
