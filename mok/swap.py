"""`swap_moe_layers`: a Hugging Face model's MoE blocks replaced by `mok.MoELayer`, in place.

No import of transformers: blocks are known by the names of their classes.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from mok import convert
from mok.layer import MoELayer
from mok.router import Router, SigmoidTopKRouter, SoftmaxTopKRouter, TopKSoftmaxRouter


class MoELayerWithScores(MoELayer):
    """Returns (out, routing weights [T, K]), as the block of gpt-oss does."""

    def forward(self, x, **options):
        out, routing = super().forward(x, return_router_output=True, **options)
        return out, routing.topk_weights_TK


def swap_moe_layers(
    model: nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    **settings,
) -> list[str]:
    """Replaces the MoE blocks of a transformers model by `mok.MoELayer`s with the same weights.

    The results are those of the blocks, up to rounding: routers compute in FP32 here, so that a
    BF16 model may choose other experts for a few tokens. Weights are copied block by block, and a
    block's own are freed before the next is copied; with a group each rank keeps its share of the
    experts. Parameter names become mok's (`mok.convert` goes back); dtypes, devices and
    requires_grad stay. What transformers records of its own routers (output_router_logits, its
    auxiliary loss) is not there any more; `mok.router` has the losses.

    Args:
        model: with blocks of Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V3 or gpt-oss.
        group: the expert-parallel process group; None is one rank.
        settings: of `mok.MoELayer`: max_tokens, save, ring_rows, backend.

    Returns:
        The names of the replaced blocks.

    Raises:
        ValueError: if there is none, one computes what mok does not (another activation, router
            noise), or config.output_router_logits is set; nothing was replaced then.
    """
    found = [
        (name, module) for name, module in model.named_modules() if type(module).__name__ in _BLOCKS
    ]
    if not found:
        raise ValueError(
            f"the model has no MoE block that mok knows: these are {', '.join(sorted(_BLOCKS))}"
        )
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        raise ValueError(
            "config.output_router_logits is True, but transformers cannot record mok's routers: "
            "set it to False and add mok.router.load_balancing_loss to the loss yourself"
        )
    described = []
    for name, block in found:
        try:
            described.append(_BLOCKS[type(block).__name__](block))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for (name, _), (family, sizes, router) in zip(found, described, strict=True):
        parent, _, attribute = name.rpartition(".")
        parent = model.get_submodule(parent)
        layer = _convert(getattr(parent, attribute), family, sizes, router, group, settings)
        setattr(parent, attribute, layer)
    return [name for name, _ in found]


def _convert(block, family, sizes, make_router, group, settings) -> MoELayer:
    # Not detached: what is made of a parameter that trains, trains.
    state = dict(block.named_parameters()) | dict(block.named_buffers())
    state = convert.from_transformers(state, family)
    num_experts, intermediate, hidden = state["experts.w_gate"].shape
    router = make_router(hidden, num_experts, device="meta")
    if "shared.w_gate" in state:
        sizes = sizes | {"shared_intermediate_size": state["shared.w_gate"].shape[0]}
    kind = MoELayerWithScores if family == "gpt_oss" else MoELayer
    layer = kind(
        hidden,
        intermediate,
        num_experts,
        router.top_k,
        shared_gate="shared_gate.weight" in state,
        bias="experts.b_gate" in state,
        router=router,
        group=group,
        dtype=state["experts.w_gate"].dtype,
        device="meta",
        **sizes,
        **settings,
    )
    experts = layer.experts
    share = convert.slice_experts(state, experts.first_expert, experts.num_experts)
    if "router.expert_bias" in share:
        share["router.expert_bias"] = share["router.expert_bias"].float()
    # Copies, so that no view keeps all of the block's weights alive.
    copies = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in share.items()
    }
    layer.load_state_dict(copies, assign=True)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(share[name].requires_grad)
    experts.mark()
    return layer.train(block.training)


def _check_silu(module) -> None:
    activation = type(getattr(module, "act_fn", None)).__name__
    if activation not in ("SiLUActivation", "SiLU"):
        raise ValueError(f"the experts' activation is {activation}: mok has SwiGLU (silu) only")


_Described = tuple[str, dict, Callable[..., Router]]


def _mixtral(block) -> _Described:
    _check_silu(block.experts)
    if getattr(block, "jitter_noise", 0):
        raise ValueError(
            f"router_jitter_noise is {block.jitter_noise}: mok has no router noise, so set it to 0"
        )

    def router(hidden, num_experts, **where):
        return SoftmaxTopKRouter(hidden, num_experts, block.gate.top_k, **where)

    return "mixtral", {}, router


def _qwen(family: str) -> Callable[[nn.Module], _Described]:
    def describe(block):
        _check_silu(block.experts)

        def router(hidden, num_experts, **where):
            gate = block.gate
            return SoftmaxTopKRouter(
                hidden, num_experts, gate.top_k, normalize=gate.norm_topk_prob, **where
            )

        return family, {}, router

    return describe


def _deepseek_v3(block) -> _Described:
    _check_silu(block.experts)

    def router(hidden, num_experts, **where):
        gate = block.gate
        return SigmoidTopKRouter(
            hidden,
            num_experts,
            gate.top_k,
            num_groups=gate.num_group,
            topk_groups=gate.topk_group,
            normalize=gate.norm_topk_prob,
            scaling_factor=gate.routed_scaling_factor,
            **where,
        )

    return "deepseek_v3", {}, router


def _gpt_oss(block) -> _Described:
    alpha = block.experts.alpha
    if abs(alpha - 1.702) > 1e-6:
        raise ValueError(f"swiglu_alpha is {alpha}: mok's gpt-oss activation has 1.702")

    def router(hidden, num_experts, **where):
        return TopKSoftmaxRouter(hidden, num_experts, block.router.top_k, bias=True, **where)

    return "gpt_oss", {"activation": "gpt_oss", "swiglu_limit": block.experts.limit}, router


_BLOCKS: dict[str, Callable[[nn.Module], _Described]] = {
    "MixtralSparseMoeBlock": _mixtral,
    "Qwen2MoeSparseMoeBlock": _qwen("qwen2_moe"),
    "Qwen3MoeSparseMoeBlock": _qwen("qwen3_moe"),
    "DeepseekV3MoE": _deepseek_v3,
    "GptOssMLP": _gpt_oss,
}
