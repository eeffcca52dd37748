"""What a layer allocates for given sizes, before anything is allocated: `mok memory`.

The workspace is that of the CPU backend, compared with what is really allocated by
`tests/cpu/test_memory.py`, or that of a GPU, computed by the functions that place it there. Routing
changes neither: the ring bounds what skew would fill.

Shapes: T tokens of a rank (max_tokens), K experts per token, E experts in all R ranks, H hidden, I
intermediate, J the shared expert's width.
"""

import dataclasses
import mmap

import torch

from mok import _C
from mok.shapes import (
    GRADIENT_ORDER,
    PAD,
    SAVE_POLICIES,
    default_ring_rows,
    gradient_bits,
    worst_case_rows,
)

_WINDOW_ALIGN = 256  # csrc/layout/window.h
_DW_BLOCK = 64  # columns of I in one partial sum of a routing weight's gradient
_TABLE_ROW_BYTES = 4 * 8 + 4  # csrc/cpu/rows.h: four pointers and a weight
# csrc/cpu/stages_tiling.h: packed operands, an FP32 tile and a packed left operand.
_WORKER_BYTES = 6 << 20


@dataclasses.dataclass(frozen=True)
class Item:
    """One thing that takes memory."""

    scope: str  # "layer": each layer; "call": each layer, until its backward; "workspace": once
    name: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """What one rank needs. Layers of a group with equal settings share one workspace."""

    items: tuple[Item, ...]
    saved_by_policy: dict[str, int]  # bytes of the saved context for each `save`
    ring_rows: int
    worst_case_rows: int
    device: str  # whose workspace: "cpu" or "cuda"

    def total(self, scope: str) -> int:
        """Bytes of all items of a scope."""
        return sum(item.bytes for item in self.items if item.scope == scope)

    def __str__(self) -> str:
        lines = []
        device = "the CPU" if self.device == "cpu" else "a GPU"
        for scope, title in (
            ("layer", "each layer"),
            ("call", "each layer, from its forward to its backward"),
            ("workspace", f"once for all layers of a group, on {device}"),
        ):
            lines.append(f"{title}: {_mib(self.total(scope))}")
            lines += [f"    {i.name:<52}{_mib(i.bytes)}" for i in self.items if i.scope == scope]
        lines.append("saved context by policy:")
        lines += [f"    {f'save={n!r}':<52}{_mib(b)}" for n, b in self.saved_by_policy.items()]
        lines.append(
            f"ring: {self.ring_rows} rows of at most {self.worst_case_rows} that all routes of all "
            "ranks would fill"
        )
        return "\n".join(lines)


def _mib(count: int) -> str:
    return f"{count / 2**20:12.2f} MiB"


def memory_estimate(
    layer=None,
    *,
    max_tokens: int,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_experts: int | None = None,
    top_k: int | None = None,
    num_ranks: int = 1,
    shared_intermediate_size: int | None = None,
    bias: bool = False,
    save: str = "gate_up",
    ring_rows: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    parameter_dtype: torch.dtype | None = None,
    threads: int | None = None,
    device: str = "cpu",
    multiprocessors: int = 132,
) -> MemoryEstimate:
    """What one rank of a layer needs for calls of up to `max_tokens` tokens.

    Args:
        layer: a `mok.MoELayer` to take sizes and settings from (also on the meta device); without
            one, pass them.
        max_tokens: the largest T of any rank.
        num_ranks: R; the experts are those of all ranks.
        dtype: of the calls; parameter_dtype: of the parameters (None: the same).
        threads: of the CPU backend; None is torch's number.
        device: whose workspace, "cpu" or "cuda"; all else is the same on both.
        multiprocessors: of the GPU (132: H100 SXM and H200); the plan's memory depends a little on
            them.

    Raises:
        ValueError: for sizes that cannot be, for a dtype that a GPU's kernels do not take, and for
            "cuda" where mok was built without CUDA kernels.
    """
    if layer is not None:
        weight = layer.experts.w_gate
        hidden_size, intermediate_size = layer.hidden_size, layer.intermediate_size
        num_experts, top_k, num_ranks = layer.num_experts, layer.top_k, layer.num_ranks
        shared = layer.shared
        shared_intermediate_size = None if shared is None else shared.w_gate.shape[0]
        bias, save, ring_rows = layer.experts.b_gate is not None, layer.save, layer.ring_rows
        parameter_dtype = weight.dtype
    for name, value in (
        ("max_tokens", max_tokens),
        ("hidden_size", hidden_size),
        ("intermediate_size", intermediate_size),
        ("num_experts", num_experts),
        ("top_k", top_k),
        ("num_ranks", num_ranks),
    ):
        if not isinstance(value, int) or value < (name != "max_tokens"):
            raise ValueError(f"{name} is {value!r}: it must be a positive integer")
    for name, value in (
        ("ring_rows", ring_rows),
        ("threads", threads),
        ("multiprocessors", multiprocessors),
        ("shared_intermediate_size", shared_intermediate_size),
    ):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is {value!r}: it must be None or a positive integer")
    for name, value in (
        ("hidden_size", hidden_size),
        ("intermediate_size", intermediate_size),
        ("shared_intermediate_size", shared_intermediate_size or 8),
    ):
        if value % 8:
            raise ValueError(f"{name} is {value}: it must be a multiple of 8")
    if top_k > num_experts:
        raise ValueError(
            f"top_k is {top_k}: it must be at most the number of experts ({num_experts})"
        )
    if num_experts % num_ranks:
        raise ValueError(
            f"num_experts is {num_experts}: it must be a multiple of {num_ranks} ranks"
        )
    if save not in SAVE_POLICIES:
        raise ValueError(f"save is {save!r}: it must be one of {SAVE_POLICIES}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}: it must be 'cpu' or 'cuda'")
    sizes = _Sizes(
        max_tokens,
        top_k,
        num_experts,
        hidden_size,
        intermediate_size,
        shared_intermediate_size or 0,
        num_ranks,
        dtype.itemsize,
        (parameter_dtype or dtype).itemsize,
        ring_rows,
    )
    if device == "cuda":
        workspace = sizes.cuda_workspace(bias, save, dtype, multiprocessors)
    else:
        workspace = sizes.workspace(bias, torch.get_num_threads() if threads is None else threads)
    saved = {policy: sizes.saved_context(policy) for policy in SAVE_POLICIES}
    items = (*sizes.parameters(bias), *sizes.call(saved[save]), *workspace)
    return MemoryEstimate(items, saved, sizes.ring, sizes.worst, device)


