"""`mok.swap_moe_layers`: transformers' tiny random models keep their logits and gradients."""

import copy

import pytest
import torch

import mok
from tests._numerics import relative_error
from tests.cpu._hugging_face import FAMILIES, make_model, tokens


def their_gradient(block, family, name):
    """The gradient of their block, under our name."""
    grads = {n: p.grad for n, p in block.named_parameters()}
    grads |= {n: torch.zeros_like(b) for n, b in block.named_buffers()}
    return mok.convert.from_transformers(grads, family)[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_stay(family):
    theirs = make_model(family)
    ours = copy.deepcopy(theirs)
    names = mok.swap_moe_layers(ours, save="none")
    moe_layers = theirs.config.num_hidden_layers - (family == "deepseek_v3")
    assert len(names) == moe_layers
    assert all(type(ours.get_submodule(name)).__name__.startswith("MoELayer") for name in names)
    x = tokens()
    logits = {}
    for kind, model in (("ours", ours), ("theirs", theirs)):
        output = model(x, labels=x)
        output.loss.backward()
        logits[kind] = output.logits.detach()
    assert relative_error(logits["ours"], logits["theirs"]) < 1e-5
    for name in names:
        layer, block = ours.get_submodule(name), theirs.get_submodule(name)
        for key, parameter in layer.named_parameters():
            expected = their_gradient(block, family, key)
            assert relative_error(parameter.grad, expected) < 1e-3, (name, key)
    rest = {n: p for n, p in ours.named_parameters() if not n.startswith(tuple(names))}
    for name, parameter in rest.items():
        assert relative_error(parameter.grad, theirs.get_parameter(name).grad) < 1e-3, name


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_are_as_near_to_fp32_as_theirs(family):
    """Where both choose the same experts; routing is replayed from the FP32 model."""
    exact = make_model(family)
    mok.swap_moe_layers(exact)
    theirs = make_model(family, torch.bfloat16)
    ours = copy.deepcopy(theirs)
    mok.swap_moe_layers(ours)
    x = tokens()
    with torch.no_grad(), mok.router.record_routing(exact) as routing:
        expected = exact(x).logits
    with torch.no_grad():
        plain = theirs(x).logits
        with mok.router.replay_routing(ours, routing):
            logits = ours(x).logits
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits, expected) < 2 * relative_error(plain, expected)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_generation_runs_with_a_cache(family):
    theirs = make_model(family)
    ours = copy.deepcopy(theirs)
    mok.swap_moe_layers(ours)
    x = tokens(1, 5)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(x, **options), theirs.generate(x, **options))


def test_dtypes_frozen_parameters_and_mode_stay():
    model = make_model("deepseek_v3", torch.bfloat16).train()
    block = model.model.layers[1].mlp
    block.experts.requires_grad_(False)
    block.shared_experts.up_proj.requires_grad_(False)
    mok.swap_moe_layers(model)
    layer = model.model.layers[1].mlp
    assert layer.training
    frozen = {name for name, p in layer.named_parameters() if not p.requires_grad}
    assert frozen == {"experts.w_gate", "experts.w_up", "experts.w_down", "shared.w_up"}
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert layer.router.expert_bias.dtype == torch.float32
    assert all(p.is_contiguous() for p in layer.parameters())
    assert all(p.requires_grad for p in model.model.layers[2].mlp.parameters())


def test_settings_reach_the_layers():
    model = make_model("qwen3_moe")
    mok.swap_moe_layers(model, save="all", ring_rows=256)
    assert {(m.save, m.ring_rows) for m in model.modules() if isinstance(m, mok.MoELayer)} == {
        ("all", 256)
    }


def test_what_mok_does_not_compute_is_refused_and_nothing_replaced():
    model = make_model("mixtral")
    model.model.layers[1].mlp.jitter_noise = 0.1
    with pytest.raises(ValueError, match=r"model.layers.1.mlp: router_jitter_noise is 0.1"):
        mok.swap_moe_layers(model)
    assert not any(isinstance(module, mok.MoELayer) for module in model.modules())
    model = make_model("qwen3_moe")
    model.model.layers[0].mlp.experts.act_fn = torch.nn.GELU()
    with pytest.raises(ValueError, match="the experts' activation is GELU"):
        mok.swap_moe_layers(model)
    model = make_model("gpt_oss")
    model.model.layers[0].mlp.experts.alpha = 1.5
    with pytest.raises(ValueError, match=r"swiglu_alpha is 1.5"):
        mok.swap_moe_layers(model)
    model = make_model("mixtral")
    model.config.output_router_logits = True
    with pytest.raises(ValueError, match=r"config.output_router_logits is True"):
        mok.swap_moe_layers(model)
    with pytest.raises(ValueError, match="no MoE block that mok knows: these are DeepseekV3MoE"):
        mok.swap_moe_layers(torch.nn.Linear(2, 2))
