"""Forward and backward on a GPU through autograd: numbers, bits, what is saved, graphs."""

import pytest
import torch

import mok
from mok.reference import moe_reference
from tests._numerics import assert_bitwise_equal, run, run_exact, run_plain, three_way
from tests.gpu._moe import DEVICE, FEATURES, SIZES, bf16_tensors, gpu_case, ours

pytestmark = pytest.mark.usefixtures("needs_sm90")


@pytest.fixture(scope="module")
def medium():
    return gpu_case(1000, 8, 32, 512, 384, shared=128, shared_gate=True)


@pytest.fixture(scope="module")
def medium_results(medium):
    return ours(medium)


@pytest.mark.parametrize("tokens", [0, 1, 31, 45, 257, 4099])
def test_any_number_of_tokens(tokens):
    case = gpu_case(tokens, 8, 32, 256, 192, shared=64)
    three_way(ours(case), run_plain(case), run_exact(case))


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    case = gpu_case(300, *SIZES[name])
    three_way(ours(case), run_plain(case), run_exact(case))


@pytest.mark.parametrize("name", FEATURES)
def test_features(name):
    case = gpu_case(333, 4, 16, 256, 192, **FEATURES[name])
    three_way(ours(case), run_plain(case), run_exact(case))


@pytest.mark.parametrize("ring_rows", [None, 128, 640, 2048])
@pytest.mark.parametrize("save", ["none", "gate_up", "all"])
def test_ring_and_saving_change_no_bit(medium, medium_results, ring_rows, save):
    assert_bitwise_equal(ours(medium, ring_rows=ring_rows, save=save), medium_results)


def test_repeats_beside_another_stream(medium, medium_results):
    other = torch.cuda.Stream()
    for repeat in range(50):
        with torch.cuda.stream(other):
            torch.cuda._sleep(50_000 * (repeat % 7))
        assert_bitwise_equal(ours(medium), medium_results)


def test_tokens_alone(medium, medium_results):
    alone = ours(medium.tokens(100, 163))
    for name in ("out", "dx_TH", "dtopk_weights_TK", "dshared_weight_T"):
        assert_bitwise_equal({name: alone[name]}, {name: medium_results[name][100:163]})


@pytest.mark.parametrize(
    "frozen", [("x_TH",), ("w_gate", "w_up", "w_down"), ("topk_weights_TK",), ("x_TH", "w_down")]
)
def test_what_needs_no_gradient(medium, medium_results, frozen):
    got = ours(medium, frozen=frozen)
    expected = {n: t for n, t in medium_results.items() if n.removeprefix("d") not in frozen}
    assert_bitwise_equal(got, expected)


def test_fp32_weights_get_unrounded_gradients(medium, medium_results):
    wide = run(mok.moe, medium, torch.bfloat16, weight_dtype=torch.float32)
    for name in ("dw_gate", "dw_up", "dw_down"):
        assert wide[name].dtype == torch.float32
        assert_bitwise_equal({name: wide[name].bfloat16()}, {name: medium_results[name]})
        assert (wide[name] != wide[name].bfloat16().float()).any()
    assert_bitwise_equal({"dx": wide["dx_TH"]}, {"dx": medium_results["dx_TH"]})


def leaves_of(case):
    return {n: t.clone().requires_grad_() for n, t in bf16_tensors(case).items()}


