"""MoE weights between mok and Hugging Face transformers, as state dicts of one block.

    ours = mok.convert.from_transformers(state, "qwen3_moe", prefix="model.layers.3.mlp.")
    layer.load_state_dict(ours)
    theirs = mok.convert.to_transformers(mok.convert.gather_experts(layer), "qwen3_moe")

Families: "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss". Two layouts of theirs are
read and written: "memory", that of a model's modules (experts stacked, gate and up packed or
interleaved), and "checkpoint", that of files on disk (an entry per expert; for gpt-oss the same as
in memory). `mok.swap_moe_layers` does it for a whole model.

Shapes: E experts, H hidden, I intermediate, J the shared expert's width.
"""

import dataclasses
import re
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mok import _group


@dataclasses.dataclass(frozen=True)
class _Family:
    plain: dict[str, str]  # names of tensors that are the same in both: ours to theirs
    expert_names: tuple[str, str, str] | None = None  # gate, up, down on disk; None: stacked there
    # gpt-oss: experts [E, H, 2I] and [E, I, H], gate and up alternating, with biases.
    is_interleaved: bool = False


_GATE = {"router.weight": "gate.weight"}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _shared(module: str) -> dict[str, str]:
    names = zip(("w_gate", "w_up", "w_down"), _PROJECTIONS, strict=True)
    return {f"shared.{ours}": f"{module}.{theirs}.weight" for ours, theirs in names}


_FAMILIES = {
    "mixtral": _Family(_GATE, ("w1", "w3", "w2")),
    "qwen3_moe": _Family(_GATE, _PROJECTIONS),
    "qwen2_moe": _Family(
        _GATE | _shared("shared_expert") | {"shared_gate.weight": "shared_expert_gate.weight"},
        _PROJECTIONS,
    ),
    "deepseek_v3": _Family(
        _GATE | _shared("shared_experts") | {"router.expert_bias": "gate.e_score_correction_bias"},
        _PROJECTIONS,
    ),
    "gpt_oss": _Family(
        {"router.weight": "router.weight", "router.bias": "router.bias"}, is_interleaved=True
    ),
}
FAMILIES = tuple(_FAMILIES)
LAYOUTS = ("memory", "checkpoint")
_OURS = ("w_gate", "w_up", "w_down")


def from_transformers(
    state: Mapping[str, Tensor], family: str, *, prefix: str = ""
) -> dict[str, Tensor]:
    """The state dict of a `mok.MoELayer` with all E experts, from that of one MoE block of theirs.

    Args:
        state: names and tensors, in either layout; entries outside `prefix` are ignored.
        family: one of `FAMILIES`.
        prefix: the block's name in `state`, with its final dot.

    Returns:
        router.*, experts.*, and where there is one shared.* and shared_gate.*. Tensors are views of
        theirs where the layout allows it (their packed gate and up), else new ones.

    Raises:
        ValueError: for an unknown family, a name that is missing or not understood, and quantised
            weights (MXFP4, FP8).
    """
    spec = _spec_of(family)
    block = {n[len(prefix) :]: tensor for n, tensor in state.items() if n.startswith(prefix)}
    ours = {mine: _take(block, theirs, family) for mine, theirs in spec.plain.items()}
    if any(name.endswith(("_blocks", "_scales")) for name in block):
        raise ValueError(
            f"{prefix}experts are stored in MXFP4 (*_blocks, *_scales): load the model by "
            "transformers with dequantize=True and pass its state dict"
        )
    # Without the check a block without its scales would be taken for plain weights.
    for name, tensor in block.items():
        if name.endswith(("_scale", "_scale_inv")) or tensor.dtype.itemsize < 2:
            raise ValueError(
                f"{prefix}{name} is {tensor.dtype}, of quantised weights: dequantise the block, "
                "or load the model by transformers in torch.bfloat16, and pass its state dict"
            )
    if "experts.gate_up_proj" in block:
        packed = _take(block, "experts.gate_up_proj", family)
        down = _take(block, "experts.down_proj", family)
        if spec.is_interleaved:
            gate, up = (packed[..., i::2].transpose(1, 2).contiguous() for i in (0, 1))
            bias = _take(block, "experts.gate_up_proj_bias", family)
            ours |= {
                f"experts.b_{n}": bias[:, i::2].contiguous() for i, n in ((0, "gate"), (1, "up"))
            }
            ours["experts.b_down"] = _take(block, "experts.down_proj_bias", family)
            down = down.transpose(1, 2).contiguous()
        else:
            gate, up = packed.chunk(2, dim=1)
        ours |= {"experts.w_gate": gate, "experts.w_up": up, "experts.w_down": down}
    else:
        ours |= _stack_experts(block, spec, family)
    if block:
        raise ValueError(
            f"{prefix}{min(block)} is not known in a block of {family!r}: is it another family's?"
        )
    return ours