class _Sizes:
    def __init__(self, T, K, E, H, I, J, R, element, parameter, ring_rows):
        self.T, self.K, self.E, self.H, self.I, self.J, self.R = T, K, E, H, I, J, R
        self.local = E // R
        self.element, self.parameter = element, parameter
        self.worst = worst_case_rows(R, E, K, T)
        ring = default_ring_rows(R, E, K, T) if ring_rows is None else -(-ring_rows // PAD) * PAD
        self.ring = ring
        self.rows = min(ring, self.worst)  # a longer ring would never be filled

    def parameters(self, bias: bool) -> list[Item]:
        routed = self.local * 3 * self.H * self.I
        routed += self.local * (2 * self.I + self.H) if bias else 0
        others = 3 * self.H * self.J + self.E * self.H
        return [
            Item("layer", "weights of this rank's experts", routed * self.parameter),
            Item("layer", "weights of shared expert and router", others * self.parameter),
            Item("layer", "gradients of all of these", (routed + others) * self.parameter),
        ]

    def saved_context(self, save: str) -> int:
        if save == "none":
            return 0
        columns = 2 * self.I + (self.H if save == "all" else 0)
        return (self.rows * columns + 2 * self.T * self.J) * self.element

    def call(self, saved: int) -> list[Item]:
        row = self.H * self.element
        return [
            Item("call", "saved context", saved),
            Item("call", "x, ids and weights", self.T * (row + self.K * (8 + 4))),
            Item("call", "out", self.T * row),
        ]

    def workspace(self, bias: bool, threads: int) -> list[Item]:
        slots, row = self.T * self.K, self.H * self.element
        if self.R > 1:
            inputs = 2 * _round(self.T * row, _WINDOW_ALIGN) + 2 * _round(slots * 4, _WINDOW_ALIGN)
            control = _round(_C.PeerComm.control_bytes(self.R), _WINDOW_ALIGN)
            gradients = _round(slots * 4, _WINDOW_ALIGN)
            home = _round(slots * row, _WINDOW_ALIGN)
            fixed = inputs + control + gradients + home
            control += _round(fixed, mmap.PAGESIZE) - fixed
        else:
            inputs, control, gradients, home = slots * 4, mmap.PAGESIZE, slots * 4, slots * row
        inner = max(self.rows * self.I, self.T * self.J) * self.element
        table = max(self.rows, self.T if self.J else 0) * _TABLE_ROW_BYTES
        partials = 4 * max(
            self.rows * -(-self.I // _DW_BLOCK), self.T * -(-self.J // _DW_BLOCK) if self.J else 0
        )
        longest = _round(self.R * slots, PAD)
        cut = 3 * self.H * self.I + 2 * self.I + self.H if longest > self.ring else 0
        items = [
            ("x, dout, ids and weights for the peers", inputs),
            ("returning rows [T * K, H]", home),
            ("flags and router gradients", control + gradients),
            ("ring: x and dout", 2 * self.rows * row),
            ("ring: gate, up, hidden and their gradients", 5 * inner),
            ("ring: table and partial sums", table + partials),
            ("rows of the shared expert", self.T * row if self.J else 0),
            ("FP32 accumulators of one cut segment", 4 * cut),
            ("biases in FP32", 4 * self.local * (2 * self.I + self.H) if bias else 0),
            ("plan", 8 * self.worst),
            (f"packed operands of {threads} thread(s), at most", threads * _WORKER_BYTES),
        ]
        return [Item("workspace", name, size) for name, size in items]

    def cuda_workspace(self, bias: bool, save: str, dtype: torch.dtype, sms: int) -> list[Item]:
        if not hasattr(_C, "device_memory"):
            raise ValueError(
                "device is 'cuda', but this mok was built without CUDA kernels, whose code says "
                "what they allocate: see `mok doctor`"
            )
        if dtype != torch.bfloat16:
            raise ValueError(f"dtype is {dtype}: with device='cuda' it must be torch.bfloat16")
        wanted = {name for name in GRADIENT_ORDER if bias or not name.startswith("b_")}
        wanted -= set() if self.J else {name for name in wanted if name.startswith("shared")}
        held = _C.device_memory(
            max_tokens=self.T,
            hidden=self.H,
            intermediate=self.I,
            shared_intermediate=self.J,
            num_experts=self.E,
            top_k=self.K,
            num_ranks=self.R,
            ring_rows=self.ring,
            save=save,
            gradients=gradient_bits(wanted),
            multiprocessors=sms,
        )
        items = [
            ("x, dout, ids and weights for the peers", held["inputs"]),
            ("returning rows [T * K, H]", held["home_rows"]),
            ("flags, router gradients, and rounding to 2 MiB", held["flags"]),
            ("plan, task tables and counters", held["plan"]),
            ("ring and other temporaries of backward", held["rows"]),
            ("rounding of temporaries to 2 MiB", held["rounding"]),
        ]
        return [Item("workspace", name, size) for name, size in items]


def _round(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
