"""The executor over 2, 3 and 4 ranks: the bits of one rank, whatever each rank's T and chunks."""

import os

import pytest
import torch

os.environ.setdefault("MOK_POISON", "1")  # the executor's scratch is NaN at the start of every call

import itertools

import mok
from tests._exact import expected_bits, make_exact_case, without_negative_zeros
from tests._harness import run_ranks
from tests._numerics import (
    BIASES,
    SHARED,
    WEIGHTS,
    assert_bitwise_equal,
    assert_close,
    call,
    make_case,
    run,
)

BF16, FP32 = torch.bfloat16, torch.float32
FULL = {"bias": True, "shared": 24, "shared_gate": True}
PER_TOKEN = ("out", "dx_TH", "dtopk_weights_TK", "dshared_weight_T")


def on_rank(rank, group, case, starts, dtype, **options):
    """`run` with this rank's contiguous part of the tokens and of the experts, twice."""
    num_local = len(case.tensors["w_gate"]) // group.size()
    part = case.tokens(starts[rank], starts[rank + 1])
    part = part.experts(rank * num_local, (rank + 1) * num_local)
    options = {"max_tokens": max_tokens(starts), **options}
    ring_rows = options.pop("ring_rows", None)
    first = run(mok.moe, part, dtype, group=group, ring_rows=ring_rows, **options)
    again = run(mok.moe, part, dtype, group=group, ring_rows=ring_rows, **options)
    assert_bitwise_equal(first, again)
    return first


def max_tokens(starts):
    return max(end - begin for begin, end in itertools.pairwise(starts))


def split(tokens, *sizes):
    """Starts of a ragged split; the last rank takes what is left."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    assert starts[-1] <= tokens
    return [*starts, tokens]


def gathered(results):
    """All ranks' results as one rank's; the shared expert's gradients are partial sums."""
    names = results[0].keys()
    whole = {}
    for name in names:
        parts = [result[name] for result in results]
        if name[1:] in SHARED:
            whole[name] = sum(part.float() for part in parts)
        else:
            whole[name] = torch.cat(parts)
    return whole


def assert_is_one_rank(world_size, case, starts, dtype, *, weight_dtype=None, **options):
    results = run_ranks(
        world_size, on_rank, case, starts, dtype, weight_dtype=weight_dtype, **options
    )
    together = gathered(results)
    alone = run(mok.moe, case, dtype, weight_dtype=weight_dtype)
    shared = [name for name in alone if name[1:] in SHARED]
    assert_bitwise_equal(*({n: r[n] for n in r if n not in shared} for r in (together, alone)))
    tolerance = 1e-5 if (weight_dtype or dtype) == FP32 else 8e-3
    assert_close(*({n: r[n] for n in shared} for r in (together, alone)), tolerance)


SPLITS = [
    (2, (60,)),
    (2, (0,)),
    (2, (120,)),
    (3, (17, 80)),
    (3, (0, 120)),
    (4, (1, 64, 0)),
    (4, (30, 30, 30)),
]


@pytest.mark.parametrize(("world_size", "sizes"), SPLITS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(BF16, FP32), (FP32, None)])
def test_a_split_batch_has_the_bits_of_one_rank(world_size, sizes, dtype, weight_dtype):
    case = make_case(120, 3, 12, 24, 72, **FULL)
    assert_is_one_rank(world_size, case, split(120, *sizes), dtype, weight_dtype=weight_dtype)


@pytest.mark.parametrize("save", ["all", "gate_up", "none"])
@pytest.mark.parametrize("ring_rows", [128, 256])
def test_ranks_with_different_numbers_of_chunks(save, ring_rows):
    """Two thirds of the routes go to rank 0: cut segments there, one chunk or none elsewhere."""
    case = make_case(300, 3, 6, 16, 24, **FULL, routing="uniform")
    draws = torch.randint(12, (300, 3), generator=torch.Generator().manual_seed(3))
    case.topk_ids_TK = torch.tensor([0] * 5 + [1, 1, 1, 2, 2, -1, 3])[draws]
    assert_is_one_rank(3, case, split(300, 10, 290), BF16, save=save, ring_rows=ring_rows)


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_all_routes_to_one_rank(owner, dtype):
    """The other rank's experts are idle: zeros, and no hang."""
    case = make_case(60, 4, 8, 16, 24, bias=True, routing="uniform")
    case.topk_ids_TK = case.topk_ids_TK % 4 + 4 * owner
    results = run_ranks(2, on_rank, case, [0, 60, 60] if owner else [0, 0, 60], dtype)
    for name in WEIGHTS + BIASES:
        assert not results[1 - owner]["d" + name].any()
        assert results[owner]["d" + name].any()
    assert_bitwise_equal(gathered(results), run(mok.moe, case, dtype))


