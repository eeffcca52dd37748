"""Workspaces: the shared memory, barriers and scratch that the layers of one group work in.

A layer *declares* its workspace (cheap, no communication) and keeps the name, a string. The first
call *ensures* it: all ranks create it together, through the process group's store alone. Layers
with equal settings share one. Ops find it by its name in a registry of the process.
"""

import atexit
import contextlib
import dataclasses
import math
import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from mok import _C, _rendezvous
from mok._devices import describe_device as describe_device
from mok.errors import PeerAbortedError, PeerTimeoutError, WorkspaceClosedError

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# Address space only: memory is taken as tensors are allocated.
_HOST_ARENA_BYTES = 1 << 30
_HOST = -1  # csrc/symm/heap.h: kHostDevice


@dataclasses.dataclass(frozen=True)
class _Spec:
    group: _rendezvous.Group
    max_tokens: int
    hidden_size: int
    top_k: int
    dtype: torch.dtype
    arena_bytes: int
    device: torch.device

    def settings(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        return self._core_settings() | {"device": self.device.type}

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
            "dtype": _DTYPES[self.dtype],
            "arena_bytes": self.arena_bytes,
        }


class Workspace:
    """One group's windows, barriers and scratch, shared by all layers of equal settings.

    Made by the first call of a layer (or `ensure`). Calls in one workspace are one after the
    other, in the same order on all ranks.
    """

    def __init__(self, name: str, spec: _Spec, core: _C.Workspace):
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
        _closed.add(self.name)
        _open.pop(self.name, None)
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


_lock = threading.RLock()
_specs: dict[str, _Spec] = {}
_open: dict[str, Workspace] = {}
_closed: set[str] = set()
_failed: dict[str, Exception] = {}


def declare(
    group: dist.ProcessGroup | None,
    *,
    max_tokens: int,
    hidden_size: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> str:
    """Remembers the settings of a workspace and returns its name; equal settings, equal name.

    Nothing is allocated and no peer is asked; `ensure` does that. `group=None` is one rank by
    itself. `max_tokens`, `hidden_size` (elements) and `top_k` (experts per token) are the largest
    of any call and equal on all ranks; `dtype` is torch.float32 or torch.bfloat16; `device` is
    where the calls run, the CPU unless given, and for "cuda" the current device.
    """
    for argument, value in (
        ("max_tokens", max_tokens),
        ("hidden_size", hidden_size),
        ("top_k", top_k),
    ):
        least = 0 if argument == "max_tokens" else 1
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{argument} is {value!r}, but must be an integer >= {least}.")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype}, but must be torch.float32 or torch.bfloat16.")
    with _lock:
        spec_group = _rendezvous.group_of(group)
        where = _workspace_device(device)
        default_arena = _HOST_ARENA_BYTES
        if where.type == "cuda":  # taken at once: room for x and dout of a call
            default_arena = 2 * max_tokens * hidden_size * dtype.itemsize
        arena = _arena_bytes(default_arena)
        spec = _Spec(spec_group, max_tokens, hidden_size, top_k, dtype, arena, where)
        stem = f"{spec_group.key}/T{max_tokens}-H{hidden_size}-K{top_k}-{_DTYPES[dtype]}"
        if where.type == "cuda":
            stem += f"-cuda{where.index}"
        if arena != default_arena:
            stem += f"-A{arena}"
        name, generation = stem, 1
        # A closed workspace stays closed, a failed one failed; new layers get a new one.
        while name in _closed or name in _failed:
            generation += 1
            name = f"{stem}#{generation}"
        _specs[name] = spec
        return name


def ensure(name: str) -> Workspace:
    """The workspace of this name, created by all ranks together at its first use.

    Ranks must create the workspaces of a group in the same order. Uses the group's store only, so
    it works while torch traces. Raises WorkspaceClosedError; PeersNotLocalError (on all ranks
    alike); SymmetricHeapError naming the ranks, what is missing and the setting to change: a
    creation that failed raises the same error again. PeerAbortedError if a peer called `abort`;
    the next attempt works.
    """
    workspace = _open.get(name)
    if workspace is not None and not workspace.closed:
        return workspace
    with _lock:
        workspace = _open.get(name)
        if workspace is None:
            workspace = _open[name] = _create(name)
    if workspace.closed:
        raise _closed_error(name)
    return workspace


def get(name: str) -> Workspace:
    """The open workspace of this name; raises WorkspaceClosedError if there is none."""
    workspace = _open.get(name)
    if workspace is None or workspace.closed:
        raise _closed_error(name)
    return workspace


