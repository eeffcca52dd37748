"""The combine epilogue on the GPU: bit for bit the CPU kernel's sum, for all shapes and routes."""

import math

import numpy as np
import pytest
import torch
from mok._C import kernels

from tests._numerics import assert_bitwise_equal

BF16, FP32 = torch.bfloat16, torch.float32


def cpu_weighted_sum(rows, shared_rows, shared_weight, ids_TK, weights_TK, dtype) -> torch.Tensor:
    """mok._C.kernels.weighted_sum, token by token."""
    tokens, top_k = ids_TK.shape
    hidden = rows.shape[1]
    isa, compute = kernels.selected(), {BF16: "bf16", FP32: "fp32"}[dtype]

    def as_numpy(tensor: torch.Tensor) -> np.ndarray:
        tensor = tensor.cpu().contiguous()
        return tensor.view(torch.int16).numpy().view(np.uint16) if dtype == BF16 else tensor.numpy()

    rows = as_numpy(rows)
    out = np.empty((tokens, hidden), rows.dtype)
    shared = None if shared_rows is None else as_numpy(shared_rows)
    for token in range(tokens):
        terms, factors = [], []
        if shared is not None:
            terms.append(shared[token])
            factors.append(1.0 if shared_weight is None else float(shared_weight[token]))
        for k in range(top_k):
            if ids_TK[token, k] >= 0:
                terms.append(rows[token * top_k + k])
                factors.append(1.0 if weights_TK is None else float(weights_TK[token, k]))
        factors = None if weights_TK is None and shared_weight is None else np.float32(factors)
        out[token] = kernels.weighted_sum(isa, compute, terms, factors, hidden)
    out = (
        torch.from_numpy(out.view(np.int16)).view(BF16) if dtype == BF16 else torch.from_numpy(out)
    )
    return out


