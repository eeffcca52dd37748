"""Cases that users of such systems have reported, on one rank; docs/user-reports.md lists them all.

The ids are those of the list.
"""

import gc
import mmap
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import mok
from tests._numerics import (
    assert_bitwise_equal,
    assert_close,
    make_case,
    relative_error,
    run,
    run_contract,
)

BF16 = torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 45, 63, 64, 65])
def test_a8_every_row_is_right_for_every_number_of_tokens(tokens):
    """The same bits as with the data padded to 64 more tokens without routes."""
    case = make_case(tokens, 2, 4, 32, 48, routing="uniform")
    padded = make_case(tokens, 2, 4, 32, 48, routing="uniform")
    for name in ("x_TH", "topk_weights_TK"):
        value = padded.tensors[name]
        padded.tensors[name] = torch.cat([value, value.new_zeros(64, value.shape[1])])
    padded.topk_ids_TK = torch.cat([padded.topk_ids_TK, torch.full((64, 2), -1)])
    padded.dout_TH = torch.cat([padded.dout_TH, torch.randn(64, 32)])
    expected = run(mok.moe, padded, BF16)
    for name in ("out", "dx_TH", "dtopk_weights_TK"):
        expected[name] = expected[name][:tokens]
    assert_bitwise_equal(run(mok.moe, case, BF16), expected)


@pytest.mark.parametrize("busy", [[], [0], [3], [1, 2], [0, 3]])
def test_a6_a11_a12_any_experts_may_be_empty(busy):
    """All, all but the first, all but the last, the first and the last, those in the middle."""
    case = make_case(40, 2, 4, 32, 48, bias=True, routing="uniform")
    choices = torch.tensor(busy or [-1])
    case.topk_ids_TK = choices[torch.randint(len(choices), (40, 2))]
    results = run(mok.moe, case, BF16)
    for name in ("dw_gate", "dw_up", "dw_down", "db_gate", "db_up", "db_down"):
        for e in range(4):
            assert bool((results[name][e] != 0).any()) == (e in busy), (name, e)
    if not busy:
        assert (results["out"] == 0).all()
        assert (results["dx_TH"] == 0).all()


def test_b3_many_experts_and_few_tokens_leave_no_garbage():
    case = make_case(64, 2, 256, 32, 24, routing="uniform")
    results = run(mok.moe, case, BF16)
    idle = [e for e in range(256) if not (case.topk_ids_TK == e).any()]
    assert len(idle) > 100
    for name in ("dw_gate", "dw_up", "dw_down"):
        assert (results[name][idle] == 0).all()
        assert results[name].isfinite().all()


@pytest.mark.parametrize("steps", [3])
def test_b1_b2_b5_training_steps_on_dirty_memory_stay_finite(steps):
    """Everything torch allocates begins as NaN here, and so does the executor's scratch."""
    layer = mok.MoELayer(32, 48, 6, 2, bias=True, shared_intermediate_size=16, shared_gate=True)
    optimizer = torch.optim.AdamW(layer.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        layer(torch.randn(9, 32)).square().sum().backward()
        optimizer.step()
        for name, parameter in layer.named_parameters():
            assert parameter.isfinite().all(), name
            assert parameter.grad.isfinite().all(), name


def untouched(*shape) -> torch.Tensor:
    """BF16 zeros in memory that is taken as it is written, 7.5 GB of them if need be."""
    count = torch.Size(shape).numel()
    no_reserve = 0x4000  # MAP_NORESERVE of Linux
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, 2 * count, flags=flags), dtype=BF16).view(shape)


def test_c4_weights_beyond_2_to_the_31_elements():
    """64 experts of 4096 x 14336, of which the last is used: offsets of 64 bits."""
    E, H, I = 64, 4096, 14336
    x_TH = torch.randn(1, H).to(BF16)
    w_in, w_down = untouched(E, I, H), untouched(E, H, I)
    assert w_in.numel() > 2**31
    w_in[-1] = torch.randn(I, 1).to(BF16) * 2**-6  # one value per row: pages are written once
    w_down[-1] = torch.randn(H, 1).to(BF16) * 2**-6
    ids_TK, weights_TK = torch.tensor([[E - 1]]), torch.ones(1, 1)
    out = mok.moe(x_TH, ids_TK, weights_TK, w_in, w_in, w_down, save="none")
    last = slice(E - 1, E)
    expected = mok.moe(
        x_TH, ids_TK * 0, weights_TK, w_in[last], w_in[last], w_down[last], save="none"
    )
    assert out.abs().sum() > 0
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("H", "I", "E", "K"),
    [
        (3584, 8, 896, 16),  # D1: Kimi-K3's routing
        (2880, 24, 4, 4),  # D2: gpt-oss
        *((H, 16, 4, 2) for H in (1536, 2048, 3072, 4096, 8192)),  # D3
        *((64, 16, 16, K) for K in (1, 3, 5, 6, 7, 10, 12)),  # D4
        (128, 768, 4, 2),  # D7: Qwen3-30B
        (4096, 2048, 1, 1),  # D11
    ],
)
def test_d_shapes_that_people_have(H, I, E, K):
    case = make_case(3, K, E, H, I, routing="uniform")
    assert_close(run(mok.moe, case, BF16), run_contract(case), 1e-2)


