"""The explicit API: a workspace, a schedule, forward and backward as plain functions.

For frameworks that keep their own autograd and their own saved tensors. It has the call shapes of
Mixture-of-Kittens, so code written for its BF16 path runs with only its imports changed; what is
wider or different here stands in docs/functional.md.

    config = functional.MoKConfig(macrobatch_size=65536)
    workspace = functional.get_workspace(config, group, device=..., num_local_tokens=T, ...)
    schedule = functional.build_schedule(workspace, config, ids_TK, num_local_experts=E // R)
    out, context = functional.forward(config, workspace, schedule, x, weights_TK, *shared, *routed)
    gradients = functional.backward(config, workspace, schedule, context, dout, x, weights_TK, ...)

Nothing here is recorded by autograd. All ranks of the group make the same calls in the same order.

Shapes: T tokens of this rank, K experts per token, E experts in all R ranks, H hidden, I
intermediate, J the shared expert's intermediate size.
"""

import dataclasses
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mok import _functional_checks as _checks
from mok import workspace as _workspaces
from mok._schedule import BuiltSchedule as BuiltSchedule
from mok._schedule import build as _build_schedule
from mok._schedule import refuse as _refuse_schedule
from mok.reference import gated_activation
from mok.shapes import (
    ACTIVATIONS,
    PAD,
    SAVE_POLICIES,
    LayerSettings,
    LayerTensors,
    gradient_bits,
    local_parts,
    worst_case_rows,
)

_ROUTED = ("w_gate", "w_up", "w_down")
_SHARED = ("shared_gate", "shared_up", "shared_down")


@dataclasses.dataclass(frozen=True)
class MoKConfig:
    """Settings of a layer's calls, equal on all ranks.

    Attributes:
        macrobatch_size: rows of the ring, rounded up to a multiple of 128; more rows are processed
            in chunks. The only setting of Mixture-of-Kittens that means something here.
        save: what forward keeps in its context: "all" (x, gate, up), "gate_up" or "none"; the rest
            is computed again in backward, with the same bits.
        activation: "swiglu" or "gpt_oss".
        fwd_num_comm_sms, bwd_num_comm_sms: ignored; no SMs are set aside for communication.
        minibatch_size: ignored; readiness is tracked per block of rows.
        schedule_capacity_multiplier: ignored; the schedule always holds the worst case.
        all_gather_top_experts_chunk_bytes: ignored.
    """

    fwd_num_comm_sms: int = 40
    bwd_num_comm_sms: int = 28
    minibatch_size: int = 4096
    macrobatch_size: int = 131072
    schedule_capacity_multiplier: float = 0.5
    all_gather_top_experts_chunk_bytes: int = 2048
    save: str = "all"
    activation: str = "swiglu"

    def __post_init__(self):
        if not isinstance(self.macrobatch_size, int) or self.macrobatch_size < 1:
            raise ValueError(
                f"macrobatch_size is {self.macrobatch_size!r}: it must be a positive number of rows"
            )
        if self.save not in SAVE_POLICIES:
            raise ValueError(f"save is {self.save!r}: it must be one of {SAVE_POLICIES}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}: it must be one of {ACTIVATIONS}")


@dataclasses.dataclass(frozen=True)
class FunctionalWorkspace:
    """The memory between the ranks of a group, for calls of up to `num_local_tokens` tokens."""

    name: str
    num_ranks: int
    num_local_tokens: int
    hidden_size: int
    topk: int
    dtype: torch.dtype

    @property
    def workspace(self) -> _workspaces.Workspace:
        """The `mok.workspace.Workspace` behind it; raises WorkspaceClosedError once closed."""
        return _workspaces.get(self.name)

    def close(self, timeout_s: float | None = None) -> None:
        """`Workspace.close`: frees the memory, collectively."""
        _workspaces.close(self.name, timeout_s)


class ForwardContext(NamedTuple):
    """What backward needs of a forward: fixed shapes, whatever the routing.

    Rows are those of the first chunk, in the schedule's order: at most `macrobatch_size` of them.
    What `MoKConfig.save` does not keep has 0 rows.
    """

    x_routed: Tensor  # [rows, H]
    gate_routed: Tensor  # [rows, I]
    up_routed: Tensor  # [rows, I]
    gate_shared: Tensor  # [T, J]
    up_shared: Tensor  # [T, J]
    activation: str = "swiglu"
    swiglu_limit: float | None = None

    @property
    def hidden_routed(self) -> Tensor:
        """act(gate, up) [rows, I], computed when asked for: backward does not need it kept."""
        return self._hidden(self.gate_routed, self.up_routed)

    @property
    def hidden_shared(self) -> Tensor:
        """act(gate, up) of the shared expert [T, J], computed when asked for."""
        return self._hidden(self.gate_shared, self.up_shared)

    def _hidden(self, gate, up):
        hidden = gated_activation(gate.float(), up.float(), self.activation, self.swiglu_limit)
        return hidden.to(gate.dtype)


