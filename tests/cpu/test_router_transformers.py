"""Routers and losses against Hugging Face transformers' own implementations, in FP32."""

import pytest
import torch

from mok.router import (
    SigmoidTopKRouter,
    SoftmaxTopKRouter,
    TopKSoftmaxRouter,
    load_balancing_loss,
    z_loss,
)
from tests._numerics import relative_error

H, E, K, T = 32, 16, 4, 64


def compare(ours, theirs):
    """Same ids, weights and logits, and the same gradients of x and the parameters."""
    x_TH = torch.randn(T, H)
    scale_TE = torch.rand(T, E)
    results = []
    for router in (ours, theirs):
        x = x_TH.clone().requires_grad_()
        router.zero_grad()
        if router is ours:
            ids, weights, _, logits = router(x)
        else:
            logits, weights, ids = router(x)
        order = ids.argsort(1)  # theirs may leave the K unsorted
        ids, weights = ids.gather(1, order), weights.gather(1, order)
        ((weights * scale_TE.gather(1, ids)).sum() + logits.square().mean()).backward()
        grads = {name: parameter.grad for name, parameter in router.named_parameters()}
        results.append((ids, {"weights": weights, "logits": logits, "x": x.grad} | grads))
    (our_ids, our), (their_ids, their) = results
    assert torch.equal(our_ids, their_ids)
    assert set(our) == set(their)
    for name, value in our.items():
        assert relative_error(value.detach(), their[name].detach()) < 1e-5, name


def fill(theirs, ours, names):
    """Random parameters, equal in both; `names` maps theirs to ours."""
    with torch.no_grad():
        for their_name, our_name in names.items():
            tensor = getattr(theirs, their_name)
            tensor.copy_(torch.randn_like(tensor) / 4)
            getattr(ours, our_name).copy_(tensor)


def test_mixtral():
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter

    theirs = MixtralTopKRouter(
        MixtralConfig(hidden_size=H, num_local_experts=E, num_experts_per_tok=K)
    )
    ours = SoftmaxTopKRouter(H, E, K)
    fill(theirs, ours, {"weight": "weight"})
    compare(ours, theirs)


@pytest.mark.parametrize("normalize", [True, False])
def test_qwen3_moe(normalize):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import (
        Qwen3MoeConfig,
        Qwen3MoeTopKRouter,
    )

    config = Qwen3MoeConfig(
        hidden_size=H, num_experts=E, num_experts_per_tok=K, norm_topk_prob=normalize
    )
    theirs, ours = Qwen3MoeTopKRouter(config), SoftmaxTopKRouter(H, E, K, normalize=normalize)
    fill(theirs, ours, {"weight": "weight"})
    compare(ours, theirs)


def test_deepseek_v2():
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
        DeepseekV2Config,
        DeepseekV2TopkRouter,
    )

    config = DeepseekV2Config(
        hidden_size=H,
        n_routed_experts=E,
        num_experts_per_tok=K,
        routed_scaling_factor=1.5,
        topk_method="greedy",
    )
    theirs = DeepseekV2TopkRouter(config)
    ours = SoftmaxTopKRouter(H, E, K, normalize=False, scaling_factor=1.5)
    fill(theirs, ours, {"weight": "weight"})
    compare(ours, theirs)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("num_groups", "topk_groups"), [(1, 1), (4, 2), (8, 3)])
def test_deepseek_v3(num_groups, topk_groups, normalize):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Config,
        DeepseekV3TopkRouter,
    )

    config = DeepseekV3Config(
        hidden_size=H,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_group=num_groups,
        topk_group=topk_groups,
        routed_scaling_factor=2.5,
        norm_topk_prob=normalize,
    )
    theirs = DeepseekV3TopkRouter(config)
    ours = SigmoidTopKRouter(
        *(H, E, K),
        num_groups=num_groups,
        topk_groups=topk_groups,
        normalize=normalize,
        scaling_factor=2.5,
    )
    fill(theirs, ours, {"weight": "weight", "e_score_correction_bias": "expert_bias"})
    compare(ours, theirs)


def test_gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter

    theirs = GptOssTopKRouter(
        GptOssConfig(hidden_size=H, num_local_experts=E, num_experts_per_tok=K)
    )
    ours = TopKSoftmaxRouter(H, E, K, bias=True)
    fill(theirs, ours, {"weight": "weight", "bias": "bias"})
    compare(ours, theirs)


@pytest.mark.parametrize("masked", [True, False])
def test_load_balancing_loss(masked):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    output = SoftmaxTopKRouter(H, E, K)(torch.randn(T, H))
    mask_T = (torch.rand(T) < 0.7) if masked else None
    attention_mask = mask_T.reshape(2, T // 2).long() if masked else None
    theirs = load_balancing_loss_func((output.logits_TE,), E, K, attention_mask)
    torch.testing.assert_close(load_balancing_loss(output, mask_T), theirs)


def test_z_loss():
    from transformers.models.switch_transformers.modeling_switch_transformers import (
        router_z_loss_func,
    )

    output = SoftmaxTopKRouter(H, E, K)(torch.randn(T, H))
    theirs = router_z_loss_func(output.logits_TE.reshape(2, T // 2, E))
    torch.testing.assert_close(z_loss(output), theirs)
