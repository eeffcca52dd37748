"""`mok.MoELayer` on one rank: numbers, dtypes, routing from outside, life as an nn.Module."""

import copy
import io
import pickle

import pytest
import torch

import mok
from mok.reference import moe_reference
from mok.router import load_balancing_loss
from tests._numerics import assert_bitwise_equal, relative_error, three_way

pytestmark = pytest.mark.quick

H, I, E, K = 32, 48, 6, 3
FULL = {"shared_intermediate_size": 16, "shared_gate": True, "bias": True}


def make_layer(dtype=torch.float32, **settings):
    """A layer whose weights BF16 holds exactly, so that a BF16 copy is the same function."""
    layer = mok.MoELayer(H, I, E, K, dtype=dtype, **settings)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter.bfloat16())
    return layer


def tokens(*shape, dtype=torch.bfloat16, requires_grad=True):
    return torch.randn(*shape, H).bfloat16().to(dtype).requires_grad_(requires_grad)


def gradients(layer, *tensors):
    named = {name: parameter.grad for name, parameter in layer.named_parameters()}
    named |= {f"input {i}": tensor.grad for i, tensor in enumerate(tensors)}
    return {name: grad.clone() for name, grad in named.items() if grad is not None}


def step(layer, x, dout=None, **call):
    """Output and gradients of one forward and backward."""
    layer.zero_grad()
    x.grad = None
    out = layer(x, **call)
    out.backward(torch.ones_like(out) if dout is None else dout.to(out.dtype))
    return {"out": out.detach()} | gradients(layer, x)