def create_workspace(
    config: MoKConfig,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | str,
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
    dtype: torch.dtype = torch.bfloat16,
) -> FunctionalWorkspace:
    """A new workspace, created by all ranks of `group` together (None: one rank by itself).

    `num_local_tokens` is the largest T any rank will pass, `dtype` that of x. Two workspaces let
    two micro-batches be in flight; calls in one are one after the other. Free it by `close()`.

    Raises:
        ValueError: for sizes that cannot be; SymmetricHeapError, PeerTimeoutError: see
            `mok.workspace.ensure`.
    """
    name = _workspaces.declare_new(
        group,
        max_tokens=num_local_tokens,
        hidden_size=hidden_size,
        top_k=topk,
        dtype=dtype,
        device=device,
    )
    num_ranks = _workspaces.ensure(name).num_ranks
    return FunctionalWorkspace(name, num_ranks, num_local_tokens, hidden_size, topk, dtype)


_cache: dict[tuple, FunctionalWorkspace] = {}


def get_workspace(
    config: MoKConfig,
    group: dist.ProcessGroup | None,
    *,
    device: torch.device | str,
    num_local_tokens: int,
    hidden_size: int,
    topk: int,
    dtype: torch.dtype = torch.bfloat16,
) -> FunctionalWorkspace:
    """`create_workspace` once per group, device and sizes; later calls return the same one."""
    sizes = {"num_local_tokens": num_local_tokens, "hidden_size": hidden_size, "topk": topk}
    # A process group, and no name of one: names of destroyed groups come again.
    key = (group, torch.device(device), *sizes.values(), dtype)
    found = _cache.get(key)
    if found is None or not _workspaces.is_open(found.name):
        found = create_workspace(config, group, device=device, dtype=dtype, **sizes)
        _cache[key] = found
    return found


def clear_workspace_cache(timeout_s: float | None = None) -> None:
    """Closes the workspaces of `get_workspace`, and forgets them.

    All ranks call it together: it waits for the peers, at most `timeout_s` for each workspace.
    """
    found = list(_cache.values())
    _cache.clear()
    for workspace in found:
        workspace.close(timeout_s)


def build_schedule(
    workspace: FunctionalWorkspace,
    config: MoKConfig,
    top_experts: Tensor,
    *,
    num_local_experts: int,
) -> BuiltSchedule:
    """Which rank and slot each row of this rank's experts comes from; a collective of all ranks.

    Args:
        top_experts: expert of each route [T, K], int32 or int64; -1 or an id >= E is no route.
            T may differ between ranks, 0 included.
        num_local_experts: E/R.

    Raises:
        ValueError, TypeError: for a shape, dtype or size that cannot be; the peers get a schedule
            without this rank's routes and raise PeerAbortedError with the reason in their forward.
    """
    try:
        _checks.check_routing(workspace, top_experts, num_local_experts)
    except Exception as error:
        if workspace.num_ranks > 1 and not torch.compiler.is_compiling():
            sizes = (workspace.num_ranks, workspace.num_local_tokens, workspace.topk)
            _refuse_schedule(workspace.name, *sizes)
            _workspaces.abort(workspace.name, str(error))
        raise
    return _build_schedule(
        top_experts.contiguous(),
        workspace.name,
        num_local_experts * workspace.num_ranks,
        workspace.num_ranks,
        workspace.num_local_tokens,
    )


def forward(
    config: MoKConfig,
    workspace: FunctionalWorkspace,
    schedule: BuiltSchedule,
    x: Tensor,
    router_weights: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_shared_down: Tensor | None,
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    w_routed_down: Tensor,
    swiglu_limit: float | None = None,
) -> tuple[Tensor, ForwardContext]:
    """The layer's output [T, H] and what `backward` needs.

    Args:
        x: [T, H] in the workspace's dtype.
        router_weights: FP32 [T, K].
        w_shared_gate, w_shared_up: [J, H], w_shared_down: [H, J]; all None is no shared expert.
        w_routed_gate, w_routed_up: this rank's [E/R, I, H], w_routed_down: [E/R, H, I].
        swiglu_limit: the clamps' limit, positive, or None.

    Raises:
        ValueError, TypeError: an argument does not fit; the peers raise PeerAbortedError.
        mok.PeerTimeoutError, mok.PeerAbortedError: a peer did not come, or left with an error.
    """
    shared = (w_shared_gate, w_shared_up, w_shared_down)
    routed = (w_routed_gate, w_routed_up, w_routed_down)
    _checks.check_call(workspace, {"x": x, "router_weights": router_weights}, shared, routed)
    tensors = _tensors(schedule, x, router_weights, shared, routed)
    settings = _settings(config, workspace, schedule, tensors, swiglu_limit)
    with torch.no_grad():
        out_TH, *saved = torch.ops.mok.moe_forward(*tensors.in_order(), *settings.in_order())
    return out_TH, ForwardContext(*saved, config.activation, swiglu_limit)


