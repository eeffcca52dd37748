"""Sizes of one layer call, and the shapes of what its ops return.

One shape function per op serves the real op, the fake op and the tests. All sizes but T may be
taken as constants; T (and what follows from it) may be symbolic.

Legend: T tokens of this rank, K experts per token, E experts in all R ranks, H hidden, I
intermediate, J the shared expert's intermediate size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

PAD = 128
"""Rows a segment (the rows of one local expert) is padded to; mok._C.DEFAULT_PAD."""

SAVE_POLICIES = ("all", "gate_up", "none")
COMPUTE_DTYPES = (torch.float32, torch.bfloat16)
ACTIVATIONS = ("swiglu", "gpt_oss")
BACKENDS = ("auto", "megakernel", "cpu", "collective")


class LayerTensors(NamedTuple):
    """The tensors of one call, in the order of the ops' schemas."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w_gate: Tensor
    w_up: Tensor
    w_down: Tensor
    b_gate: Tensor | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None
    shared_gate: Tensor | None = None
    shared_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_weight: Tensor | None = None

    def in_order(self) -> tuple[Tensor | None, ...]:
        return self


class LayerSettings(NamedTuple):
    """The settings of one call, in the order of the ops' schemas."""

    workspace: str
    num_experts: int
    max_tokens: int
    ring_rows: int
    activation: str
    swiglu_limit: float | None
    save: str
    gradients: int

    def in_order(self) -> tuple:
        return self


TENSOR_NAMES = LayerTensors._fields
SETTING_NAMES = LayerSettings._fields

# The tensors that can have a gradient, in the order of the `gradients` bits and of moe_backward's
# results.
GRADIENT_ORDER = (
    "x",
    "topk_weights",
    "shared_weight",
    "w_gate",
    "w_up",
    "w_down",
    "b_gate",
    "b_up",
    "b_down",
    "shared_gate",
    "shared_up",
    "shared_down",
)


def gradient_bits(wanted: set[str]) -> int:
    """The `gradients` mask: bit i stands for GRADIENT_ORDER[i]."""
    return sum(1 << bit for bit, name in enumerate(GRADIENT_ORDER) if name in wanted)


def _smallest(first: int, second: int) -> int:
    """min that keeps a symbolic size symbolic; Dynamo traces sym_min of symbolic sizes only."""
    are_plain = isinstance(first, int) and isinstance(second, int)
    return min(first, second) if are_plain else torch.sym_min(first, second)


def _largest(first: int, second: int) -> int:
    are_plain = isinstance(first, int) and isinstance(second, int)
    return max(first, second) if are_plain else torch.sym_max(first, second)