def reference_step(layer, x, dout, dtype, ids_TK):
    """The layer's formulas around `moe_reference`, every part in `dtype` or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {
        name: parameter.detach().to(dtype).requires_grad_()
        for name, parameter in layer.named_parameters()
    }
    leaves["input 0"] = x.detach().to(dtype).requires_grad_()
    x_TH = leaves["input 0"]
    probabilities_TE = torch.softmax(x_TH.to(wide) @ leaves["router.weight"].to(wide).T, dim=1)
    weights_TK = probabilities_TE.gather(1, ids_TK)
    out = moe_reference(
        x_TH,
        ids_TK,
        weights_TK / weights_TK.sum(1, keepdim=True),
        *(leaves[f"experts.{name}"] for name in ("w_gate", "w_up", "w_down")),
        **{name: leaves.get(f"experts.{name}") for name in ("b_gate", "b_up", "b_down")},
        shared=tuple(leaves[f"shared.{name}"] for name in ("w_gate", "w_up", "w_down")),
        shared_weight_T=torch.sigmoid(x_TH.to(wide) @ leaves["shared_gate.weight"][0].to(wide)),
        activation=layer.activation,
        swiglu_limit=layer.swiglu_limit,
        mask_dtype=torch.bfloat16,
    )
    out.backward(dout.to(dtype))
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("save", ["all", "gate_up", "none"])
@pytest.mark.parametrize(("activation", "limit"), [("swiglu", None), ("gpt_oss", 0.5)])
def test_all_tensors_within_twice_the_plain_error(activation, limit, save):
    settings = {"activation": activation, "swiglu_limit": limit, "save": save}
    layer = make_layer(torch.bfloat16, **FULL, **settings)
    x, dout = tokens(70), torch.randn(70, H).bfloat16()
    ids_TK = layer(x, return_router_output=True)[1].topk_ids_TK
    ours = step(layer, x, dout)
    plain = reference_step(layer, x, dout, torch.bfloat16, ids_TK)
    exact = reference_step(layer, x, dout, torch.float64, ids_TK)
    three_way(ours, plain, exact)


def test_fp32_layer_is_close_to_fp64():
    layer = make_layer(**FULL)
    x, dout = tokens(33, dtype=torch.float32), torch.randn(33, H)
    ids_TK = layer(x, return_router_output=True)[1].topk_ids_TK
    ours = step(layer, x, dout)
    exact = reference_step(layer, x, dout, torch.float64, ids_TK)
    for name, value in ours.items():
        assert value.dtype == torch.float32
        assert relative_error(value, exact[name]) < 1e-5, name


def test_parameter_names_and_shapes():
    layer = mok.MoELayer(H, I, E, K, **FULL)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "router.weight": (E, H),
        "experts.w_gate": (E, I, H),
        "experts.w_up": (E, I, H),
        "experts.w_down": (E, H, I),
        "experts.b_gate": (E, I),
        "experts.b_up": (E, I),
        "experts.b_down": (E, H),
        "shared.w_gate": (16, H),
        "shared.w_up": (16, H),
        "shared.w_down": (H, 16),
        "shared_gate.weight": (1, H),
    }
    assert not list(layer.buffers())
    plain = mok.MoELayer(H, I, E, K, router=None)
    assert [n for n, _ in plain.named_parameters()] == [
        f"experts.{name}" for name in ("w_gate", "w_up", "w_down")
    ]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (2, 5), (2, 0), (2, 3, 4)])
def test_any_leading_shape(shape):
    layer = make_layer(**FULL)
    x = tokens(*shape)
    results = step(layer, x)
    assert results["out"].shape == x.shape
    assert results["out"].dtype == torch.bfloat16
    flat = x.detach().reshape(-1, H).requires_grad_()
    expected = step(layer, flat)
    expected["out"] = expected["out"].reshape(x.shape)
    expected["input 0"] = expected["input 0"].reshape(x.shape)
    assert_bitwise_equal(results, expected)
    assert len(results) == 2 + len(list(layer.parameters()))  # zeros and not None at T = 0
    if x.numel() == 0:
        assert all((value == 0).all() for value in results.values())


def test_strides_of_x_do_not_matter():
    layer = make_layer(**FULL)
    wide = torch.randn(5, 4, 2 * H).bfloat16()
    for x in (wide.transpose(0, 1)[..., :H], wide[..., H:], wide[..., ::2], wide[:1, :, :H]):
        strided = x.detach().requires_grad_()
        packed = x.detach().contiguous().requires_grad_()
        results = step(layer, strided)
        assert_bitwise_equal(results, step(layer, packed))
    expanded = torch.randn(1, H).bfloat16().expand(6, H)
    out = layer(expanded)
    assert torch.equal(out, out[:1].expand(6, H))


def test_x_without_gradient_and_no_grad():
    layer = make_layer(**FULL)
    x = tokens(9)
    full = step(layer, x)
    del full["input 0"]
    assert_bitwise_equal(step(layer, x.detach()), full)
    with torch.no_grad():
        out = layer(x)
    assert not out.requires_grad
    assert torch.equal(out, full["out"])


@pytest.mark.parametrize(
    "frozen", ["router", "experts", "shared", "experts.w_up", "experts.b_down"]
)
def test_frozen_parameters_get_nothing_and_change_nothing(frozen):
    layer = make_layer(**FULL)
    x = tokens(11)
    full = step(layer, x)
    layer.zero_grad()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    results = step(layer, x)
    missing = set(full) - set(results)
    assert missing == {name for name in full if name.startswith(frozen)}
    assert missing
    assert_bitwise_equal(results, {name: full[name] for name in results})


def test_routing_from_outside():
    layer = make_layer(router=None, **FULL)
    x = tokens(2, 4)
    ids = torch.tensor([[[0, 1, 2]] * 4, [[5, -1, E]] * 4])
    weights = torch.rand(2, 4, K)
    weights[1, :, 1:] = torch.nan
    weights.requires_grad_()
    results = step(layer, x, topk_ids=ids, topk_weights=weights)
    assert all(value.isfinite().all() for value in results.values())
    assert (weights.grad[1, :, 1:] == 0).all()
    assert (weights.grad[1, :, 0] != 0).all()
    assert (weights.grad[0] != 0).all()
    assert (results["experts.w_gate"][3:5] == 0).all()
    again = step(layer, x, topk_ids=ids.int(), topk_weights=weights)
    assert_bitwise_equal(again, results)
    flat = step(layer, x, topk_ids=ids.view(8, K), topk_weights=weights.view(8, K))
    assert_bitwise_equal(flat, results)
    half = weights.detach().bfloat16().requires_grad_()
    step(layer, x, topk_ids=ids, topk_weights=half)
    assert half.grad.dtype == torch.bfloat16


def test_routing_replay_weighs_given_ids_by_the_router():
    layer = make_layer(**FULL)
    x = tokens(12)
    routed = step(layer, x)
    ids_TK = layer(x, return_router_output=True)[1].topk_ids_TK
    assert_bitwise_equal(step(layer, x, topk_ids=ids_TK), routed)
    other = step(layer, x, topk_ids=(ids_TK + 1) % E)
    assert (other["router.weight"] != 0).any()
    assert not torch.equal(other["out"], routed["out"])


def test_router_output_carries_the_load_balancing_loss():
    layer = make_layer()
    x = tokens(2, 10)
    out, routing = layer(x, return_router_output=True)
    assert torch.equal(out, layer(x))
    loss = load_balancing_loss(routing)
    assert loss.dtype == torch.float32
    assert 0 < loss < E
    (grad,) = torch.autograd.grad(loss, layer.router.weight)
    assert (grad != 0).any()


def test_unnormalized_weights():
    layer = make_layer(normalize_topk=False)
    routing = layer(tokens(5), return_router_output=True)[1]
    assert (routing.topk_weights_TK.sum(1) < 1).all()


def test_fp32_parameters_get_unrounded_gradients():
    layer = make_layer(torch.float32, **FULL)
    small = copy.deepcopy(layer).to(torch.bfloat16)
    x = tokens(50)
    wide, narrow = step(layer, x), step(small, x)
    assert narrow["out"].dtype == wide["out"].dtype == torch.bfloat16
    for name, value in narrow.items():
        assert torch.equal(value, wide[name].bfloat16()), name
        if name.startswith(("experts", "shared.")):
            assert wide[name].dtype == torch.float32
            assert not torch.equal(wide[name], wide[name].bfloat16().float())


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_x(weight_dtype):
    layer = make_layer(weight_dtype, **FULL)
    x = tokens(20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    out.backward(torch.ones_like(out))
    results = {"out": out.detach()} | gradients(layer, x)
    assert out.dtype == torch.bfloat16
    assert x.grad.dtype == torch.float32
    expected = step(layer, x.detach().bfloat16().requires_grad_())
    expected["input 0"] = expected["input 0"].float()
    assert_bitwise_equal(results, expected)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(TypeError, match=r"x is torch\.float16"),
    ):
        layer(x)


def test_two_forwards_then_two_backwards_in_either_order():
    layer = make_layer(**FULL)
    xs = [tokens(13), tokens(30)]
    separate = [step(layer, x) for x in xs]
    for order in ((0, 1), (1, 0)):
        outs = [layer(x) for x in xs]
        for i in order:
            layer.zero_grad()
            xs[i].grad = None
            outs[i].backward(torch.ones_like(outs[i]))
            results = {"out": outs[i].detach()} | gradients(layer, xs[i])
            assert_bitwise_equal(results, separate[i])


def test_gradients_accumulate_over_micro_batches():
    layer = make_layer(**FULL)
    xs = [tokens(5) for _ in range(4)]
    separate = [step(layer, x) for x in xs]
    layer.zero_grad()
    for x in xs:
        layer(x).sum().backward()
    for name, parameter in layer.named_parameters():
        total = sum(results[name] for results in separate)
        torch.testing.assert_close(parameter.grad, total)


def test_repeats_and_token_alone_are_bitwise_equal():
    layer = make_layer(router=None, bias=True)
    x, ids_TK, weights_TK = tokens(40), torch.randint(-1, E, (40, K)), torch.rand(40, K)
    routing = {"topk_ids": ids_TK, "topk_weights": weights_TK}
    first = step(layer, x, **routing)
    for _ in range(3):
        assert_bitwise_equal(step(layer, x, **routing), first)
    for t in (0, 17, 39):
        alone = x.detach()[t : t + 1].requires_grad_()
        one = {name: value[t : t + 1] for name, value in routing.items()}
        results = step(layer, alone, **one)
        assert torch.equal(results["out"], first["out"][t : t + 1])
        assert torch.equal(results["input 0"], first["input 0"][t : t + 1])


def test_meta_device_init():
    torch.manual_seed(3)
    expected = mok.MoELayer(H, I, E, K, **FULL).state_dict()
    torch.manual_seed(3)
    layer = mok.MoELayer(H, I, E, K, device="meta", **FULL)
    assert all(p.is_meta for p in layer.parameters())
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert_bitwise_equal(layer.state_dict(), expected)
    assert layer(tokens(3)).isfinite().all()
    with torch.device("meta"):
        assert mok.MoELayer(H, I, E, K).experts.w_up.is_meta


def test_initial_weights():
    torch.manual_seed(0)
    layer = mok.MoELayer(H, I, E, K, **FULL)
    torch.manual_seed(0)
    again = mok.MoELayer(H, I, E, K, **FULL)
    other = mok.MoELayer(H, I, E, K, **FULL)
    assert_bitwise_equal(layer.state_dict(), again.state_dict())
    for name, parameter in layer.named_parameters():
        fan_in = I if name.endswith("experts.w_down") else H
        fan_in = {"shared.w_down": 16, "experts.b_down": I}.get(name, fan_in)
        largest = parameter.abs().max()
        assert 0.8 * fan_in**-0.5 < largest <= fan_in**-0.5, name
        assert not torch.equal(parameter, other.get_parameter(name))
    w_gate = layer.experts.w_gate
    assert not any(torch.equal(w_gate[0], w_gate[e]) for e in range(1, E))
    assert not torch.equal(w_gate[0], layer.experts.w_up[0])


def test_copies_pickles_and_state_dicts():
    layer = make_layer(**FULL, max_tokens=16)
    x = tokens(10)
    expected = step(layer, x)
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(stored, weights_only=False),
    ]
    fresh = mok.MoELayer(H, I, E, K, **FULL, max_tokens=16)
    fresh.load_state_dict(layer.state_dict())
    for twin in (*copies, fresh):
        assert_bitwise_equal(step(twin, x), expected)
    moved = copy.deepcopy(layer).to(torch.bfloat16).to("cpu")
    assert {p.dtype for p in moved.parameters()} == {torch.bfloat16}
    assert torch.equal(moved(x), expected["out"])


def test_repr_names_the_settings():
    layer = mok.MoELayer(
        H, I, E, K, **FULL, activation="gpt_oss", swiglu_limit=5.0, max_tokens=9, ring_rows=256
    )
    text = repr(layer)
    for part in (
        f"hidden_size={H}, intermediate_size={I}, num_experts={E}, top_k={K}",
        "activation='gpt_oss', swiglu_limit=5.0",
        "ranks=1, max_tokens=9, save='gate_up', ring_rows=256, backend='auto'",
        "experts 0..5, bias=True",
        "normalize=True",
    ):
        assert part in text, text


def test_a_meta_layer_takes_meta_input():
    layer = mok.MoELayer(16, 24, 4, 2, device="meta")
    out = layer(torch.randn(3, 16, device="meta"))
    assert out.is_meta
    assert out.shape == (3, 16)