def to_transformers(
    state: Mapping[str, Tensor], family: str, *, layout: str = "memory", prefix: str = ""
) -> dict[str, Tensor]:
    """The inverse of `from_transformers`: all E experts in, one block's state dict out.

    Args:
        state: of a `mok.MoELayer` with all experts: `layer.state_dict()` of one rank, or
            `gather_experts(layer)`.
        family: one of `FAMILIES`.
        layout: "memory" or "checkpoint".
        prefix: put in front of the names.

    Raises:
        ValueError: for an unknown family or layout, or a name that is missing.
    """
    spec = _spec_of(family)
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}: it must be one of {LAYOUTS}")
    block = dict(state)
    theirs = {name: _take(block, mine, family) for mine, name in spec.plain.items()}
    gate, up, down = (_take(block, f"experts.{name}", family) for name in _OURS)
    if spec.is_interleaved:
        theirs["experts.gate_up_proj"] = (
            torch.stack([gate, up], dim=2).flatten(1, 2).mT.contiguous()
        )
        theirs["experts.down_proj"] = down.transpose(1, 2).contiguous()
        b_gate, b_up, b_down = (
            _take(block, f"experts.b_{n}", family) for n in ("gate", "up", "down")
        )
        theirs["experts.gate_up_proj_bias"] = torch.stack([b_gate, b_up], dim=2).flatten(1)
        theirs["experts.down_proj_bias"] = b_down
    elif layout == "memory":
        theirs["experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        theirs["experts.down_proj"] = down
    else:
        for name, weight in zip(spec.expert_names, (gate, up, down), strict=True):
            theirs |= {f"experts.{e}.{name}.weight": w for e, w in enumerate(weight.unbind())}
    if block:
        raise ValueError(
            f"{min(block)} has no place in a block of {family!r}: choose another family"
        )
    return {prefix + name: tensor for name, tensor in theirs.items()}


@torch.no_grad()
def gather_experts(layer) -> dict[str, Tensor]:
    """`layer.state_dict()` with the experts of all ranks, on every rank; a collective."""
    state = {name: tensor.detach() for name, tensor in layer.state_dict().items()}
    experts = layer.experts
    for name, tensor in state.items():
        if not name.startswith("experts.") or experts.num_ranks == 1:
            continue
        if hasattr(tensor, "full_tensor"):
            state[name] = tensor.full_tensor()
            continue
        parts = [torch.empty_like(tensor) for _ in range(experts.num_ranks)]
        dist.all_gather(parts, tensor.contiguous(), group=_group.resolve_group(experts.group_name))
        state[name] = torch.cat(parts)
    return state


def slice_experts(state: Mapping[str, Tensor], first: int, count: int) -> dict[str, Tensor]:
    """The same state with the experts first .. first + count - 1 only: one rank's share."""
    return {
        name: tensor[first : first + count] if name.startswith("experts.") else tensor
        for name, tensor in state.items()
    }


def _spec_of(family: str) -> _Family:
    if family not in _FAMILIES:
        raise ValueError(f"family is {family!r}: it must be one of {FAMILIES}")
    return _FAMILIES[family]


def _take(block: dict[str, Tensor], name: str, family: str) -> Tensor:
    if name not in block:
        raise ValueError(
            f"{name} is missing for a block of {family!r}: there are "
            f"{', '.join(sorted(block)[:6]) or 'no tensors'}"
        )
    return block.pop(name)


def _stack_experts(block: dict[str, Tensor], spec: _Family, family: str) -> dict[str, Tensor]:
    """From an entry per expert, as on disk."""
    found = {int(m[1]) for name in block if (m := re.match(r"experts\.(\d+)\.", name))}
    if not found or spec.expert_names is None:
        _take(block, "experts.gate_up_proj", family)
    stacked = {}
    for ours, theirs in zip(_OURS, spec.expert_names, strict=True):
        names = [f"experts.{e}.{theirs}.weight" for e in range(max(found) + 1)]
        stacked[f"experts.{ours}"] = torch.stack([_take(block, name, family) for name in names])
    return stacked
