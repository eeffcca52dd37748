"""`torch.ops.mok.router_top_k` and who takes it; its kernel is in tests/emu and tests/gpu."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from mok.router import SigmoidTopKRouter, _choice, top_k_lowest_first

pytestmark = pytest.mark.quick


def test_the_op_is_the_choice():
    scores_TE = torch.randint(0, 3, (7, 12)).float()
    bias_E = torch.randint(0, 3, (12,)).float()
    for bias in (None, bias_E):
        ids_TK = torch.ops.mok.router_top_k(scores_TE, bias, 5)
        biased_TE = scores_TE if bias is None else scores_TE + bias
        assert torch.equal(ids_TK, top_k_lowest_first(biased_TE, 5))
        assert torch.equal(ids_TK, top_k_lowest_first(scores_TE, 5, bias))
        torch.library.opcheck(torch.ops.mok.router_top_k.default, (scores_TE, bias, 5))


def test_no_gradient_flows():
    scores_TE = torch.randn(3, 6, requires_grad=True)
    bias_E = torch.randn(6, requires_grad=True)
    assert not top_k_lowest_first(scores_TE, 2, bias_E).requires_grad


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_op_compiles(backend):
    scores_TE = torch.randn(5, 9)

    @torch.compile(fullgraph=True, backend=backend)
    def choose(scores_TE):
        return torch.ops.mok.router_top_k(scores_TE * 2, None, 3)

    assert torch.equal(choose(scores_TE), top_k_lowest_first(scores_TE, 3))


@pytest.mark.parametrize(
    ("archs", "capability", "fits"),
    [
        (("90a",), (9, 0), True),
        (("90a",), (8, 0), False),
        (("90a",), (10, 0), False),
        (("90a", "100f"), (10, 3), True),
        (("103a",), (10, 0), False),
        (("80",), (8, 9), True),
        (("89",), (8, 0), False),
        (("80",), (9, 0), False),
        ((), (9, 0), False),
    ],
)
def test_only_gpus_that_it_is_built_for(archs, capability, fits):
    assert _choice._is_built_for(archs, capability) == fits


class _Calls(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def on_a_gpu(function) -> tuple[torch.Tensor, list[str]]:
    """What `function` does to tensors of a GPU that is not there."""
    with FakeTensorMode(), _Calls() as calls:
        return function(), calls.names


@pytest.mark.parametrize(
    ("has_kernel", "top_k", "takes_it"),
    [(True, 1, True), (True, 32, True), (True, 33, False), (False, 4, False)],
)
def test_a_gpu_takes_the_kernel_where_it_can(monkeypatch, has_kernel, top_k, takes_it):
    monkeypatch.setattr(_choice, "_has_kernel_on", lambda device: has_kernel)
    ids_TK, names = on_a_gpu(lambda: top_k_lowest_first(torch.empty(4, 64, device="cuda"), top_k))
    assert (ids_TK.shape, ids_TK.dtype) == ((4, top_k), torch.int64)
    assert ("mok.router_top_k.default" in names) == takes_it
    assert ("aten.topk.default" in names) != takes_it


def test_the_bias_of_deepseek_is_added_in_the_kernel(monkeypatch):
    monkeypatch.setattr(_choice, "_has_kernel_on", lambda device: True)

    def route():
        router = SigmoidTopKRouter(16, 64, 4, device="cuda")
        return router(torch.empty(3, 16, device="cuda")).topk_ids_TK

    ids_TK, names = on_a_gpu(route)
    assert ids_TK.shape == (3, 4)
    assert names.count("mok.router_top_k.default") == 1
    assert "aten.topk.default" not in names
