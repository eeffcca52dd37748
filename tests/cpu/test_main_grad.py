"""Megatron's main_grad protocol: micro-batches, flags, hooks, overwriting, idle experts."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mok
from tests._numerics import assert_bitwise_equal, relative_error

pytestmark = pytest.mark.quick

H, I, E, K = 32, 48, 6, 2
BF16, FP32 = torch.bfloat16, torch.float32


def make_layer(dtype=BF16, **settings):
    torch.manual_seed(3)
    settings = {"shared_intermediate_size": 16, "bias": True, "router": None} | settings
    return mok.MoELayer(H, I, E, K, dtype=dtype, **settings)


def weights_of(layer):
    names = ("experts.", "shared.")
    return {n: p for n, p in layer.named_parameters() if n.startswith(names)}


def attach(layer, dtype=FP32, fill=torch.nan, overwrite=True):
    """main_grad on all weights, as Megatron's DDP does it; what is in them shows who reads it."""
    for parameter in weights_of(layer).values():
        parameter.main_grad = torch.full(parameter.shape, fill, dtype=dtype)
        parameter.grad_added_to_main_grad = False
        parameter.overwrite_main_grad = overwrite


def micro_batch(index, tokens=20, high=E):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(tokens, H, generator=generator).to(BF16)
    ids_TK = torch.randint(high, (tokens, K), generator=generator)
    weights_TK = torch.rand(tokens, K, generator=generator)
    return x, ids_TK, weights_TK


def run(layer, batch, function=None):
    x, ids_TK, weights_TK = batch
    x, weights_TK = x.clone().requires_grad_(), weights_TK.clone().requires_grad_()

    def call(x):
        return layer(x, topk_ids=ids_TK, topk_weights=weights_TK)

    out = call(x) if function is None else function(call, x)
    out.backward(torch.ones_like(out))
    return {"out": out.detach(), "dx": x.grad, "dw": weights_TK.grad}


def fp32_gradients(batch, **settings):
    """The unrounded gradients, which an FP32 parameter gets."""
    layer = make_layer(FP32, **settings)
    with torch.no_grad():
        for name, parameter in make_layer(BF16, **settings).named_parameters():
            layer.get_parameter(name).copy_(parameter)
    run(layer, batch)
    return {name: parameter.grad for name, parameter in weights_of(layer).items()}


@pytest.mark.parametrize("save", ["all", "none"])
def test_fp32_main_grad_is_the_unrounded_sum_of_all_micro_batches(save):
    layer = make_layer(save=save)
    attach(layer, fill=0.0, overwrite=False)
    expected = {name: torch.zeros(p.shape) for name, p in weights_of(layer).items()}
    for index in range(4):
        for parameter in layer.parameters():
            parameter.grad = None  # as the hook of Megatron's DDP leaves it
        run(layer, micro_batch(index))
        for name, gradient in fp32_gradients(micro_batch(index)).items():
            expected[name] += gradient
        for parameter in weights_of(layer).values():
            assert parameter.grad_added_to_main_grad is True
            assert (parameter.grad == 0).all()
            assert parameter.grad.dtype == BF16
    main_grads = {name: p.main_grad for name, p in weights_of(layer).items()}
    assert_bitwise_equal(main_grads, expected)


def test_the_first_micro_batch_overwrites_and_zeroes_idle_experts():
    layer = make_layer()
    attach(layer, fill=torch.nan)
    run(layer, micro_batch(0, high=2))
    expected = fp32_gradients(micro_batch(0, high=2))
    main_grads = {name: p.main_grad for name, p in weights_of(layer).items()}
    assert_bitwise_equal(main_grads, expected)
    assert (layer.experts.w_gate.main_grad[2:] == 0).all()


def test_idle_experts_are_left_alone_when_accumulating():
    layer = make_layer()
    attach(layer, fill=0.0, overwrite=False)
    layer.experts.w_up.main_grad[2:] = torch.nan
    run(layer, micro_batch(0, high=2))
    assert layer.experts.w_up.main_grad[2:].isnan().all()
    assert layer.experts.w_up.main_grad[:2].isfinite().all()


def test_bf16_main_grad_is_rounded_once_per_micro_batch():
    layer = make_layer()
    attach(layer, BF16, fill=0.0, overwrite=False)
    expected = {name: torch.zeros(p.shape, dtype=BF16) for name, p in weights_of(layer).items()}
    for index in range(2):
        run(layer, micro_batch(index))
        for name, gradient in fp32_gradients(micro_batch(index)).items():
            expected[name] = (expected[name].float() + gradient).to(BF16)
    assert_bitwise_equal({name: p.main_grad for name, p in weights_of(layer).items()}, expected)


def test_results_and_other_gradients_keep_their_bits():
    batch = micro_batch(0)
    plain, layer = make_layer(), make_layer()
    attach(layer)
    assert_bitwise_equal(run(layer, batch), run(plain, batch))
    for name, parameter in weights_of(layer).items():
        assert relative_error(parameter.main_grad, plain.get_parameter(name).grad) < 4e-3, name


