"""The collective backend on CUDA tensors: grouped GEMM, and NCCL where there are several GPUs."""

import warnings

import pytest
import torch
import torch.distributed as dist

import mok
from mok.reference import moe_reference
from tests._harness import run_ranks_fresh
from tests._numerics import Case, assert_bitwise_equal, make_case, run, three_way
from tests.dist.test_layer_ep import run_share, share_of

K, E, H, I = 3, 12, 64, 96
BF16, FP32 = torch.bfloat16, torch.float32
FULL = {"bias": True, "shared": 32, "shared_gate": True}


def on_gpu(case: Case) -> Case:
    tensors = {name: tensor.cuda() for name, tensor in case.tensors.items()}
    return Case(tensors, case.topk_ids_TK.cuda(), case.dout_TH.cuda(), case.settings)


@pytest.mark.parametrize("tokens", [0, 1, 150])
@pytest.mark.parametrize("save", ["all", "none"])
@pytest.mark.parametrize("extras", [FULL, {"activation": "gpt_oss"}])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_one_rank_within_twice_the_plain_error(tokens, save, extras, dtype):
    case = on_gpu(make_case(tokens, K, E, H, I, **extras))
    ours = run(mok.moe, case, dtype, save=save, backend="collective")
    assert_bitwise_equal(ours, run(mok.moe, case, dtype, save=save, backend="collective"))
    exact = run(moe_reference, case, torch.float64, mask_dtype=dtype)
    three_way(ours, run(moe_reference, case, BF16), exact)


def test_a_layer_falls_to_it_with_one_warning():
    layer = mok.MoELayer(H, I, E, K, device="cuda", dtype=FP32, shared_intermediate_size=32)
    choice = mok.explain(layer, dtype=FP32)  # the GPU kernels take BF16 tokens only
    assert choice.backend == "collective"
    x = torch.randn(2, 30, H, device="cuda", dtype=FP32, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer(x).sum().backward()
        layer(x).sum().backward()
    assert len([w for w in caught if "collective backend" in str(w.message)]) <= 1
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def nccl_job(rank, group, tokens_per_rank):
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    case = on_gpu(make_case(sum(tokens_per_rank), K, E, H, I, seed=2, **FULL))
    limit = {"max_tokens": max(tokens_per_rank), "backend": "collective"}
    ours = run_share(mok.moe, case, tokens_per_rank, rank, group, BF16, **limit)
    exact = run(moe_reference, case, torch.float64, mask_dtype=BF16)
    plain = run(moe_reference, case, BF16)
    three_way(ours, *(share_of(leg, tokens_per_rank, rank) for leg in (plain, exact)))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("tokens_per_rank", [[60, 41], [0, 90]])
def test_two_gpus_over_nccl(tokens_per_rank):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_ranks_fresh(2, nccl_job, tokens_per_rank, timeout=60)
