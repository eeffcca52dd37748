"""Token-choice routing: routers, their losses, and recording and replaying of decisions.

    SoftmaxTopKRouter    softmax over all experts, then the K largest (Mixtral, Qwen3, DeepSeek-V2)
    SigmoidTopKRouter    sigmoid, a bias for balance, groups of experts (DeepSeek-V3)
    TopKSoftmaxRouter    the K largest logits, then a softmax over them (gpt-oss)

All run in FP32, choose the lowest expert id among equal scores, and give the same bits for the same
input. `mok.MoELayer(router=...)` takes an instance or a name.

Shapes: T tokens, K experts per token, E experts, H hidden.
"""

from mok.router._base import Router, RouterOutput, no_autocast
from mok.router._choice import top_k_lowest_first
from mok.router._kinds import SigmoidTopKRouter, SoftmaxTopKRouter, TopKSoftmaxRouter
from mok.router._losses import (
    expert_counts,
    load_balancing_loss,
    sequence_load_balancing_loss,
    z_loss,
)
from mok.router._replay import record_routing, replay_routing

__all__ = [
    "Router",
    "RouterOutput",
    "SigmoidTopKRouter",
    "SoftmaxTopKRouter",
    "TopKSoftmaxRouter",
    "expert_counts",
    "load_balancing_loss",
    "no_autocast",
    "record_routing",
    "replay_routing",
    "sequence_load_balancing_loss",
    "top_k_lowest_first",
    "z_loss",
]
