"""The router's kernel on the GPU: the ids, and so the layer's bits, of the torch path."""

import math

import pytest
import torch

import mok
from mok.router import SigmoidTopKRouter, SoftmaxTopKRouter, TopKSoftmaxRouter, _choice
from tests._numerics import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("needs_sm90")

SIZES = [
    (1, 1, 1),
    (5, 5, 5),
    (31, 24, 8),
    (257, 33, 32),
    (4099, 128, 8),
    (70, 129, 3),
    (9, 1000, 10),
]


def values_of(kind: str, tokens: int, experts: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)

    def integers(*bounds):
        return torch.randint(*bounds, (tokens, experts), generator=generator)

    if kind == "ties":
        return integers(-1, 2).float()
    if kind == "bits":  # every float there is: subnormals, infinities, NaNs of both signs
        return integers(-(2**31), 2**31).to(torch.int32).view(torch.float32)
    if kind == "special":
        special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45])
        return special[integers(0, len(special))]
    if kind == "minus infinity":
        return torch.full((tokens, experts), -math.inf)
    return torch.randn(tokens, experts, generator=generator)


@pytest.mark.parametrize("kind", ["random", "ties", "bits", "special", "minus infinity"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES)
def test_ids_are_those_of_the_torch_path(kind, tokens, experts, top_k):
    scores_TE = values_of(kind, tokens, experts).cuda()
    bias_E = values_of("ties", 1, experts)[0].cuda()
    for bias in (None, bias_E):
        ids_TK = torch.ops.mok.router_top_k(scores_TE, bias, top_k)
        assert ids_TK.dtype == torch.int64
        assert torch.equal(ids_TK, _choice._by_torch(scores_TE, bias, top_k))


def test_no_tokens():
    ids_TK = torch.ops.mok.router_top_k(torch.empty(0, 16, device="cuda"), None, 4)
    assert ids_TK.shape == (0, 4)


def test_every_router_takes_it_and_gives_the_layer_the_same_bits(monkeypatch):
    x_TH = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16)
    x_TH[100:200] = x_TH[:100]  # equal tokens
    for make in (
        SoftmaxTopKRouter,
        SigmoidTopKRouter,
        lambda *sizes, **where: SigmoidTopKRouter(*sizes, num_groups=4, topk_groups=2, **where),
        TopKSoftmaxRouter,
    ):
        router = make(64, 16, 4, device="cuda", dtype=torch.bfloat16)
        layer = mok.MoELayer(64, 32, 16, 4, router=router, device="cuda", dtype=torch.bfloat16)
        results = []
        for has_kernel in (True, False):
            with monkeypatch.context() as patch:
                if not has_kernel:
                    patch.setattr(_choice, "_has_kernel_on", lambda device: False)
                else:
                    assert _choice._has_kernel_on(x_TH.device)
                layer.zero_grad()
                out_TH, routing = layer(x_TH, return_router_output=True)
                out_TH.sum().backward()
            results.append(
                {
                    "out": out_TH.detach(),
                    "ids": routing.topk_ids_TK,
                    "weights": routing.topk_weights_TK.detach(),
                    "router": router.weight.grad.clone(),
                    "w_down": layer.experts.w_down.grad.clone(),
                }
            )
        assert_bitwise_equal(*results)


def test_more_choices_than_lanes_take_the_torch_path():
    scores_TE = torch.randn(6, 64, device="cuda")
    ids_TK = mok.router.top_k_lowest_first(scores_TE, 33)
    assert torch.equal(ids_TK, _choice._by_torch(scores_TE, None, 33))
    with pytest.raises(RuntimeError, match="top_k = 33: must be at least 1 and at most 32"):
        torch.ops.mok.router_top_k(scores_TE, None, 33)


@pytest.mark.parametrize(
    ("scores", "bias", "message"),
    [
        (torch.zeros(3), None, r"scores must be \[T, E\]"),
        (torch.zeros(3, 4).double(), None, "scores has torch dtype"),
        (torch.zeros(4, 3).T, None, "scores must be contiguous"),
        (torch.zeros(3, 4), torch.zeros(3), r"bias must be \[4\]"),
    ],
)
def test_wrong_arguments_are_named(scores, bias, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.mok.router_top_k(scores.cuda(), None if bias is None else bias.cuda(), 2)


def test_graph_replay_sees_new_values():
    scores_TE = torch.randn(64, 32, device="cuda")
    torch.ops.mok.router_top_k(scores_TE, None, 4)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids_TK = torch.ops.mok.router_top_k(scores_TE, None, 4)
    scores_TE.copy_(torch.randn(64, 32))
    graph.replay()
    assert torch.equal(ids_TK, _choice._by_torch(scores_TE, None, 4))


def test_fullgraph():
    layer = mok.MoELayer(64, 32, 16, 4, device="cuda", dtype=torch.bfloat16)
    x_TH = torch.randn(40, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        ids_TK = layer.router(x_TH).topk_ids_TK
        compiled = torch.compile(layer.router, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x_TH).topk_ids_TK, ids_TK)
