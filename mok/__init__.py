"""mok: Mixture-of-Experts layers for training, expert-parallel, fused and deterministic.

Importing this package always works. Where its compiled half cannot be used, touching a name that
needs it raises `ImportError` with one line: what was built, what was found and what to do.
"""

import importlib

from mok import _native
from mok._version import __version__

_EXPORTS = {
    "MoELayer": "layer",
    "PeerAbortedError": "errors",
    "PeerTimeoutError": "errors",
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
