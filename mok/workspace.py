"""Workspaces: the shared memory, barriers and scratch that the layers of one group work in.

A layer *declares* its workspace (cheap, no communication) and keeps the name, a string. The first
call *ensures* it: all ranks create it together, through the process group's store alone. Layers
with equal settings share one. Ops find it by its name in a registry of the process.
"""

import atexit
import contextlib
import math
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from mok import _C, _rendezvous
from mok._devices import describe_device as describe_device
from mok._workspace import DTYPES as _DTYPES
from mok._workspace import Spec as _Spec
from mok._workspace import Workspace as Workspace
from mok._workspace import closed_names as _closed
from mok._workspace import failures as _failed
from mok._workspace import lock as _lock
from mok._workspace import open_workspaces as _open
from mok._workspace import specs as _specs
from mok.errors import PeerAbortedError, WorkspaceClosedError

# Address space only: memory is taken as tensors are allocated.
_HOST_ARENA_BYTES = 1 << 30


def declare(
    group: dist.ProcessGroup | None,
    *,
    max_tokens: int,
    hidden_size: int,
    top_k: int,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    tag: str = "",
) -> str:
    """Remembers the settings of a workspace and returns its name; equal settings, equal name.

    Nothing is allocated and no peer is asked; `ensure` does that. `group=None` is one rank by
    itself. `max_tokens`, `hidden_size` (elements) and `top_k` (experts per token) are the largest
    of any call and equal on all ranks; `dtype` is torch.float32 or torch.bfloat16; `device` is
    where the calls run, the CPU unless given, and for "cuda" the current device. A `tag`, equal on
    all ranks, makes a workspace besides that of the other settings: two of them let two
    micro-batches be in flight.
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
        spec = _Spec(spec_group, max_tokens, hidden_size, top_k, dtype, arena, where, tag)
        stem = f"{spec_group.key}/T{max_tokens}-H{hidden_size}-K{top_k}-{_DTYPES[dtype]}"
        if where.type == "cuda":
            stem += f"-cuda{where.index}"
        if arena != default_arena:
            stem += f"-A{arena}"
        if tag:
            stem += f"-{tag}"
        name, generation = stem, 1
        # A closed workspace stays closed, a failed one failed; new layers get a new one.
        while name in _closed or name in _failed:
            generation += 1
            name = f"{stem}#{generation}"
        _specs[name] = spec
        return name


_num_new: dict[str, int] = {}


def declare_new(group: dist.ProcessGroup | None, **settings) -> str:
    """`declare` under a tag of its own: a workspace that no other layer shares.

    Ranks of a group declare their new workspaces in the same order.
    """
    with _lock:
        key = _rendezvous.group_of(group).key
        _num_new[key] = _num_new.get(key, 0) + 1
        return declare(group, tag=f"new{_num_new[key]}", **settings)


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


def check_if_open(name: str) -> None:
    """`Workspace.check` by name; does nothing if it is not open."""
    workspace = _open.get(name)
    if workspace is not None and not workspace.closed:
        workspace.check()


def is_open(name: str) -> bool:
    """Whether this process has created the workspace of this name and not closed it."""
    workspace = _open.get(name)
    return workspace is not None and not workspace.closed


def group_of(name: str) -> tuple[dist.ProcessGroup | None, int]:
    """The process group that a declared workspace belongs to (None: one rank), and this rank.

    Raises WorkspaceClosedError if none of this name was declared or its group was destroyed.
    """
    spec = _specs.get(name)
    if spec is None or (spec.group.num_ranks > 1 and spec.group.process_group() is None):
        raise _closed_error(name)
    return spec.group.process_group(), spec.group.rank


def device_of(name: str) -> torch.device:
    """The device that a workspace declared by this process is on."""
    return _specs[name].device


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
    with contextlib.suppress(RuntimeError):  # ended, closed, or its GPU is lost
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
