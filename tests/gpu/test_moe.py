"""The forward pass on a GPU through `mok.moe` and `MoELayer`: numbers, bits, streams, graphs."""

import time

import pytest
import torch

import mok
from tests._numerics import assert_bitwise_equal, relative_error, three_way
from tests._products import make_chain
from tests.gpu._moe import DEVICE, FEATURES, SIZES, bf16_tensors, forward, forward_legs, gpu_case

pytestmark = pytest.mark.usefixtures("needs_sm90")

TOKENS = (0, 1, 31, 45, 257, 4099)
SIZES = SIZES | {"all experts": (6, 6, 128, 128)}


@pytest.fixture(scope="module")
def medium():
    return gpu_case(1000, 8, 32, 512, 384)


@pytest.mark.parametrize("tokens", TOKENS)
def test_any_number_of_tokens(tokens):
    three_way(*forward_legs(gpu_case(tokens, 8, 32, 256, 192, shared=64)))


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    top_k, experts, hidden, intermediate = SIZES[name]
    three_way(*forward_legs(gpu_case(300, top_k, experts, hidden, intermediate)))


@pytest.mark.parametrize("name", FEATURES)
def test_features(name):
    three_way(*forward_legs(gpu_case(333, 4, 16, 256, 192, **FEATURES[name])))


def test_as_the_cpu_executor(medium):
    on_cpu = {name: tensor.cpu() for name, tensor in bf16_tensors(medium).items()}
    with torch.no_grad():
        expected = mok.moe(
            on_cpu["x_TH"],
            medium.topk_ids_TK.cpu(),
            on_cpu["topk_weights_TK"],
            on_cpu["w_gate"],
            on_cpu["w_up"],
            on_cpu["w_down"],
        )
    # Both round at the same places; sums in another order flip a few roundings.
    assert relative_error(forward(medium).cpu(), expected) < 2e-3


@pytest.mark.parametrize("view", ["packed", "interleaved"])
def test_weight_views(medium, view):
    tensors = bf16_tensors(medium)
    experts, inner, hidden = tensors["w_gate"].shape
    both = torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16, device=DEVICE)
    halves = (
        (both[:, :inner], both[:, inner:]) if view == "packed" else (both[:, ::2], both[:, 1::2])
    )
    for half, name in zip(halves, ("w_gate", "w_up"), strict=True):
        half.copy_(tensors[name])
    viewed = tensors | {"w_gate": halves[0], "w_up": halves[1]}
    assert_bitwise_equal({"out": forward(medium, viewed)}, {"out": forward(medium)})


def test_fp32_weights_are_cast(medium):
    tensors = bf16_tensors(medium)
    wide = {
        name: tensor.float() if name.startswith("w_") else tensor
        for name, tensor in tensors.items()
    }
    assert_bitwise_equal({"out": forward(medium, wide)}, {"out": forward(medium)})


@pytest.mark.parametrize("ring_rows", [128, 640, 2048])
@pytest.mark.parametrize("save", ["none", "gate_up", "all"])
def test_ring_and_saving_change_no_bit(medium, ring_rows, save):
    expected = forward(medium)
    got = forward(medium, ring_rows=ring_rows, save=save)
    assert_bitwise_equal({"out": got}, {"out": expected})


def test_200_repeats_beside_another_stream(medium):
    tensors = bf16_tensors(medium)
    expected = forward(medium, tensors)
    other = torch.cuda.Stream()
    busy = torch.randn(2048, 2048, device=DEVICE)
    for repeat in range(200):
        with torch.cuda.stream(other):
            if repeat % 2:
                torch.cuda._sleep(20_000 * (repeat % 7))
            else:
                busy = (busy @ busy).clamp_(-1, 1)
        assert_bitwise_equal({"out": forward(medium, tensors)}, {"out": expected})


def test_a_token_alone_is_the_token_in_a_batch(medium):
    expected = forward(medium)
    for first, last in ((0, 1), (513, 514), (100, 163), (999, 1000)):
        alone = forward(medium.tokens(first, last))
        assert_bitwise_equal({"out": alone}, {"out": expected[first:last]})


@pytest.fixture
def matmul_without_split_k():
    """K in one piece and in FP32: the order of summation that the layer has as well."""
    matmul = torch.backends.cuda.matmul
    before = (
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction_split_k,
    )
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    yield
    matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize(("hidden", "intermediate"), [(2048, 768), (7168, 2048), (2880, 2880)])