def worst_case_rows(num_ranks: int, num_experts: int, top_k: int, max_tokens: int) -> int:
    """Padded rows of a rank when every route of every rank lands on it, in the least favourable
    split over its experts."""
    routes = num_ranks * max_tokens * top_k
    segments = _smallest(routes, num_experts // num_ranks)
    return (routes + segments * (PAD - 1)) // PAD * PAD


def default_ring_rows(num_ranks: int, num_experts: int, top_k: int, max_tokens: int) -> int:
    """1.25 x max_tokens x K plus one pad per local expert, at most the worst case."""
    routes = max_tokens * top_k
    wanted = ((5 * routes + 3) // 4 + PAD - 1) // PAD * PAD + PAD * (num_experts // num_ranks)
    worst = worst_case_rows(num_ranks, num_experts, top_k, max_tokens)
    return _largest(_smallest(wanted, worst), PAD)


def context_shapes(tensors: LayerTensors, settings: LayerSettings) -> list[tuple[int, ...]]:
    """Shapes of x_rows, gate, up [save_rows, .] and shared_gate, shared_up [T, J]: what backward
    needs, independent of routing. A tensor that the policy does not keep has 0 rows."""
    num_local, intermediate, hidden = tensors.w_gate.shape
    shared = tensors.shared_gate.shape[0] if tensors.shared_gate is not None else 0
    num_ranks = settings.num_experts // num_local
    top_k = tensors.topk_ids.shape[1]
    rows = tokens = 0
    if settings.save != "none":
        worst = worst_case_rows(num_ranks, settings.num_experts, top_k, settings.max_tokens)
        rows = _smallest(settings.ring_rows, worst)
        tokens = tensors.x.shape[0] if shared else 0
    return [
        (rows if settings.save == "all" else 0, hidden),
        (rows, intermediate),
        (rows, intermediate),
        (tokens, shared),
        (tokens, shared),
    ]


def context_rows(tensors: LayerTensors, settings: LayerSettings) -> tuple[int, int, int]:
    """The numbers of rows in `context_shapes`, of x, gate and shared_gate: what _moe_forward
    allocates. For sizes that are no symbols."""
    _, num_experts, max_tokens, ring_rows, _, _, save, _ = settings
    if save == "none":
        return 0, 0, 0
    num_ranks = num_experts // tensors.w_gate.shape[0]
    worst = worst_case_rows(num_ranks, num_experts, tensors.topk_ids.shape[1], max_tokens)
    rows = min(ring_rows, worst)
    shared = 0 if tensors.shared_gate is None else tensors.x.shape[0]
    return rows if save == "all" else 0, rows, shared


def empty_forward(tensors: LayerTensors, settings: LayerSettings) -> tuple[Tensor, ...]:
    """moe_forward's results, unfilled: out [T, H] and the context, in x's dtype. (The op itself
    allocates them in C++, by `context_rows`.)"""
    x = tensors.x
    return (x.new_empty(x.shape), *empty_recompute(tensors, settings))


def empty_recompute(tensors: LayerTensors, settings: LayerSettings) -> list[Tensor]:
    """moe_recompute's results, unfilled: the context, in x's dtype."""
    return [tensors.x.new_empty(shape) for shape in context_shapes(tensors, settings)]


def empty_backward(tensors: LayerTensors, settings: LayerSettings) -> list[Tensor]:
    """moe_backward's results, unfilled: one per GRADIENT_ORDER, of the tensor's shape and dtype,
    contiguous; without elements where the gradient is not asked for."""
    results = []
    for bit, name in enumerate(GRADIENT_ORDER):
        tensor = getattr(tensors, name)
        if tensor is None:
            tensor = tensors.x
            results.append(tensor.new_empty(0))
        else:
            wanted = settings.gradients >> bit & 1
            results.append(tensor.new_empty(tensor.shape if wanted else 0))
    return results


def empty_wanted(tensors: LayerTensors, settings: LayerSettings) -> list[Tensor]:
    """`empty_backward` for who looks at the gradients that it asks for only: the others are one
    tensor without elements."""
    nothing = tensors.x.new_empty(0)
    results = [nothing] * len(GRADIENT_ORDER)
    for bit, name in enumerate(GRADIENT_ORDER):
        if settings.gradients >> bit & 1:
            tensor = getattr(tensors, name)
            results[bit] = tensor.new_empty(tensor.shape)
    return results


def check_settings(max_tokens, save, ring_rows, shared, backend) -> None:
    """Raises ValueError for settings of `mok.moe` that the ops do not see as they were passed."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: it must be one of {BACKENDS}.")
    for name, value, least in (("max_tokens", max_tokens, 0), ("ring_rows", ring_rows, 1)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ValueError(f"{name} is {value!r}: it must be None or an integer >= {least}.")
    if save not in SAVE_POLICIES:
        raise ValueError(f"save is {save!r}: it must be one of {SAVE_POLICIES}.")
    if shared is not None and len(shared) != 3:
        raise ValueError(f"shared has {len(shared)} tensors: it must be (gate, up, down) or None.")


def check_activation(activation, swiglu_limit) -> None:
    """Raises ValueError for what no call of the ops can be given; they look at the limit's size."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}: it must be one of {ACTIVATIONS}.")
    if not (swiglu_limit is None or hasattr(swiglu_limit, "__float__")):
        raise ValueError(
            f"swiglu_limit is {swiglu_limit!r}: it must be positive, or None for no limit."
        )


def check_weights(name: str, weights: Tensor | None) -> None:
    """Raises TypeError for weights per route or token that are not floating-point."""
    if weights is not None and not weights.is_floating_point():
        raise TypeError(f"{name} is {weights.dtype}: weights are floating-point.")


def check_sizes(x: Tensor, topk_ids: Tensor, w_gate: Tensor) -> None:
    """Raises ValueError or TypeError unless these give T, K, H and the compute dtype."""
    _check_dims("x", x, "[T, H]", 2)
    _check_dims("topk_ids", topk_ids, "[T, K]", 2)
    _check_dims("w_gate", w_gate, "[E/R, I, H]", 3)
    if x.dtype not in COMPUTE_DTYPES:
        raise TypeError(f"x is {x.dtype}: mok computes in torch.float32 or torch.bfloat16.")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids is {topk_ids.dtype}: expert ids are torch.int32 or torch.int64.")
    if x.shape[1] != w_gate.shape[2]:
        raise ValueError(
            f"x has H = {x.shape[1]} columns and w_gate {w_gate.shape[2]}: they must be equal."
        )
    if x.device != w_gate.device:
        raise ValueError(f"w_gate is on {w_gate.device} and x on {x.device}: use one device.")


def local_parts(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """This rank's part of each DTensor; its gradient comes back as a DTensor."""
    return tuple(t.to_local() if hasattr(t, "to_local") else t for t in tensors)


def check_tokens(tensors: LayerTensors, settings: LayerSettings) -> None:
    """Raises ValueError if this rank passes more tokens than the ranks agreed on."""
    num_tokens = tensors.x.shape[0]
    if num_tokens > settings.max_tokens:
        raise ValueError(
            f"x has T = {num_tokens} tokens, more than max_tokens = {settings.max_tokens}: pass "
            "max_tokens = the largest T any rank will pass when the layer is made."
        )


def check_layer(tensors: LayerTensors, settings: LayerSettings) -> None:
    """Raises ValueError or TypeError, in one sentence, for arguments no layer call can have."""
    x, ids = tensors.x, tensors.topk_ids
    check_sizes(x, ids, tensors.w_gate)
    num_tokens, hidden = x.shape
    top_k = ids.shape[1]
    num_local, intermediate, _ = tensors.w_gate.shape
    if num_local < 1 or settings.num_experts % num_local:
        raise ValueError(
            f"num_experts is {settings.num_experts} and w_gate has {num_local} experts: there must "
            "be at least one, and num_experts a multiple of them."
        )
    if not 1 <= top_k <= settings.num_experts:
        raise ValueError(
            f"topk_ids has K = {top_k} choices per token: K must be at least 1 and at most the "
            f"number of experts ({settings.num_experts})."
        )
    expected = {
        "topk_ids": (num_tokens, top_k),
        "topk_weights": (num_tokens, top_k),
        "w_gate": (num_local, intermediate, hidden),
        "w_up": (num_local, intermediate, hidden),
        "w_down": (num_local, hidden, intermediate),
        "b_gate": (num_local, intermediate),
        "b_up": (num_local, intermediate),
        "b_down": (num_local, hidden),
    }
    if tensors.shared_gate is not None:
        _check_dims("shared[0] (gate)", tensors.shared_gate, "[J, H]", 2)
        shared = tensors.shared_gate.shape[0]
        expected["shared_gate"] = (shared, hidden)
        expected["shared_up"] = (shared, hidden)
        expected["shared_down"] = (hidden, shared)
        expected["shared_weight"] = (num_tokens,)
        _check_width("the shared expert's width J", shared)
    elif tensors.shared_weight is not None:
        raise ValueError("shared_weight_T was passed without a shared expert: pass shared too.")
    _check_width("the hidden size H", hidden)
    _check_width("the intermediate size I", intermediate)
    for name, shape in expected.items():
        tensor = getattr(tensors, name)
        if tensor is None:
            continue
        _check_tensor(name, tensor, shape, x)
    check_activation(settings.activation, settings.swiglu_limit)
    if settings.save not in SAVE_POLICIES:
        raise ValueError(f"save is {settings.save!r}: it must be one of {SAVE_POLICIES}.")
    if settings.swiglu_limit is not None and not settings.swiglu_limit > 0:
        raise ValueError(
            f"swiglu_limit is {settings.swiglu_limit}: it must be positive, or None for no limit."
        )


def _check_dims(name: str, tensor: Tensor, form: str, dims: int) -> None:
    if tensor.dim() != dims:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: it must be {form}.")


def _check_width(name: str, value: int) -> None:
    if value < 8 or value % 8:
        raise ValueError(f"{name} is {value}: it must be a positive multiple of 8.")


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: x and the other arguments ask for {shape}."
        )
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device} and x on {x.device}: use one device.")
    if name == "topk_ids":
        return
    if name in ("topk_weights", "shared_weight"):
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} is {tensor.dtype}: the op takes torch.float32.")
        return
    if tensor.dtype not in COMPUTE_DTYPES:
        raise TypeError(f"{name} is {tensor.dtype}: weights are torch.float32 or torch.bfloat16.")
    if x.dtype == torch.float32 and tensor.dtype == torch.bfloat16:
        raise TypeError(
            f"{name} is torch.bfloat16 and x torch.float32: cast x to torch.bfloat16, or keep the "
            "weights in torch.float32."
        )
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension: it must be contiguous "
            "there; other dimensions may have any stride."
        )