def test_only_parameters_with_a_buffer_take_part():
    """One with main_grad, one frozen, one without the flag; and again, so that no sum is left."""
    batch = micro_batch(0)
    plain, layer = make_layer(), make_layer()
    run(plain, batch)
    attach(layer)
    layer.experts.w_up.requires_grad_(False)
    del layer.experts.w_down.grad_added_to_main_grad
    layer.shared.w_up.main_grad = None
    for _ in range(2):
        layer.zero_grad()
        run(layer, batch)
        assert layer.experts.w_up.grad is None
        assert layer.experts.w_up.main_grad.isnan().all()
        assert layer.experts.w_up.grad_added_to_main_grad is False
        assert layer.experts.w_down.main_grad.isnan().all()
        for name in ("experts.w_down", "shared.w_up"):
            assert torch.equal(layer.get_parameter(name).grad, plain.get_parameter(name).grad)
        expected = fp32_gradients(batch)["experts.w_gate"]
        assert torch.equal(layer.experts.w_gate.main_grad, expected)


def test_hooks_fire_once_per_micro_batch():
    layer = make_layer()
    attach(layer, fill=0.0, overwrite=False)
    fired = []

    def megatron_hook(parameter):
        fired.append(parameter)
        if parameter.grad is not None and not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    for parameter in weights_of(layer).values():
        parameter.register_post_accumulate_grad_hook(megatron_hook)
    for index in range(3):
        run(layer, micro_batch(index))
    assert len(fired) == 3 * len(weights_of(layer))
    total = sum(fp32_gradients(micro_batch(index))["shared.w_down"] for index in range(3))
    assert torch.equal(layer.shared.w_down.main_grad, total)


def test_get_main_grad_is_asked_at_the_backward():
    layer = make_layer()
    attach(layer)
    buffer = torch.zeros(E, I, H)
    asked = []
    layer.experts.w_gate.get_main_grad = lambda: asked.append(1) or buffer
    run(layer, micro_batch(0))
    assert asked
    assert torch.equal(buffer, fp32_gradients(micro_batch(0))["experts.w_gate"])


def test_checkpointing_adds_once():
    layer = make_layer()
    attach(layer, fill=0.0, overwrite=False)
    run(layer, micro_batch(0), lambda call, x: checkpoint(call, x, use_reentrant=False))
    main_grads = {name: p.main_grad for name, p in weights_of(layer).items()}
    assert_bitwise_equal(main_grads, fp32_gradients(micro_batch(0)))


@pytest.mark.parametrize("eager_before", [True, False])
def test_a_compiled_layer_returns_its_gradients_and_says_so(eager_before):
    """The hook then adds them: nothing is lost, nothing counted twice."""
    torch._dynamo.reset()
    layer = make_layer()
    attach(layer, fill=0.0, overwrite=False)
    if eager_before:
        run(layer, micro_batch(0))
        layer.zero_grad()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, ids_TK, weights_TK = micro_batch(1)
    compiled(x, topk_ids=ids_TK, topk_weights=weights_TK).sum().backward()
    expected = fp32_gradients(micro_batch(1))
    for name, parameter in weights_of(layer).items():
        assert parameter.grad_added_to_main_grad is False
        assert torch.equal(parameter.grad, expected[name].to(BF16)), name


def test_views_of_a_packed_parameter_return_ordinary_gradients():
    x, ids_TK, weights_TK = micro_batch(0)
    packed = torch.randn(E, 2 * I, H).to(BF16).requires_grad_()
    packed.main_grad = torch.full(packed.shape, torch.nan)
    packed.grad_added_to_main_grad = False
    w_down = torch.randn(E, H, I).to(BF16)
    mok.moe(x, ids_TK, weights_TK, packed[:, :I], packed[:, I:], w_down).sum().backward()
    assert packed.grad_added_to_main_grad is False
    assert packed.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("main_grad", "dtype"),
    [
        (torch.zeros(E, I, H + 8), BF16),
        (torch.zeros(E, H, I).transpose(1, 2), BF16),
        (torch.zeros(E, I, H, dtype=BF16), FP32),
        (torch.zeros(E, I, H, dtype=torch.float64), BF16),
    ],
)
def test_a_wrong_buffer_is_refused_in_forward(main_grad, dtype):
    layer = make_layer(dtype)
    attach(layer)
    layer.experts.w_gate.main_grad = main_grad
    x, ids_TK, weights_TK = micro_batch(0)
    with pytest.raises(ValueError, match=r"w_gate\.main_grad is .*: it must be contiguous"):
        layer(x, topk_ids=ids_TK, topk_weights=weights_TK)


def test_no_second_derivative():
    layer = make_layer()
    attach(layer)
    x, ids_TK, weights_TK = micro_batch(0)
    x.requires_grad_()
    out = layer(x, topk_ids=ids_TK, topk_weights=weights_TK)
    (dx,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        dx.sum().backward()