def test_rows_have_the_bits_of_torchs_matmul(matmul_without_split_k, hidden, intermediate):
    # So many rows have tiles for every multiprocessor; tests/cpu/test_products.py has the oracle.
    chain = make_chain(4096, hidden, intermediate, device=DEVICE)
    expected = chain.by_matmul()
    for first, last in ((0, 4096), (0, 1), (7, 52), (3000, 3257)):
        out = chain.by_mok(first, last)
        assert_bitwise_equal({"out": out}, {"out": expected[first:last]})


def test_the_call_does_not_wait_for_the_gpu(medium):
    tensors = bf16_tensors(medium)
    forward(medium, tensors)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)  # half a second and more
    begin = time.perf_counter()
    out = forward(medium, tensors)
    done.record()
    elapsed = time.perf_counter() - begin
    assert not done.query(), "the long kernel in front was to be still running"
    assert elapsed < 0.2
    torch.cuda.synchronize()
    assert torch.isfinite(out).all()


def test_a_graph_replays_with_other_routing(medium):
    other = gpu_case(1000, 8, 32, 512, 384, seed=3)
    tensors, ids = bf16_tensors(medium), medium.topk_ids_TK.clone()
    new = bf16_tensors(other)
    per_call = ("x_TH", "topk_weights_TK")
    expected = forward(other, tensors | {name: new[name] for name in per_call})
    static = tensors | {name: tensors[name].clone() for name in per_call}

    @torch.no_grad()
    def layer():
        return mok.moe(
            static["x_TH"],
            ids,
            static["topk_weights_TK"],
            static["w_gate"],
            static["w_up"],
            static["w_down"],
        )

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for _ in range(3):
        graph.replay()
    assert_bitwise_equal({"out": out}, {"out": forward(medium, tensors)})
    ids.copy_(other.topk_ids_TK)
    for name in per_call:
        static[name].copy_(new[name])
    graph.replay()
    assert_bitwise_equal({"out": out}, {"out": expected})


def test_two_streams_share_a_workspace(medium):
    tensors = bf16_tensors(medium)
    expected = forward(medium, tensors)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs = []
    for turn in range(10):
        with torch.cuda.stream(streams[turn % 2]):
            outs.append(forward(medium, tensors))
    torch.cuda.synchronize()
    for out in outs:
        assert_bitwise_equal({"out": out}, {"out": expected})


def test_the_layer_on_a_gpu():
    torch.manual_seed(0)
    layer = mok.MoELayer(
        256, 192, 16, 4, shared_intermediate_size=64, dtype=torch.bfloat16, device=DEVICE
    )
    x = torch.randn(3, 50, 256, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        out = layer(x)
        routing = layer.router(x.flatten(0, -2))
    assert out.shape == x.shape
    assert torch.isfinite(out).all()
    assert routing is not None
    assert out.float().std() > 0.01


@pytest.mark.parametrize("what", ["weights", "tokens"])
def test_more_than_two_to_the_31_elements(what):
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GiB of device memory")
    if what == "weights":
        tokens, top_k, experts, hidden, inner = 200, 2, 34, 8192, 8192
        ids = torch.tensor([[experts - 1, 0]], device=DEVICE).expand(tokens, -1).contiguous()
    else:
        tokens, top_k, experts, hidden, inner = (1 << 18) + 40, 1, 2, 8192, 8
        ids = torch.ones(tokens, 1, dtype=torch.int64, device=DEVICE)
    bf16 = {"dtype": torch.bfloat16, "device": DEVICE}
    x = torch.zeros(tokens, hidden, **bf16)
    probe = [0, tokens // 2, tokens - 1]
    x[probe] = torch.randn(len(probe), hidden, **bf16)
    w_gate, w_up = torch.empty(2, experts, inner, hidden, **bf16).unbind(0)
    w_down = torch.empty(experts, hidden, inner, **bf16)
    for expert in set(ids[0].tolist()):
        w_gate[expert] = torch.randn(inner, hidden, **bf16) * hidden**-0.5
        w_up[expert] = torch.randn(inner, hidden, **bf16) * hidden**-0.5
        w_down[expert] = torch.randn(hidden, inner, **bf16) * inner**-0.5
    assert max(w_gate.numel(), x.numel()) > 1 << 31
    weights = torch.full((tokens, top_k), 0.5, device=DEVICE)
    with torch.no_grad():
        out = mok.moe(x, ids, weights, w_gate, w_up, w_down)
    rows = x[probe].double()
    expected = torch.zeros_like(rows)
    for expert in ids[0].tolist():
        g, u = rows @ w_gate[expert].double().T, rows @ w_up[expert].double().T
        expected += 0.5 * (torch.nn.functional.silu(g) * u) @ w_down[expert].double().T
    assert relative_error(out[probe], expected) < 1e-2
    untouched = torch.ones(tokens, dtype=torch.bool, device=DEVICE)
    untouched[probe] = False
    assert not out[untouched].any()
