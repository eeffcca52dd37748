"""`torch.ops.mok.*` and `mok.moe`, the differentiable function made of them.

    moe_forward    -> out, x_rows, gate, up, shared_gate, shared_up   (functional, autograd, fake)
    moe_backward   -> one gradient per `mok.shapes.GRADIENT_ORDER`    (functional, fake)
    moe_recompute  -> x_rows, gate, up, shared_gate, shared_up        (functional, fake)
    moe_forward_out, moe_backward_out, moe_recompute_out              (raw, into given tensors)

The functional ops allocate their results by the shape functions of `mok.shapes` and call the raw
ones. A workspace enters by its name: schemas hold no handles and no process groups. Every rank of
the workspace's group must make the same calls in the same order.

Legend: T tokens of this rank, K experts per token, E experts in all R ranks, H hidden, I
intermediate, J the shared expert's intermediate size.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from mok import _backend, _calls, _checks, _collective, _group, _library, _main_grad, workspace
from mok.shapes import (
    COMPUTE_DTYPES,
    PAD,
    LayerSettings,
    LayerTensors,
    check_activation,
    check_settings,
    check_sizes,
    check_weights,
    default_ring_rows,
    local_parts,
)

_REQUIRED = ("x", "topk_ids", "topk_weights", "w_gate", "w_up", "w_down")


def moe(
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    b_gate: Tensor | None = None,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    shared: tuple[Tensor, Tensor, Tensor] | None = None,
    shared_weight_T: Tensor | None = None,
    activation: str = "swiglu",
    swiglu_limit: float | None = None,
    group: dist.ProcessGroup | None = None,
    max_tokens: int | None = None,
    save: str = "gate_up",
    ring_rows: int | None = None,
    backend: str = "auto",
    layer_key: str | None = None,
    workspace_tag: str = "",
) -> Tensor:
    """A whole expert-parallel MoE layer: out_t = w_s shared(x_t) + sum_k w_tk expert_{id_tk}(x_t).

    An expert is down(act(gate(x), up(x))). Differentiable in x, topk_weights, shared_weight_T and
    every weight and bias; bitwise deterministic; a token's result does not depend on the other
    tokens, on R, on `ring_rows` or on `save`. All ranks of `group` must call it in the same order.
    Parameters with a `main_grad` take part in Megatron's protocol (`mok._main_grad`).

    Args:
        x_TH: this rank's tokens [T, H], BF16 or FP32 (the compute dtype), T = 0 included.
        topk_ids_TK: expert of each route [T, K], int32 or int64; -1 or >= E is no route.
        topk_weights_TK: its weight [T, K], any floating dtype (used in FP32).
        w_gate, w_up: this rank's experts [E/R, I, H]; expert e lives on rank e // (E/R). BF16, or
            FP32: cast per call, with unrounded FP32 gradients. Any view whose last dimension is
            contiguous; DTensors by their local part. H and I are multiples of 8.
        w_down: [E/R, H, I].
        b_gate, b_up: biases [E/R, I]. b_down: [E/R, H].
        shared: a shared expert's (gate [J, H], up [J, H], down [H, J]).
        shared_weight_T: its weight per token [T]; None is 1.
        activation: "swiglu": silu(g) u, clamped where swiglu_limit is given; "gpt_oss":
            g sigmoid(1.702 g) (u + 1) with clamps at swiglu_limit (7).
        group: the expert-parallel process group; None is one rank.
        max_tokens: the largest T any rank will pass. None: with one rank no limit; with a group the
            largest T of the first call with these sizes, by one collective.
        save: what forward keeps for backward: "all" (dispatched x, gate, up), "gate_up", "none".
        ring_rows: rows of the ring, rounded up to a multiple of 128; more rows are processed in
            chunks. None is 1.25 max_tokens K plus 128 per local expert, at most the worst case.
        backend: "auto", "megakernel", "cpu" or "collective": `mok.explain` says which one is taken
            and why. The promises of bits above are those of "cpu" and "megakernel".
        layer_key: who calls. A caller with a key stays with the workspaces of its first calls, and
            raises WorkspaceClosedError once they are closed; without one, closed workspaces are
            replaced by new ones.
        workspace_tag: equal on all ranks; calls with different tags use different workspaces, so
            that two micro-batches can be in flight.

    Returns:
        out [T, H] in x's dtype.

    Raises:
        ValueError, TypeError: an argument does not fit; the peers raise PeerAbortedError with the
            reason. NotImplementedError: a backend that this build lacks for these tensors.
        mok.PeerTimeoutError, mok.PeerAbortedError: a peer did not come, or left with an error.
    """
    w_gate, w_up, w_down, *biases = local_parts(w_gate, w_up, w_down, b_gate, b_up, b_down)
    is_set = isinstance(shared, (tuple, list)) and len(shared) == 3
    gates = local_parts(*shared) if is_set else (None, None, None)
    gradients = 0
    if torch.is_grad_enabled():
        differentiable = (x_TH, topk_weights_TK, shared_weight_T, w_gate, w_up, w_down)
        for bit, tensor in enumerate((*differentiable, *biases, *gates)):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                gradients |= 1 << bit
    settings = key = None
    if not torch.compiler.is_compiling():
        key = _calls.key_of(
            *(x_TH, topk_ids_TK, topk_weights_TK, w_gate, shared, shared_weight_T),
            *(activation, swiglu_limit, group, max_tokens, save, ring_rows, backend),
            *(layer_key, workspace_tag, gradients, type(w_up), type(w_down)),
        )
        settings = _calls.settings_of(key, group)
    is_collective = False
    if settings is None:
        given = (x_TH, topk_ids_TK, topk_weights_TK, w_gate, w_up, w_down, *biases, *gates)
        options = (backend, max_tokens, workspace_tag, gradients)
        _check_tensors(group, LayerTensors(*given, shared_weight_T), shared, options)
        settings, is_collective = _settings(
            *(x_TH, topk_ids_TK, topk_weights_TK, w_gate, shared, shared_weight_T),
            *(activation, swiglu_limit, group, max_tokens, save, ring_rows, backend),
            *(layer_key, workspace_tag, gradients),
        )
        if key is not None and not is_collective:
            _calls.remember(key, group, settings)
    if x_TH.is_cuda and not torch.compiler.is_compiling():
        # Before any CUDA call: what has ended the workspace says more than a lost context does.
        workspace.check_if_open(settings.workspace)
    if topk_weights_TK.dtype != torch.float32:
        topk_weights_TK = topk_weights_TK.float()
    tensors = LayerTensors(
        x_TH,
        topk_ids_TK.contiguous(),
        topk_weights_TK.contiguous(),
        w_gate,
        w_up,
        w_down,
        *biases,
        *gates,
        None if shared_weight_T is None else shared_weight_T.float().contiguous(),
    )
    participants = _main_grad.participants(tensors, gradients) if gradients else {}
    if is_collective:
        return _run_collectively(tensors, settings, _peers(group), participants)
    if torch.compiler.is_compiling():
        _main_grad.use_ordinary_gradients(participants)
        return torch.ops.mok.moe_forward(*tensors, *settings)[0]
    try:
        if participants:
            return _main_grad.forward(tensors, settings, participants)
        return _library.forward(tensors, settings)
    except RuntimeError:
        # torch's own words for what is no tensor are five lines; `_calls` does not look at all.
        _check_tensors(group, tensors, shared, workspace_name=settings.workspace)
        raise


def _check_tensors(
    group,
    tensors: LayerTensors,
    shared: tuple | None,
    options: tuple | None = None,
    workspace_name: str | None = None,
) -> None:
    """Raises TypeError for an argument that is no tensor; the peers are told where they wait: in
    the workspace, if it is known, or else in that of a call with these `options`."""
    try:
        named = tensors._asdict()
        _checks.check_tensors({name: named.pop(name) for name in _REQUIRED})
        _checks.check_tensors(named, optional=True)
        if not (shared is None or isinstance(shared, (tuple, list))):
            kind = _checks.kind_of(shared)
            raise TypeError(f"shared is {kind}: it must be (gate, up, down) or None")
    except TypeError as error:
        peers = _peers(group) if isinstance(group, dist.ProcessGroup) else None
        if peers is not None and not torch.compiler.is_compiling():
            _tell_peers_of_no_tensor(peers, tensors, options, workspace_name, str(error))
        raise


def _tell_peers_of_no_tensor(group, tensors, options, workspace_name, reason: str) -> None:
    x_TH, topk_ids_TK, w_gate = sizes = (tensors.x, tensors.topk_ids, tensors.w_gate)
    if workspace_name is not None:
        workspace.abort(workspace_name, reason)
    elif options is None or not all(isinstance(each, Tensor) for each in sizes):
        _group.abort_only_workspace(group.group_name, reason)  # which call it is, is not known
    else:
        backend, max_tokens, tag, gradients = options
        call = {"dtype": x_TH.dtype, "needs_gradients": gradients != 0}
        try:
            chosen = _backend.choose(backend, x_TH.device.type, group.group_name, **call).backend
        except NotImplementedError:  # of two errors, the first that was found is raised
            chosen = backend
        is_collective = chosen == "collective"
        call = (x_TH, topk_ids_TK, w_gate, max_tokens, tag)
        _tell_peers(group, is_collective, *call, reason)


def _settings(
    x_TH: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    w_gate: Tensor,
    shared: tuple | None,
    shared_weight_T: Tensor | None,
    activation: str,
    swiglu_limit: float | None,
    group: dist.ProcessGroup | None,
    max_tokens: int | None,
    save: str,
    ring_rows: int | None,
    backend: str,
    layer_key: str | None,
    tag: str,
    gradients: int,
) -> tuple[LayerSettings, bool]:
    """The settings of a call, once its arguments are checked; whether it is a collective call."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}: it must be a process group or None (one rank).")
    group = _peers(group)
    num_ranks = 1 if group is None else dist.get_world_size(group)
    device_type, group_name = x_TH.device.type, None if group is None else group.group_name
    if group_name is not None:
        _backend.forget_destroyed(group_name)
    is_collective = False
    needs_gradients = gradients != 0
    try:
        check_settings(max_tokens, save, ring_rows, shared, backend)
        check_activation(activation, swiglu_limit)
        choice = {"dtype": x_TH.dtype, "needs_gradients": needs_gradients}
        chosen = _backend.choose(backend, device_type, group_name, **choice)
        is_collective = chosen.backend == "collective"
        check_sizes(x_TH, topk_ids_TK, w_gate)
        check_weights("topk_weights", topk_weights_TK)
        check_weights("shared_weight_T", shared_weight_T)
    except Exception as error:
        if group is not None and not torch.compiler.is_compiling():
            call = (x_TH, topk_ids_TK, w_gate, max_tokens, tag)
            _tell_peers(group, is_collective, *call, str(error))
        raise
    num_experts = w_gate.shape[0] * num_ranks
    hidden, top_k = x_TH.shape[-1], topk_ids_TK.shape[-1]
    if group is None:
        max_tokens = x_TH.shape[0] if max_tokens is None else max_tokens
    elif max_tokens is None:
        max_tokens = _agreed_max_tokens(group, x_TH, hidden, top_k)
    name = ""
    device = None if device_type == "meta" else x_TH.device
    if not is_collective and group is None:
        name = _local_workspace(device, tag)
    elif not is_collective:
        sizes = (max_tokens, hidden, top_k, x_TH.dtype, device)
        name = _declare(layer_key, group_name, *sizes, tag)
    is_collective = _backend.runs_collectively(
        backend, device_type, group_name, name, x_TH.dtype, needs_gradients
    )
    if ring_rows is None:
        ring_rows = default_ring_rows(num_ranks, num_experts, top_k, max_tokens)
    else:
        ring_rows = -(-ring_rows // PAD) * PAD
    settings = LayerSettings(
        name,
        num_experts,
        max_tokens,
        ring_rows,
        activation,
        None if swiglu_limit is None else float(swiglu_limit),
        save if needs_gradients else "none",
        gradients,
    )
    return settings, is_collective


def _peers(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """One rank has none."""
    return None if group is None or dist.get_world_size(group) == 1 else group


# Its numbers of rows are not known while Dynamo traces.
_run_collectively = _group.run_eagerly(_collective.forward)


@_group.run_at_trace_time
def _local_workspace(device: torch.device | None = None, tag: str = "") -> str:
    """One rank needs scratch only: one workspace of a device serves calls of all sizes."""
    dtype = torch.float32 if device is None or device.type == "cpu" else torch.bfloat16
    return workspace.declare(
        None, max_tokens=0, hidden_size=1, top_k=1, dtype=dtype, device=device, tag=tag
    )


_names_of_layers: dict[tuple, str] = {}


@_group.run_at_trace_time
def _declare(
    layer_key: str | None,
    group_name: str,
    max_tokens: int,
    hidden: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device | None,
    tag: str,
) -> str:
    key = (layer_key, group_name, max_tokens, hidden, top_k, dtype, device, tag)
    name = _names_of_layers.get(key)
    if name is None:
        group = _group.resolve_group(group_name)
        sizes = {"max_tokens": max_tokens, "hidden_size": hidden, "top_k": top_k}
        name = workspace.declare(group, **sizes, dtype=dtype, device=device, tag=tag)
        if layer_key is not None:
            _names_of_layers[key] = name
    return name


def _agreed_max_tokens(group: dist.ProcessGroup, x_TH: Tensor, hidden: int, top_k: int) -> int:
    """What the first call of these sizes over this group agreed on."""
    key = _sizes_key(group, hidden, top_k)
    if _group.agreed_max_tokens(key) is None:
        if torch.compiler.is_compiling():
            _group.agree_at_trace_time(key, group.group_name, x_TH)
        else:
            _group.agree_max_tokens(key, group.group_name, x_TH.shape[0])
    return _group.agreed_max_tokens(key)


def _sizes_key(group: dist.ProcessGroup, hidden: int, top_k: int) -> str:
    return f"moe/{group.group_name}/H{hidden}/K{top_k}"


def _tell_peers(
    group, is_collective: bool, x_TH, topk_ids_TK, w_gate, max_tokens, tag: str, reason: str
) -> None:
    """Ends the peers' call, wherever they wait in it: this rank cannot make it."""
    valid = isinstance(max_tokens, int | None) and (max_tokens is None or max_tokens >= 0)
    if not valid or topk_ids_TK.dim() != 2 or w_gate.dim() != 3:
        _group.abort_only_workspace(group.group_name, reason)  # which call it is, is not known
        return
    hidden, top_k = w_gate.shape[-1], topk_ids_TK.shape[-1]
    if max_tokens is None:
        key = _sizes_key(group, hidden, top_k)
        max_tokens = _group.agreed_max_tokens(key)
        if max_tokens is None:
            _group.agree_max_tokens(key, group.group_name, 0, reason)
            return
    if is_collective:
        _collective.tell_peers(group, x_TH.device, reason)
        return
    dtype = x_TH.dtype if x_TH.dtype in COMPUTE_DTYPES else None
    _group.abort_call(group.group_name, max_tokens, hidden, top_k, dtype, x_TH.device, tag, reason)
