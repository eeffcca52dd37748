"""`mok.MoELayer`: router, experts and the fused expert-parallel call as one `nn.Module`.

Shapes: T tokens of this rank, K experts per token, E experts in all R ranks, H hidden, I
intermediate, J the shared expert's intermediate size.
"""

import uuid

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mok import _backend, _collective, _group
from mok._checks import check_choice, check_size, check_tensors, compute_dtype, size_and_rank
from mok._contract import activation_limit
from mok.experts import Experts, SharedExpert, SharedExpertGate
from mok.router import (
    Router,
    RouterOutput,
    SigmoidTopKRouter,
    SoftmaxTopKRouter,
    TopKSoftmaxRouter,
)
from mok.shapes import BACKENDS, COMPUTE_DTYPES, SAVE_POLICIES

ROUTERS = {
    "softmax": SoftmaxTopKRouter,
    "sigmoid": SigmoidTopKRouter,
    "topk_softmax": TopKSoftmaxRouter,
}


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer for training, expert-parallel over the ranks of `group`.

    out_t = w_s shared(x_t) + sum_k w_tk expert_{id_tk}(x_t), an expert being
    down(silu(gate(x)) * up(x)). Each rank of the group holds E/R experts, calls the layer with its
    own tokens (any number, 0 included) and gets their outputs. Bitwise deterministic.

    The compute dtype is that of x: BF16 x runs in BF16 with FP32 accumulation, FP32 x in FP32.
    Under `torch.autocast` x is cast to the autocast dtype. Parameters are FP32 or BF16; FP32 ones
    are cast per call and get unrounded FP32 gradients. The router and the shared expert's gate
    always run in FP32.

    Parameters: `router.weight`, `experts.w_gate|w_up|w_down|b_gate|b_up|b_down`,
    `shared.w_gate|w_up|w_down`, `shared_gate.weight`. Expert parameters differ between ranks and
    already hold the gradient of all ranks' tokens; the others hold that of this rank's tokens.
    `mok.average_gradients` makes a mean of both (docs/training.md has DDP and FSDP2).

    The module holds settings and names only. The memory between ranks belongs to the group's
    workspace (`mok.workspace`), so `.to()`, deepcopy, pickling and state_dict leave it alone.

    Args:
        hidden_size: H, a multiple of 8.
        intermediate_size: I, a multiple of 8.
        num_experts: E in all ranks, a multiple of R.
        top_k: K, at most E.
        shared_intermediate_size: J of a shared expert, a multiple of 8; None is no shared expert.
        shared_gate: weigh the shared expert by sigmoid(linear(x)).
        bias: expert biases b_gate, b_up [E/R, I], b_down [E/R, H].
        router: "softmax", "sigmoid" (DeepSeek-V3), "topk_softmax" (gpt-oss), a `mok.router.Router`
            with settings of its own, or None where every call brings topk_ids and topk_weights.
        activation: "swiglu" or "gpt_oss".
        swiglu_limit: the clamps' limit; None is none for "swiglu" and 7 for "gpt_oss".
        group: the expert-parallel process group; None is one rank.
        max_tokens: the largest T of any rank. None takes the largest T of the first call, by one
            collective; with one rank it is no limit. A later larger T raises on all ranks.
        save: what forward keeps for backward: "all", "gate_up" or "none" (recompute).
        ring_rows: rows of the ring buffer; None is 1.25 max_tokens K plus one pad per local expert.
        backend: "auto", "megakernel", "cpu" or "collective".
        dtype, device: of the parameters, as in torch.nn.
        normalize_topk: for router="softmax" and "sigmoid": divide each token's K weights by their
            sum (as Mixtral does).

    Raises:
        ValueError, TypeError: in one sentence, for a setting that cannot work.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared_intermediate_size: int | None = None,
        shared_gate: bool = False,
        bias: bool = False,
        router: str | Router | None = "softmax",
        activation: str = "swiglu",
        swiglu_limit: float | None = None,
        group: dist.ProcessGroup | None = None,
        max_tokens: int | None = None,
        save: str = "gate_up",
        ring_rows: int | None = None,
        backend: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        normalize_topk: bool = True,
    ):
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        num_ranks, rank = (1, 0) if group is None else size_and_rank(group)
        check_size("hidden_size", hidden_size, multiple_of=8)
        check_size("intermediate_size", intermediate_size, multiple_of=8)
        check_size("num_experts", num_experts)
        check_size("top_k", top_k)
        if shared_intermediate_size is not None:
            check_size("shared_intermediate_size", shared_intermediate_size, multiple_of=8)
        if max_tokens is not None:
            check_size("max_tokens", max_tokens)
        if ring_rows is not None:
            check_size("ring_rows", ring_rows)
        if num_experts % num_ranks:
            raise ValueError(
                f"num_experts is {num_experts}: it must be a multiple of the group's {num_ranks} "
                "ranks, because every rank holds equally many experts"
            )
        if top_k > num_experts:
            raise ValueError(f"top_k is {top_k}: it must be at most num_experts ({num_experts})")
        if shared_gate and shared_intermediate_size is None:
            raise ValueError(
                "shared_gate is True without a shared expert: pass shared_intermediate_size too"
            )
        if not isinstance(router, Router):
            check_choice("router", router, (*ROUTERS, None))
        elif (router.hidden_size, router.num_experts, router.top_k) != (
            hidden_size,
            num_experts,
            top_k,
        ):
            raise ValueError(
                f"router has hidden_size={router.hidden_size}, num_experts={router.num_experts}, "
                f"top_k={router.top_k}: they must be the layer's ({hidden_size}, {num_experts}, "
                f"{top_k})"
            )
        check_choice("save", save, SAVE_POLICIES)
        check_choice("backend", backend, BACKENDS)
        activation_limit(activation, swiglu_limit)
        if dtype not in COMPUTE_DTYPES:
            raise TypeError(f"dtype is {dtype}: parameters are torch.float32 or torch.bfloat16")

        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.activation = activation
        self.swiglu_limit = swiglu_limit
        self.num_ranks = num_ranks
        self.max_tokens = max_tokens
        self.save = save
        self.ring_rows = ring_rows
        self.requested_backend = backend
        # One rank needs no peers, with or without a process group.
        self._group_name = group.group_name if num_ranks > 1 else None
        self._key = uuid.uuid4().hex

        if isinstance(router, str):
            options = {} if router == "topk_softmax" else {"normalize": normalize_topk}
            router = ROUTERS[router](
                hidden_size, num_experts, top_k, device=device, dtype=dtype, **options
            )
        self.router = router
        num_local = num_experts // num_ranks
        self.experts = Experts(
            num_local,
            rank * num_local,
            hidden_size,
            intermediate_size,
            bias,
            device,
            dtype,
            self._group_name,
            num_ranks,
        )
        self.shared = self.shared_gate = None
        if shared_intermediate_size is not None:
            self.shared = SharedExpert(hidden_size, shared_intermediate_size, device, dtype)
        if shared_gate:
            self.shared_gate = SharedExpertGate(hidden_size, device, dtype)

    @property
    def group_name(self) -> str | None:
        """The name of the expert-parallel process group; None for one rank."""
        return self._group_name

    @property
    def backend(self) -> str:
        """The backend its calls take, "megakernel", "cpu" or "collective": `mok.explain` says why.

        As far as it is known before the first call, which finds out whether the ranks are local.
        """
        return _backend.explain(self).backend

    def reset_parameters(self) -> None:
        """Fresh weights as of construction; call it after `to_empty` of a meta-device layer."""
        for module in (self.router, self.experts, self.shared, self.shared_gate):
            if module is not None:
                module.reset_parameters()

    def forward(
        self,
        x: Tensor,
        *,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        return_router_output: bool = False,
        workspace_tag: str = "",
    ) -> Tensor | tuple[Tensor, RouterOutput]:
        """The layer's output for this rank's tokens; every rank of the group must call it.

        Args:
            x: tokens [..., H], BF16 or FP32, any strides, T = 0 included.
            topk_ids: routing from outside, int32 or int64 [..., K]; -1 or an id >= E is no route.
                Without topk_weights the layer's router weighs these experts (routing replay).
            topk_weights: the weights of topk_ids, floating [..., K]; gradients flow to them.
            return_router_output: also return the router's decisions, for the losses and counts of
                `mok.router`. It is a value and no attribute of the layer, so
                that it is right under checkpointing and torch.compile as well.
            workspace_tag: equal on all ranks; micro-batches that are in flight at a time may use
                workspaces of their own.

        Returns:
            out [..., H] in the compute dtype, or (out, RouterOutput).

        Raises:
            TypeError, ValueError: in one sentence, for inputs that do not fit the layer; the peers
                raise `mok.PeerAbortedError` with the reason.
        """
        try:
            x_TH, routing, router_output, shared_weight_T = self._prepare(
                x, topk_ids, topk_weights, return_router_output
            )
        except Exception as error:
            # What raises while Dynamo traces is run again eagerly, and only then told to the peers.
            if self._group_name is not None and not torch.compiler.is_compiling():
                self._tell_peers(x, workspace_tag, str(error))
            raise
        max_tokens = self._agreed_max_tokens(x_TH)
        name = self._group_name
        shared = self.shared
        out_TH = self.experts(
            x_TH,
            *routing,
            shared=None if shared is None else (shared.w_gate, shared.w_up, shared.w_down),
            shared_weight_T=shared_weight_T,
            activation=self.activation,
            swiglu_limit=self.swiglu_limit,
            group=None if name is None else _group.resolve_group(name),
            max_tokens=max_tokens,
            save=self.save,
            ring_rows=self.ring_rows,
            backend=self.requested_backend,
            layer_key=self._key,
            workspace_tag=workspace_tag,
        )
        out = out_TH if x.dim() == 2 else out_TH.reshape(x.shape)
        return (out, router_output) if return_router_output else out

    def _prepare(self, x, topk_ids, topk_weights, return_router_output):
        """All that can fail before the peers are involved: checks, casts, routing, gate."""
        if not isinstance(x, Tensor):
            raise TypeError(f"x is a {type(x).__name__}: it must be a tensor [..., hidden_size]")
        if x.dim() == 0 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x has shape {tuple(x.shape)}: its last dimension must be hidden_size "
                f"({self.hidden_size})"
            )
        dtype = compute_dtype(x)
        if x.dtype != dtype:
            x = x.to(dtype)
        self._check_dtypes(x)
        x_TH = x
        if x.dim() != 2 or torch.compiler.is_compiling():  # which makes H a constant of the graph
            x_TH = x.reshape(-1, self.hidden_size)
        x_TH = x_TH.contiguous()
        routing, router_output = self._route(x_TH, topk_ids, topk_weights)
        if return_router_output and router_output is None:
            raise ValueError(
                "return_router_output is True, but topk_weights come from outside and no router "
                "runs: leave topk_weights out to let the layer's router weigh topk_ids"
            )
        shared_weight_T = None if self.shared_gate is None else self.shared_gate(x_TH)
        return x_TH, routing, router_output, shared_weight_T

    def _check_dtypes(self, x):
        weight_dtype = self.experts.w_gate.dtype
        if weight_dtype not in COMPUTE_DTYPES:
            raise TypeError(
                f"the layer's parameters are {weight_dtype}: they must be torch.float32 or "
                "torch.bfloat16"
            )
        if x.dtype not in COMPUTE_DTYPES:
            raise TypeError(
                f"x is {x.dtype}: the layer computes in torch.float32 or torch.bfloat16, so cast x "
                "to one of them (or autocast to torch.bfloat16)"
            )
        if x.dtype == torch.float32 and weight_dtype == torch.bfloat16:
            raise TypeError(
                "x is torch.float32 and the parameters are torch.bfloat16: cast x to "
                "torch.bfloat16, use torch.autocast, or keep the parameters in torch.float32"
            )

    def _route(self, x_TH, topk_ids, topk_weights):
        """((ids [T, K], weights [T, K]), RouterOutput or None)."""
        num_tokens = x_TH.shape[0]
        if topk_ids is None:
            if topk_weights is not None:
                raise ValueError("topk_weights came without topk_ids: pass both or neither")
            if self.router is None:
                raise ValueError("topk_ids is missing: a layer with router=None routes nothing")
            output = self.router(x_TH)
            return (output.topk_ids_TK, output.topk_weights_TK), output
        ids_TK = self._flat_choices("topk_ids", topk_ids, num_tokens)
        if ids_TK.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"topk_ids is {ids_TK.dtype}: expert ids are torch.int32 or torch.int64"
            )
        if topk_weights is not None:
            weights_TK = self._flat_choices("topk_weights", topk_weights, num_tokens)
            if not weights_TK.is_floating_point():
                raise TypeError(f"topk_weights is {weights_TK.dtype}: weights are floating-point")
            return (ids_TK, weights_TK.float()), None
        if self.router is None:
            raise ValueError("topk_weights is missing: a layer with router=None has no weights")
        output = self.router(x_TH, ids_TK)
        return (output.topk_ids_TK, output.topk_weights_TK), output

    def _flat_choices(self, name, choices, num_tokens):
        check_tensors({name: choices})
        if choices.dim() == 0 or choices.shape[-1] != self.top_k:
            raise ValueError(
                f"{name} has shape {tuple(choices.shape)}: its last dimension must be top_k "
                f"({self.top_k})"
            )
        flat_TK = choices.reshape(-1, self.top_k).contiguous()
        if flat_TK.shape[0] != num_tokens:
            raise ValueError(
                f"{name} has {flat_TK.shape[0]} tokens and x has {num_tokens}: they must be equal"
            )
        return flat_TK

    def _agreed_max_tokens(self, x_TH):
        """max_tokens of this call; the first one without it agrees on it with the peers."""
        if self.max_tokens is not None or self._group_name is None:
            return self.max_tokens
        agreed = _group.agreed_max_tokens(self._key)
        if agreed is None:
            if torch.compiler.is_compiling():
                _group.agree_at_trace_time(self._key, self._group_name, x_TH)
            else:
                _group.agree_max_tokens(self._key, self._group_name, x_TH.shape[0])
            agreed = _group.agreed_max_tokens(self._key)
        return agreed

    def _tell_peers(self, x, tag, reason):
        """Ends the peers' call with `mok.PeerAbortedError`, wherever they wait in it."""
        max_tokens = self.max_tokens
        if max_tokens is None:
            max_tokens = _group.agreed_max_tokens(self._key)
        if max_tokens is None:
            _group.agree_max_tokens(self._key, self._group_name, 0, reason)
            return
        device = self.experts.w_gate.device
        dtype = compute_dtype(x) if isinstance(x, Tensor) else None
        if dtype not in COMPUTE_DTYPES:
            dtype = None
        # Where the peers are: they make the call that this rank would have made.
        needs_gradients = torch.is_grad_enabled() and any(
            parameter.requires_grad for parameter in self.parameters()
        )
        call = {"dtype": dtype, "needs_gradients": needs_gradients}
        choice = _backend.choose(self.requested_backend, device.type, self._group_name, **call)
        if choice.backend == "collective":
            _collective.tell_peers(_group.resolve_group(self._group_name), device, reason)
            return
        sizes = (max_tokens, self.hidden_size, self.top_k)
        _group.abort_call(self._group_name, *sizes, dtype, device, tag, reason)

    def extra_repr(self) -> str:
        parts = [
            f"hidden_size={self.hidden_size}",
            f"intermediate_size={self.intermediate_size}",
            f"num_experts={self.num_experts}",
            f"top_k={self.top_k}",
            f"activation={self.activation!r}",
        ]
        if self.swiglu_limit is not None:
            parts.append(f"swiglu_limit={self.swiglu_limit}")
        parts += [f"ranks={self.num_ranks}", f"max_tokens={self.max_tokens}", f"save={self.save!r}"]
        if self.ring_rows is not None:
            parts.append(f"ring_rows={self.ring_rows}")
        parts.append(f"backend={self.requested_backend!r}")
        return ", ".join(parts)