def layer_of(leaves, case):
    return mok.moe(
        leaves["x_TH"],
        case.topk_ids_TK,
        leaves["topk_weights_TK"],
        leaves["w_gate"],
        leaves["w_up"],
        leaves["w_down"],
        shared=(leaves["shared_gate"], leaves["shared_up"], leaves["shared_down"]),
        shared_weight_T=leaves["shared_weight_T"],
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_interleaved_forwards_and_backwards(medium, order):
    cases = [medium, gpu_case(700, 8, 32, 512, 384, shared=128, shared_gate=True, seed=5)]
    expected = [ours(case) for case in cases]
    leaves = [leaves_of(case) for case in cases]
    outs = [layer_of(*pair) for pair in zip(leaves, cases, strict=True)]
    for i in order:
        outs[i].backward(cases[i].dout_TH.bfloat16())
    for i in (0, 1):
        got = {"out": outs[i].detach()} | {"d" + n: t.grad for n, t in leaves[i].items()}
        assert_bitwise_equal(got, expected[i])


def test_activation_checkpointing(medium, medium_results):
    leaves = leaves_of(medium)
    out = torch.utils.checkpoint.checkpoint(layer_of, leaves, medium, use_reentrant=False)
    out.backward(medium.dout_TH.bfloat16())
    got = {"out": out.detach()} | {"d" + n: t.grad for n, t in leaves.items()}
    assert_bitwise_equal(got, medium_results)


def test_a_graph_of_forward_and_backward_replays_with_other_routing(medium):
    other = gpu_case(1000, 8, 32, 512, 384, shared=128, shared_gate=True, seed=9)
    expected = ours(other)
    leaves, ids = leaves_of(medium), medium.topk_ids_TK.clone()
    dout = medium.dout_TH.bfloat16()

    def step():
        for leaf in leaves.values():
            leaf.grad = None
        out = mok.moe(
            leaves["x_TH"],
            ids,
            leaves["topk_weights_TK"],
            leaves["w_gate"],
            leaves["w_up"],
            leaves["w_down"],
            shared=(leaves["shared_gate"], leaves["shared_up"], leaves["shared_down"]),
            shared_weight_T=leaves["shared_weight_T"],
        )
        out.backward(dout)
        return out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    new = bf16_tensors(other)
    with torch.no_grad():
        for name, leaf in leaves.items():
            leaf.copy_(new[name])
    ids.copy_(other.topk_ids_TK)
    dout.copy_(other.dout_TH)
    graph.replay()
    got = {"out": out.detach()} | {"d" + n: t.grad for n, t in leaves.items()}
    assert_bitwise_equal(got, expected)


def test_fifty_layers_without_synchronisation():
    torch.manual_seed(0)
    case = gpu_case(300, 4, 16, 256, 192)
    weights = [bf16_tensors(gpu_case(300, 4, 16, 256, 192, seed=s)) for s in range(50)]

    def stack(function, x, dtype):
        for layer in weights:
            moved = [layer[name].to(dtype) for name in ("w_gate", "w_up", "w_down")]
            x = x + 0.1 * function(
                x, case.topk_ids_TK, layer["topk_weights_TK"].nan_to_num(), *moved
            )
        return x

    results = {}
    for key, function, dtype in (
        ("ours", mok.moe, torch.bfloat16),
        ("plain", moe_reference, torch.bfloat16),
        ("exact", moe_reference, torch.float64),
    ):
        x = case.tensors["x_TH"].to(dtype).requires_grad_()
        out = stack(function, x, dtype)
        out.backward(case.dout_TH.to(dtype))
        results[key] = {"out": out.detach(), "dx": x.grad}
    three_way(results["ours"], results["plain"], results["exact"])


def test_accumulation_over_micro_batches(medium):
    """Four micro-batches into FP32 main_grad: each is one unrounded add per element."""
    leaves = leaves_of(medium)
    names = ("w_gate", "w_up", "w_down")
    parameters = {n: torch.nn.Parameter(leaves[n].detach().clone()) for n in names}
    for parameter in parameters.values():
        parameter.main_grad = torch.full_like(parameter, torch.nan, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    expected = {}
    for micro in range(4):
        case = medium.tokens(250 * micro, 250 * (micro + 1))
        part = run(mok.moe, case, torch.bfloat16, weight_dtype=torch.float32)
        for name in names:
            if micro == 0:
                expected[name] = part["d" + name]
            else:
                expected[name] = expected[name] + part["d" + name]
        for parameter in parameters.values():
            parameter.overwrite_main_grad = micro == 0
        tensors = bf16_tensors(case) | parameters
        tensors["x_TH"].requires_grad_()
        out = layer_of(tensors, case)
        out.backward(case.dout_TH.bfloat16())
    for name, parameter in parameters.items():
        assert_bitwise_equal({name: parameter.main_grad}, {name: expected[name]})


def test_nothing_is_left_of_a_gradient_without_tokens():
    case = gpu_case(0, 2, 4, 64, 64)
    for name, gradient in ours(case).items():
        assert gradient.device.type == DEVICE
        assert not gradient.any(), name