def test_d17_a_mask_of_valid_tokens_is_ids_of_minus_1():
    layer = mok.MoELayer(32, 48, 6, 2)
    x_TH = torch.randn(10, 32)
    mask_T = torch.arange(10) < 7
    routing = layer.router(x_TH)
    ids_TK = torch.where(mask_T[:, None], routing.topk_ids_TK, -1)
    out = layer(x_TH, topk_ids=ids_TK, topk_weights=routing.topk_weights_TK)
    assert (out[7:] == 0).all()
    expected = layer(
        x_TH[:7],
        topk_ids=routing.topk_ids_TK[:7],
        topk_weights=routing.topk_weights_TK[:7],
    )
    assert torch.equal(out[:7], expected)


def test_e13_f1_repeats_have_the_same_bits():
    case = make_case(300, 3, 5, 32, 48, bias=True, shared=16, shared_gate=True)
    first = run(mok.moe, case, BF16)
    for _ in range(40):
        assert_bitwise_equal(run(mok.moe, case, BF16), first)


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "topk_softmax"])
def test_f7_checkpointing_over_a_bf16_router_changes_nothing(router):
    layer = mok.MoELayer(32, 48, 12, 3, router=router, dtype=BF16)
    x = torch.randn(50, 32).to(BF16)
    results = []
    for wrap in (False, True):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = checkpoint(layer, leaf, use_reentrant=False) if wrap else layer(leaf)
        out.float().square().sum().backward()
        grads = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
        results.append({"out": out.detach(), "dx": leaf.grad} | grads)
    assert_bitwise_equal(*results)


def test_g9_checkpointing_keeps_nothing_of_forward_alive():
    """What backward needs is saved through autograd, which checkpointing intercepts."""
    layer = mok.MoELayer(32, 48, 6, 2, save="all", dtype=BF16)
    x = torch.randn(50, 32).to(BF16).requires_grad_()
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = func(*args, **(kwargs or {}))
            if func is torch.ops.mok.moe_forward.default:
                seen.extend(weakref.ref(tensor) for tensor in results[1:4])
            return results

    for wrap in (False, True):
        seen.clear()
        with Spy():
            out = checkpoint(layer, x, use_reentrant=False) if wrap else layer(x)
        gc.collect()
        alive = [ref() is not None and ref().numel() > 0 for ref in seen]
        assert alive == [not wrap] * 3
        out.sum().backward()


class LowRank(torch.nn.Module):
    """W + B A for every expert."""

    def __init__(self, weight, rank=2):
        super().__init__()
        num_experts, rows, columns = weight.shape
        self.a = torch.nn.Parameter(torch.randn(num_experts, rank, columns) / 8)
        self.b = torch.nn.Parameter(torch.zeros(num_experts, rows, rank))

    def forward(self, weight):
        return weight + self.b @ self.a


def test_h9_low_rank_adapters_reach_the_experts():
    """Experts are parameters and no `nn.Linear`s: adapters come by parametrization."""
    layer = mok.MoELayer(32, 48, 6, 2)
    x = torch.randn(20, 32)
    before = layer(x).detach()
    layer.requires_grad_(False)
    names = ("w_gate", "w_up", "w_down")
    for name in names:
        weight = getattr(layer.experts, name)
        parametrize.register_parametrization(layer.experts, name, LowRank(weight))
    assert torch.equal(layer(x), before)  # B is zero
    optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
    for name in names:
        adapter = layer.experts.parametrizations[name]
        assert adapter.original.grad is None
        assert adapter[0].a.grad.abs().sum() > 0
    assert relative_error(layer(x).detach(), before) > 1e-4
    trained = layer(x).detach()
    for name in names:
        parametrize.remove_parametrizations(layer.experts, name)  # merged
    assert relative_error(layer(x).detach(), trained) < 1e-6


def test_the_list_names_tests_that_exist():
    root = Path(__file__).parents[2]
    text = (root / "docs/user-reports.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 40
    for file, test in named:
        assert f"def {test}(" in (root / file).read_text(), f"{file}::{test}"
