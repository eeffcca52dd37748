"""Tiny random models of Hugging Face transformers, one per family that mok converts."""

import torch

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def make_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A causal language model with weights large enough that experts differ."""
    import transformers

    torch.manual_seed(seed)
    model = _MODELS[family](transformers)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "experts" in name or "gate" in name or "router" in name:
                tensor.copy_(torch.randn_like(tensor) / 6)
    return model.to(dtype).eval()


def tokens(batch: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(seed))


def _mixtral(transformers):
    config = transformers.MixtralConfig(
        **SIZES, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


def _qwen3_moe(transformers):
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        intermediate_size=40,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _qwen2_moe(transformers):
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        intermediate_size=40,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=3,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def _deepseek_v3(transformers):
    config = transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 3},
        intermediate_size=40,
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _gpt_oss(transformers):
    config = transformers.GptOssConfig(
        **SIZES,
        head_dim=8,
        intermediate_size=24,
        num_local_experts=8,
        num_experts_per_tok=3,
    )
    config._attn_implementation = "eager"
    return transformers.GptOssForCausalLM(config)


_MODELS = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
}
FAMILIES = tuple(_MODELS)
