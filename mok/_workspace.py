"""A workspace as an object, and the registry that ops find it in by name."""

import dataclasses
import threading
from typing import Any

import torch

from mok import _C, _rendezvous
from mok.errors import PeerTimeoutError

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_HOST = -1  # csrc/symm/heap.h: kHostDevice


@dataclasses.dataclass(frozen=True)
class Spec:
    group: _rendezvous.Group
    max_tokens: int
    hidden_size: int
    top_k: int
    dtype: torch.dtype
    arena_bytes: int
    device: torch.device
    tag: str

    def settings(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        return self._core_settings() | {"device": self.device.type, "tag": self.tag}

    def new_core(self, name: str) -> _C.Workspace:
        index = _HOST if self.device.type == "cpu" else self.device.index
        group = self.group
        return _C.Workspace(
            name, group.rank, group.num_ranks, **self._core_settings(), device=index
        )

    def _core_settings(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "hidden_size": self.hidden_size,
            "top_k": self.top_k,
            "dtype": DTYPES[self.dtype],
            "arena_bytes": self.arena_bytes,
        }


class Workspace:
    """One group's windows, barriers and scratch, shared by all layers of equal settings.

    Made by the first call of a layer (or `ensure`). Calls in one workspace are one after the
    other, in the same order on all ranks.
    """

    def __init__(self, name: str, spec: Spec, core: _C.Workspace):
        self._spec = spec
        self._core = core
        self.name = name

    @property
    def rank(self) -> int:
        return self._spec.group.rank

    @property
    def num_ranks(self) -> int:
        return self._spec.group.num_ranks

    @property
    def max_tokens(self) -> int:
        return self._spec.max_tokens

    @property
    def hidden_size(self) -> int:
        return self._spec.hidden_size

    @property
    def top_k(self) -> int:
        return self._spec.top_k

    @property
    def dtype(self) -> torch.dtype:
        return self._spec.dtype

    @property
    def device(self) -> torch.device:
        return self._spec.device

    @property
    def backing(self) -> str:
        """What the windows are made of: "memfd", or "memory" for one rank.

        On a GPU "fabric" or "posix_fd" for several ranks (`describe_device` says which and why).
        """
        return self._core.backing

    @property
    def memory_bytes(self) -> int:
        """What this rank holds: its window, tensors in the arena, and scratch for temporaries."""
        return self._core.fixed_bytes + self._core.arena_in_use + self._core.scratch_bytes

    @property
    def closed(self) -> bool:
        return self._core.closed

    def check(self) -> None:
        """Raises what has made this workspace unusable, if anything has.

        Raises PeerTimeoutError, PeerAbortedError or WorkspaceClosedError. Waits for nothing: on a
        GPU it knows what kernels have found so far, also after the CUDA context was lost.
        """
        self._core.check()

    def set_timeout(self, seconds: float) -> None:
        """How long one barrier of a call may wait (at first `MOK_TIMEOUT_S`, else 600 s).

        On a GPU this holds for barriers that begin from now on, those of captured graphs included.
        """
        self._core.set_timeout(seconds)

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a contiguous tensor lies in this rank's window."""
        return self._core.contains(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def close(self, timeout_s: float | None = None) -> None:
        """Frees the memory. Collective: waits until the peers close too, at most `timeout_s`.

        Tensors of `symm_empty` stay valid and are freed when they die. Closing again does nothing.
        On a GPU it waits for this rank's own work instead, for no peer (they keep what they have
        mapped); with timeout_s=0 barriers that still wait give up.
        Raises PeerTimeoutError naming the ranks that did not close; here it is closed even then.
        """
        if timeout_s is not None and not timeout_s >= 0:
            raise ValueError(f"timeout_s is {timeout_s}, but must be 0 or more seconds.")
        seconds = _C.default_timeout() if timeout_s is None else timeout_s
        closed_names.add(self.name)
        open_workspaces.pop(self.name, None)
        missing = self._core.close(seconds)
        if missing:
            raise PeerTimeoutError(
                f"rank {self.rank} closed workspace {self.name}, but rank(s) "
                f"{', '.join(map(str, missing))} did not within {seconds:g} s; close it on all "
                "ranks, or pass timeout_s=0 not to wait."
            )

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, kind, value, traceback) -> None:
        # A rank that leaves by an exception does not wait for peers, who may be waiting for it.
        self.close(None if kind is None else 0)

    def __deepcopy__(self, memo) -> "Workspace":
        return self

    def __reduce__(self):
        raise TypeError("a Workspace belongs to its process and cannot be pickled.")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._core.window_bytes / 2**20:.1f} MiB per window"
        return (
            f"Workspace({self.name!r}, rank {self.rank} of {self.num_ranks}, "
            f"backing={self.backing!r}, {state})"
        )


lock = threading.RLock()
specs: dict[str, Spec] = {}
open_workspaces: dict[str, Workspace] = {}
closed_names: set[str] = set()
failures: dict[str, Exception] = {}
