"""mok: Mixture-of-Experts layers for training, expert-parallel, fused and deterministic.

Importing this package always works. Where its compiled half cannot be used, touching a name that
needs it raises `ImportError` with one line: what was built, what was found and what to do.
"""

import importlib

from mok import _native
from mok._version import __version__

_EXPORTS = {
    "MoELayer": "mok.layer",
    "PeerAbortedError": "mok.errors",
    "PeerTimeoutError": "mok.errors",
    "WorkspaceClosedError": "mok.errors",
    "moe": "mok.ops",
    "symm_empty": "mok.workspace",
}
_SUBMODULES = ("errors", "experts", "layer", "ops", "reference", "router", "workspace")

__all__ = ["__version__", "reference", *_EXPORTS]

if _native.is_available():
    # `import mok` is all that `torch.ops.mok.*` asks of its users.
    importlib.import_module("mok.ops")


def __getattr__(name: str):
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"mok.{name}")
    elif name == "_C":
        value = _native.load()
    else:
        raise AttributeError(f"module 'mok' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