def make_case(
    tokens, top_k, hidden, dtype, *, shared=False, gated=False, weighted=True, holes=False, seed=0
):
    """Arguments of torch.ops.mok._weighted_sum_out but `out`, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens * top_k, hidden, generator=generator)
    rows *= torch.exp2(torch.randint(-30, 10, (tokens * top_k, 1), generator=generator).float())
    ids_TK = torch.randint(0, 100, (tokens, top_k), generator=generator, dtype=torch.int32)
    weights_TK = torch.randn(tokens, top_k, generator=generator)
    if holes:
        none_TK = torch.rand(tokens, top_k, generator=generator) < 0.4
        none_TK[: tokens // 8] = True
        ids_TK[none_TK] = -1
        weights_TK[none_TK] = math.nan
        rows[none_TK.view(-1)] = math.nan
    shared_rows = torch.randn(tokens, hidden, generator=generator) if shared else None
    shared_weight = torch.rand(tokens, generator=generator) if gated else None
    return (
        rows.to(dtype),
        None if shared_rows is None else shared_rows.to(dtype),
        shared_weight,
        ids_TK,
        weights_TK if weighted else None,
    )


def on_gpu(case: tuple, dtype: torch.dtype) -> torch.Tensor:
    arguments = [None if tensor is None else tensor.cuda() for tensor in case]
    tokens, hidden = case[3].shape[0], case[0].shape[1]
    out = torch.full((tokens, hidden), math.nan, dtype=dtype, device="cuda")
    torch.ops.mok._weighted_sum_out(*arguments, out)
    return out.cpu()


def check(case: tuple, dtype: torch.dtype) -> None:
    assert_bitwise_equal({"out": on_gpu(case, dtype)}, {"out": cpu_weighted_sum(*case, dtype)})


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden"),
    [
        (1, 1, 8),
        (3, 2, 16),
        (37, 8, 256),
        (5, 3, 264),
        (64, 6, 2880),
        (17, 10, 512),
        (9, 16, 3584),
        (33, 33, 136),
        (700, 4, 40),
    ],
)
def test_every_shape(tokens, top_k, hidden, dtype):
    check(make_case(tokens, top_k, hidden, dtype), dtype)
    check(
        make_case(tokens, top_k, hidden, dtype, shared=True, gated=True, holes=True, seed=1), dtype
    )


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("holes", [False, True])
def test_every_combination_of_terms(dtype, shared, gated, weighted, holes):
    if gated and not shared:
        pytest.skip("a gate belongs to a shared expert")
    options = {"shared": shared, "gated": gated, "weighted": weighted, "holes": holes}
    check(make_case(50, 9, 72, dtype, **options), dtype)


def test_no_tokens():
    case = make_case(0, 4, 64, BF16)
    assert on_gpu(case, BF16).shape == (0, 64)


def test_zeros_subnormals_and_infinities():
    values = torch.tensor([0.0, -0.0, 1e-40, -1e-39, 3e38, -3e38, math.inf, 1.0])
    rows = torch.stack([values, values.flip(0), -values]).repeat(2, 1)
    ids_TK = torch.tensor([[0, 1, -1], [-1, -1, 2]], dtype=torch.int32)
    weights_TK = torch.tensor([[1.0, -0.5, math.nan], [math.nan, math.nan, -0.0]])
    case = (rows, None, None, ids_TK, weights_TK)
    ours, exact = on_gpu(case, FP32), cpu_weighted_sum(*case, FP32)
    is_nan = exact.isnan()
    assert torch.equal(ours.isnan(), is_nan)
    assert_bitwise_equal({"out": ours[~is_nan]}, {"out": exact[~is_nan]})


def test_a_token_without_routes_gives_positive_zero():
    case = make_case(4, 3, 64, BF16)
    case[3].fill_(-1)
    assert (on_gpu(case, BF16).view(torch.int16) == 0).all()


def test_a_nan_reaches_its_own_column_only():
    rows, *rest = make_case(3, 2, 32, BF16)
    rows[2, 5] = math.nan
    out = on_gpu((rows, *rest), BF16)
    assert out.isnan().nonzero().tolist() == [[1, 5]]


def test_more_rows_than_32_bits_can_address():
    tokens, top_k, hidden = 36_000, 8, 8192  # 4.7 GB of rows
    if torch.cuda.mem_get_info()[0] < 8e9:
        pytest.skip("this GPU has less than 8 GB free")
    ids_TK = torch.zeros(tokens, top_k, dtype=torch.int32, device="cuda")
    rows = torch.ones(tokens * top_k, hidden, dtype=BF16, device="cuda")
    rows[-1] = 5
    out = torch.empty(tokens, hidden, dtype=BF16, device="cuda")
    torch.ops.mok._weighted_sum_out(rows, None, None, ids_TK, None, out)
    assert (out[:-1] == top_k).all()
    assert (out[-1] == top_k + 4).all()


def test_bits_do_not_depend_on_the_other_tokens():
    rows, shared_rows, shared_weight, ids_TK, weights_TK = make_case(
        500, 5, 1032, BF16, shared=True, gated=True
    )
    whole = on_gpu((rows, shared_rows, shared_weight, ids_TK, weights_TK), BF16)
    alone = (rows[35:40], shared_rows[7:8], shared_weight[7:8], ids_TK[7:8], weights_TK[7:8])
    assert_bitwise_equal({"out": on_gpu(alone, BF16)}, {"out": whole[7:8]})


def test_graph_replay_sees_new_values():
    case = [None if t is None else t.cuda() for t in make_case(64, 4, 256, BF16)]
    out = torch.empty(64, 256, dtype=BF16, device="cuda")
    torch.ops.mok._weighted_sum_out(*case, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.mok._weighted_sum_out(*case, out)
    other = make_case(64, 4, 256, BF16, holes=True, seed=3)
    for tensor, value in zip(case, other, strict=True):
        if tensor is not None:
            tensor.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    assert_bitwise_equal({"out": out.cpu()}, {"out": cpu_weighted_sum(*other, BF16)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.zeros(8, 60)}, r"rows must be \[8, 64\]"),
        ({"ids_TK": torch.zeros(4, 2, dtype=torch.int64)}, "ids has torch dtype"),
        ({"weights_TK": torch.zeros(4, 1)}, "weights has 4 elements, needs at least 8"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    names = ("rows", "shared_rows", "shared_weight", "ids_TK", "weights_TK")
    case = dict(zip(names, make_case(4, 2, 64, FP32), strict=True)) | change
    arguments = [None if tensor is None else tensor.cuda() for tensor in case.values()]
    with pytest.raises(ValueError, match=message):
        torch.ops.mok._weighted_sum_out(*arguments, torch.empty(4, 64, device="cuda"))


def test_nothing_is_written_once_the_workspace_has_ended():
    arguments = [t.cuda() for t in make_case(64, 4, 256, BF16) if t is not None]
    rows, ids_TK, weights_TK = arguments
    out = torch.full((64, 256), 7.0, dtype=BF16, device="cuda")
    expired = torch.ones(1, dtype=torch.int32, device="cuda")
    torch.ops.mok._weighted_sum_out(rows, None, None, ids_TK, weights_TK, out, expired)
    assert (out == 7).all()
    expired.zero_()
    torch.ops.mok._weighted_sum_out(rows, None, None, ids_TK, weights_TK, out, expired)
    assert (out != 7).any()