def recompute_forward_context(
    config: MoKConfig,
    workspace: FunctionalWorkspace,
    schedule: BuiltSchedule,
    x: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    swiglu_limit: float | None = None,
) -> ForwardContext:
    """The context of `forward` again, bitwise, without its output: for activation checkpointing."""

    def unread(weight):
        """A down projection of the right shape and no memory: recomputing does not read it."""
        if weight is None:
            return None
        *experts, width, hidden = weight.shape
        return weight.new_zeros(width).expand(*experts, hidden, width)

    _checks.check_call(
        workspace, {"x": x}, (w_shared_gate, w_shared_up), (w_routed_gate, w_routed_up)
    )
    (gate, up), (shared_gate, shared_up) = (
        local_parts(w_routed_gate, w_routed_up),
        local_parts(w_shared_gate, w_shared_up),
    )
    weights_TK = x.new_ones(schedule.top_experts.shape, dtype=torch.float32)
    shared = (shared_gate, shared_up, unread(shared_gate))
    tensors = _tensors(schedule, x, weights_TK, shared, (gate, up, unread(gate)))
    settings = _settings(config, workspace, schedule, tensors, swiglu_limit)
    with torch.no_grad():
        saved = torch.ops.mok.moe_recompute(*tensors.in_order(), *settings.in_order())
    return ForwardContext(*saved, config.activation, swiglu_limit)


def backward(
    config: MoKConfig,
    workspace: FunctionalWorkspace,
    schedule: BuiltSchedule,
    context: ForwardContext,
    d_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_shared_down: Tensor | None,
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    w_routed_down: Tensor,
    swiglu_limit: float | None = None,
) -> tuple[Tensor | None, ...]:
    """(d_x, d_router_weights, d_w_routed_gate, d_w_routed_up, d_w_routed_down, d_w_shared_gate,
    d_w_shared_up, d_w_shared_down), the last three None without a shared expert.

    The arguments are those of the `forward` whose context it is; `d_output` [T, H] has x's dtype.
    d_x has x's dtype, d_router_weights FP32, a weight's gradient the weight's dtype. Gradients of
    routed weights hold all ranks' tokens; those of the shared expert this rank's only.
    """
    shared = (w_shared_gate, w_shared_up, w_shared_down)
    routed = (w_routed_gate, w_routed_up, w_routed_down)
    given = {"x": x, "router_weights": router_weights, "d_output": d_output}
    made_with = {"activation": config.activation, "swiglu_limit": swiglu_limit}
    _checks.check_call(workspace, given, shared, routed, context, made_with)
    tensors = _tensors(schedule, x, router_weights, shared, routed)
    settings = _settings(config, workspace, schedule, tensors, swiglu_limit)
    with torch.no_grad():
        results = torch.ops.mok.moe_backward(
            d_output.contiguous(), *tensors.in_order(), list(context[:5]), *settings.in_order()
        )
    d_x, d_weights, _, *d_routed = results[:6]
    d_shared = results[9:] if tensors.shared_gate is not None else (None, None, None)
    return (d_x, d_weights, *d_routed, *d_shared)


def _tensors(schedule, x, router_weights, shared, routed) -> LayerTensors:
    return LayerTensors(
        x.contiguous(),
        schedule.top_experts,
        router_weights.float().contiguous(),
        *local_parts(*routed),
        **dict(zip(_SHARED, local_parts(*shared), strict=True)),
    )


def _settings(config, workspace, schedule, tensors, swiglu_limit) -> LayerSettings:
    wanted = {"x", "topk_weights", *_ROUTED}
    if tensors.shared_gate is not None:
        wanted |= set(_SHARED)
    num_ranks, max_tokens = workspace.num_ranks, workspace.num_local_tokens
    worst = worst_case_rows(num_ranks, schedule.num_experts, workspace.topk, max_tokens)
    ring_rows = -(-config.macrobatch_size // PAD) * PAD
    return LayerSettings(
        workspace.name,
        schedule.num_experts,
        max_tokens,
        max(min(ring_rows, worst), PAD),
        config.activation,
        None if swiglu_limit is None else float(swiglu_limit),
        config.save,
        gradient_bits(wanted),
    )
