"""Loads mok's compiled half, or says in one line why it cannot be loaded here."""

import functools
import importlib
import platform
import sys
from pathlib import Path
from types import ModuleType

MIN_TORCH = (2, 11)
_PACKAGE = Path(__file__).parent


class ExtensionUnavailableError(ImportError):
    """The compiled half cannot be used: one line on what was built, found and what to do."""


def load() -> ModuleType:
    """Registers `torch.ops.mok.*`, then returns `mok._C`.

    Raises ExtensionUnavailableError, each time with the same one-line message.
    """
    outcome = _load_once()
    if isinstance(outcome, str):
        raise ExtensionUnavailableError(outcome)
    return outcome


def is_available() -> bool:
    """Whether `load()` would succeed."""
    return not isinstance(_load_once(), str)


def cuda_archs() -> tuple[str, ...]:
    """What this copy's GPU code was built for, as in ("90a",); empty without any."""
    info = _build_info()
    return () if info is None else tuple(info.CUDA_ARCHS)


@functools.cache
def _load_once() -> ModuleType | str:
    info = _build_info()
    minimum = ".".join(map(str, MIN_TORCH))
    try:
        import torch
    except ImportError as error:
        return (
            f"mok needs torch >= {minimum}, and importing torch failed: {_one_line(error)}; "
            "install torch first."
        )
    found = _describe_found(torch)
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
        return (
            f"mok needs torch >= {minimum}; found {found}: install a newer torch, then rebuild mok."
        )
    if info is None:
        return (
            f"the compiled half of mok is not in {_PACKAGE}; found {found}: run "
            "'pip install --no-build-isolation .' in mok's source folder."
        )
    try:
        module = importlib.import_module("mok._C")
        torch.ops.load_library(str(_PACKAGE / "_ops.so"))
    except (ImportError, OSError) as error:
        return (
            f"this copy of mok was built for {_describe_built(info)}; found {found}: "
            f"{_one_line(error)}; rebuild it here with 'pip install --no-build-isolation "
            "--force-reinstall --no-deps .' in mok's source folder."
        )
    return module


def _build_info() -> ModuleType | None:
    try:
        return importlib.import_module("mok._build_info")
    except ModuleNotFoundError:
        return None


def _describe_built(info: ModuleType) -> str:
    archs = " ".join(f"sm_{arch}" for arch in info.CUDA_ARCHS)
    cuda = f"CUDA {info.CUDA_VERSION} ({archs})" if info.CUDA_VERSION else "without CUDA"
    return f"torch {info.TORCH_VERSION}, {cuda}, Python {info.PYTHON_VERSION}, {info.PLATFORM}"


def _describe_found(torch: ModuleType) -> str:
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    machine = f"{sys.platform}-{platform.machine()}"
    return f"torch {torch.__version__}, {cuda}, Python {platform.python_version()}, {machine}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".")
