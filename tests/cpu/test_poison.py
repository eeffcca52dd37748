"""That the suite's poison reaches every way of allocating without writing."""

import pytest
import torch

ALLOCATIONS = {
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided((2, 3), (1, 2), dtype=x.dtype),
    "new_empty": lambda x: x.new_empty(4),
    "new_empty_strided": lambda x: x.new_empty_strided((2, 2), (2, 1)),
    "resize_": lambda x: x.new_empty(0).resize_(5),
    "Tensor": lambda x: torch.Tensor(6).to(x.dtype),
    "aten": lambda x: torch.ops.aten.empty_like.default(x),
    "compiled": lambda x: torch.compile(torch.empty_like, backend="aot_eager")(x),
}


@pytest.mark.quick
@pytest.mark.parametrize("allocate", ALLOCATIONS.values(), ids=ALLOCATIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_floats_are_nan(allocate, dtype):
    assert allocate(torch.zeros(2, 3, dtype=dtype)).isnan().all()


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integers_are_large(dtype):
    assert (torch.empty(5, dtype=dtype) == torch.iinfo(dtype).max).all()


@pytest.mark.no_poison
def test_the_poison_can_be_left_out():
    assert not torch.are_deterministic_algorithms_enabled()