def test_no_rank_has_a_token():
    case = make_case(0, 2, 4, 16, 24, **FULL)
    results = run_ranks(2, on_rank, case, [0, 0, 0], BF16)
    for result in results:
        assert not any(value.any() for value in result.values())
        assert result["out"].shape == (0, 16)


@pytest.mark.parametrize(("activation", "clamped"), [("swiglu", False), ("gpt_oss", True)])
@pytest.mark.parametrize("wide", ["up", "dout"])
def test_exact_sums_give_the_contracts_bits(activation, clamped, wide):
    case = make_exact_case(
        90, 3, 6, 72, 104, activation=activation, clamped=clamped, wide=wide, **FULL
    )
    results = run_ranks(3, on_rank, case, split(90, 13, 0), BF16, weight_dtype=FP32, ring_rows=128)
    expected = without_negative_zeros(expected_bits(case, FP32))
    assert_bitwise_equal(without_negative_zeros(gathered(results)), expected)


def every_way_at_once(rank, group):
    """Calls of different sizes, settings and dtypes one after another in one process; the windows
    are first filled with NaN."""
    cases = [
        (make_case(40, 3, 6, 24, 40, **FULL, seed=1), BF16, {}),
        (make_case(64, 2, 4, 16, 24, seed=2), FP32, {"save": "none"}),
        (make_case(33, 3, 6, 24, 40, bias=True, activation="gpt_oss", seed=3), BF16, {}),
        (make_case(1, 3, 6, 24, 40, seed=4), BF16, {"ring_rows": 128}),
        (make_case(40, 3, 6, 24, 40, shared=8, seed=5), BF16, {"save": "all"}),
    ]
    bad = make_case(80, 3, 6, 24, 40, routing="one")
    for name in ("x_TH", "topk_weights_TK"):
        bad.tensors[name].fill_(torch.nan)
    bad.dout_TH.fill_(torch.nan)
    on_rank(rank, group, bad, [0, 40, 80], BF16, max_tokens=64)
    results = []
    for case, dtype, options in cases:
        tokens = len(case.topk_ids_TK)
        starts = [0, tokens // 3, tokens]
        results.append(on_rank(rank, group, case, starts, dtype, max_tokens=64, **options))
    return results


def test_calls_of_all_kinds_in_one_workspace():
    first, second = run_ranks(2, every_way_at_once)
    again_first, again_second = run_ranks(2, every_way_at_once)
    for results in zip(first, second, again_first, again_second, strict=True):
        assert not any(value.isnan().any() for result in results for value in result.values())
        assert_bitwise_equal(results[0], results[2])
        assert_bitwise_equal(results[1], results[3])


def in_symmetric_memory(rank, group, case, starts):
    """x and dout allocated in the heap, at another place on each rank."""
    expected = on_rank(rank, group, case, starts, BF16)
    part = case.tokens(starts[rank], starts[rank + 1]).experts(3 * rank, 3 * rank + 3)
    mok.symm_empty(1000 * rank + 8, group=group)
    leaves = {}
    for name, tensor in part.tensors.items():
        per_token = name in ("topk_weights_TK", "shared_weight_T")
        leaves[name] = tensor.to(FP32 if per_token else BF16, copy=True)
    x_TH = mok.symm_empty(*leaves["x_TH"].shape, group=group)
    leaves["x_TH"] = x_TH.copy_(leaves["x_TH"])
    leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
    dout_TH = mok.symm_empty(*leaves["x_TH"].shape, group=group).copy_(part.dout_TH)
    out = call(mok.moe, leaves, part.topk_ids_TK, group=group, max_tokens=max_tokens(starts))
    out.backward(dout_TH)
    results = {"out": out.detach()} | {"d" + name: leaf.grad for name, leaf in leaves.items()}
    assert_bitwise_equal(results, expected)


def test_x_and_dout_in_the_symmetric_heap():
    case = make_case(50, 3, 6, 24, 40, **FULL)
    run_ranks(2, in_symmetric_memory, case, [0, 20, 50])


def two_then_two(rank, group, case, starts):
    """Two forwards, then their backwards in the other order; saved context stays the caller's."""
    num_local = len(case.tensors["w_gate"]) // group.size()
    outs, leaves = [], []
    parts = [case.tokens(starts[rank], starts[rank + 1]), case.tokens(rank, rank + 9)]
    parts = [part.experts(rank * num_local, (rank + 1) * num_local) for part in parts]
    options = {"group": group, "max_tokens": 64}
    expected = [run(mok.moe, part, FP32, **options) for part in parts]
    for part in parts:
        leaves.append({n: t.clone().requires_grad_() for n, t in part.tensors.items()})
        outs.append(call(mok.moe, leaves[-1], part.topk_ids_TK, **options))
    for i in (0, 1):
        outs[i].backward(parts[i].dout_TH)
        results = {"d" + name: leaf.grad for name, leaf in leaves[i].items()}
        assert_bitwise_equal({"out": outs[i].detach()} | results, expected[i])


def test_two_forwards_then_two_backwards():
    run_ranks(2, two_then_two, make_case(50, 3, 6, 24, 40, **FULL), [0, 20, 50])


def first_call_finds_max_tokens(rank, group, case, starts):
    part = case.tokens(starts[rank], starts[rank + 1]).experts(3 * rank, 3 * rank + 3)
    results = run(mok.moe, part, BF16, group=group)
    smaller = part.tokens(0, len(part.topk_ids_TK) // 2)
    run(mok.moe, smaller, BF16, group=group)
    return results


def test_max_tokens_is_the_largest_t_of_the_first_call():
    case = make_case(50, 3, 6, 32, 40, **FULL)
    results = gathered(run_ranks(2, first_call_finds_max_tokens, case, [0, 0, 50]))
    alone = run(mok.moe, case, BF16)
    assert_bitwise_equal(
        {name: results[name] for name in PER_TOKEN}, {name: alone[name] for name in PER_TOKEN}
    )


def as_dtensors(rank, group, case, starts):
    """Experts sharded over the ranks as DTensors: the same bits, gradients that are DTensors."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    expected = on_rank(rank, group, case, starts, BF16)
    mesh = DeviceMesh.from_group(group, "cpu")
    num_local = len(case.tensors["w_gate"]) // group.size()
    part = case.tokens(starts[rank], starts[rank + 1])
    part = part.experts(rank * num_local, (rank + 1) * num_local)
    leaves = {}
    for name, tensor in part.tensors.items():
        per_token = name in ("topk_weights_TK", "shared_weight_T")
        leaf = tensor.to(FP32 if per_token else BF16, copy=True)
        if name in WEIGHTS + BIASES:
            leaf = DTensor.from_local(leaf, mesh, [Shard(0)])
        elif name in SHARED:
            leaf = DTensor.from_local(leaf, mesh, [Replicate()])
        leaves[name] = leaf.detach().requires_grad_()
    assert leaves["w_gate"].shape[0] == group.size() * num_local
    out = call(mok.moe, leaves, part.topk_ids_TK, group=group, max_tokens=max_tokens(starts))
    out.backward(part.dout_TH.bfloat16())
    results = {"out": out.detach()}
    for name, leaf in leaves.items():
        sharded = name in WEIGHTS + BIASES + SHARED
        assert isinstance(leaf.grad, DTensor) == sharded, name
        results["d" + name] = leaf.grad.to_local() if sharded else leaf.grad
    assert_bitwise_equal(results, expected)


def test_experts_as_dtensors():
    case = make_case(50, 3, 6, 24, 40, **FULL)
    run_ranks(2, as_dtensors, case, [0, 20, 50])
