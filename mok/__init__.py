"""mok: Mixture-of-Experts layers for training, expert-parallel, fused and deterministic.

Importing this package always works. Where its compiled half cannot be used, touching a name that
needs it raises `ImportError` with one line: what was built, what was found and what to do.
"""

import importlib
from typing import TYPE_CHECKING

from mok import _native
from mok._version import __version__

_EXPORTS = {
    "MoELayer": "layer",
    "PeerAbortedError": "errors",
    "PeerTimeoutError": "errors",
    "PeersNotLocalError": "errors",
    "SymmetricHeapError": "errors",
    "WorkspaceClosedError": "errors",
    "average_gradients": "gradients",
    "clip_grad_norm_": "gradients",
    "exclude_experts_from_ddp": "gradients",
    "expert_parameters": "gradients",
    "explain": "_backend",
    "memory_estimate": "memory",
    "moe": "ops",
    "scale_expert_gradients": "gradients",
    "shard_experts": "checkpoint",
    "simulate": "simulation",
    "swap_moe_layers": "swap",
    "symm_empty": "workspace",
    "trace": "_trace",
}
_PURE_SUBMODULES = ("errors", "reference", "router", "simulation", "timeline")
_NATIVE_SUBMODULES = (
    "_backend",
    "_trace",
    "checkpoint",
    "convert",
    "experts",
    "functional",
    "gradients",
    "layer",
    "memory",
    "ops",
    "swap",
    "workspace",
)

__all__ = ["__version__", "reference", *_EXPORTS]

if TYPE_CHECKING:  # for type checkers, which cannot follow __getattr__; the same names
    from mok import errors as errors
    from mok import reference as reference
    from mok import router as router
    from mok import simulation as simulation
    from mok import timeline as timeline
    from mok._backend import explain as explain
    from mok._trace import trace as trace
    from mok.checkpoint import shard_experts as shard_experts
    from mok.errors import PeerAbortedError as PeerAbortedError
    from mok.errors import PeersNotLocalError as PeersNotLocalError
    from mok.errors import PeerTimeoutError as PeerTimeoutError
    from mok.errors import SymmetricHeapError as SymmetricHeapError
    from mok.errors import WorkspaceClosedError as WorkspaceClosedError
    from mok.gradients import average_gradients as average_gradients
    from mok.gradients import clip_grad_norm_ as clip_grad_norm_
    from mok.gradients import exclude_experts_from_ddp as exclude_experts_from_ddp
    from mok.gradients import expert_parameters as expert_parameters
    from mok.gradients import scale_expert_gradients as scale_expert_gradients
    from mok.layer import MoELayer as MoELayer
    from mok.memory import memory_estimate as memory_estimate
    from mok.ops import moe as moe
    from mok.simulation import simulate as simulate
    from mok.swap import swap_moe_layers as swap_moe_layers
    from mok.workspace import symm_empty as symm_empty


def __getattr__(name: str):
    if name in _EXPORTS:
        value = getattr(__getattr__(_EXPORTS[name]), name)
    elif name in _PURE_SUBMODULES:
        value = importlib.import_module(f"mok.{name}")
    elif name in _NATIVE_SUBMODULES:
        _native.load()  # first, for its message
        value = importlib.import_module(f"mok.{name}")
    elif name == "_C":
        value = _native.load()
    else:
        raise AttributeError(f"module 'mok' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PURE_SUBMODULES, *_NATIVE_SUBMODULES})


if _native.is_available():
    # All at once: `import mok` registers torch.ops.mok.*, and a graph under torch.compile never
    # meets the __getattr__ above.
    for _name in __all__:
        if _name not in globals():
            __getattr__(_name)