def all_open() -> list[Workspace]:
    """The workspaces that this process has created and not closed."""
    return [workspace for workspace in _open.values() if not workspace.closed]


def abort(name: str, reason: str) -> None:
    """Makes the peers raise PeerAbortedError(reason) in the call that this rank cannot make.

    For a rank that raises before its op ran: the peers are in that op, or will be. Waits for
    nobody, also when the workspace is still to be created (the peers' `ensure` raises then), and
    raises nothing: the caller has its own error. The next call works. On a GPU, where the peers are
    told in the order of the current stream and learn of it only after their call has returned, no
    call works any more: all ranks' workspaces have ended.
    """
    with _lock:
        spec = _specs.get(name)
        if spec is None or name in _failed or name in _closed:
            return
        workspace = _open.get(name)
        if workspace is None:
            _rendezvous.abort(spec.group, spec.settings(), reason)
            return
    with contextlib.suppress(PeerAbortedError, PeerTimeoutError, WorkspaceClosedError):
        workspace._core.abort(reason, _current_stream(spec.device))


def close(name: str, timeout_s: float | None = None) -> None:
    """`Workspace.close` by name; does nothing if it is not open."""
    workspace = _open.get(name)
    if workspace is not None:
        workspace.close(timeout_s)


def symm_empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | None = None,
    workspace: Workspace | str | None = None,
) -> torch.Tensor:
    """An uninitialised tensor in a workspace's arena; as an input it need not be copied.

    Without `workspace`, the only open one of `group` is taken, or else the only one declared, which
    all ranks create together. `dtype` is the workspace's unless given. Ranks may
    allocate differently. Memory goes back when the tensor's storage dies, also after the
    workspace was closed; on a GPU it may be handed out again at once, so that work on other streams
    that still reads it has to be waited for first. Raises SymmetricHeapError when the arena is full
    (`MOK_ARENA_BYTES`; on a GPU it holds an x and a dout of the largest call unless set).
    """
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    if workspace is None:
        workspace = _only_workspace_of(group)
    if isinstance(workspace, str):
        workspace = ensure(workspace)
    dtype = workspace.dtype if dtype is None else dtype
    if any(extent < 0 for extent in shape):
        raise ValueError(f"size is {tuple(shape)}, but no extent may be negative.")
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype, device=workspace.device)
    buffer = workspace._core.arena_allocate(count * dtype.itemsize)
    if workspace.device.type == "cuda":
        return torch.as_tensor(buffer, device=workspace.device).view(dtype).view(shape)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def _only_workspace_of(group: dist.ProcessGroup | None) -> str:
    with _lock:
        key = _rendezvous.group_of(group).key
        names = [name for name, spec in _specs.items() if spec.group.key == key]
        names = [name for name in names if name not in _closed and name not in _failed]
        names = [name for name in names if name in _open] or names
    if len(names) != 1:
        found = "none is declared" if not names else f"there are {len(names)}: {', '.join(names)}"
        raise ValueError(
            f"group is {key}, but for it {found}; build the layer with max_tokens first, or pass "
            "workspace=..., one of the group's workspaces."
        )
    return names[0]


def _arena_bytes(default: int) -> int:
    text = os.environ.get("MOK_ARENA_BYTES", "")
    if not text:
        return default
    if not text.isdecimal():
        raise ValueError(f"MOK_ARENA_BYTES is {text!r}, but must be a whole number of bytes.")
    return int(text)


def _workspace_device(device: torch.device | str | None) -> torch.device:
    where = torch.device("cpu" if device is None else device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {where}, but must be the CPU or a CUDA device.")
    if where.type == "cuda" and where.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if where.type == "cpu" else where


def _current_stream(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream


def _closed_error(name: str) -> WorkspaceClosedError:
    return WorkspaceClosedError(
        f"workspace {name} is closed or was never created; build the layer anew for a new one."
    )


def _create(name: str) -> Workspace:
    if name in _failed:
        raise _failed[name].with_traceback(None)
    spec = _specs.get(name)
    if spec is None or name in _closed:
        raise _closed_error(name)
    try:
        core = _rendezvous.create(
            spec.group,
            spec.settings(),
            lambda: spec.new_core(name),
            _C.default_timeout(),
            confirm=spec.device.type == "cuda",
        )
    except PeerAbortedError:
        raise  # of this call only
    except Exception as error:
        _failed[name] = error
        raise
    core.register()
    return Workspace(name, spec, core)


@atexit.register
def _close_all() -> None:
    for workspace in list(_open.values()):
        workspace.close(0)
