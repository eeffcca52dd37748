"""How the ranks of a process group come together in a workspace: through the group's store alone.

No tensor collectives: a workspace may have to be created while torch traces with fake tensors.
"""

import contextlib
import json
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mok.errors import PeerAbortedError, PeerTimeoutError, SymmetricHeapError


class Group:
    """The ranks of one process group as this process sees them; `None` is one rank by itself."""

    def __init__(self, process_group: dist.ProcessGroup | None, key: str):
        self.key = key
        self.rank = 0 if process_group is None else process_group.rank()
        self.num_ranks = 1 if process_group is None else process_group.size()
        # Equal on all ranks, who create the workspaces of a group in one order.
        self.num_created = 0
        self._reference = None if process_group is None else weakref.ref(process_group)

    def is_of(self, process_group: dist.ProcessGroup | None) -> bool:
        if self._reference is None:
            return process_group is None
        return process_group is not None and self._reference() is process_group

    def process_group(self) -> dist.ProcessGroup | None:
        """None for one rank by itself, and for a group that was destroyed."""
        return None if self._reference is None else self._reference()

    def store(self) -> dist.Store:
        process_group = self.process_group()
        if process_group is None:
            raise SymmetricHeapError(
                f"the process group {self.key} was destroyed before its workspace was created; "
                "build the layer on a live group."
            )
        try:
            return process_group.get_group_store()
        except (AttributeError, RuntimeError):
            return dist.distributed_c10d._get_process_group_store(process_group)


_WAIT_SLICE_S = 1.0

_groups: dict[str, Group] = {}


def group_of(process_group: dist.ProcessGroup | None) -> Group:
    """What this process knows of a process group; the same object for the same living group."""
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"group is {process_group!r}, but must be None or a torch.distributed.ProcessGroup "
            "that this rank belongs to."
        )
    stem = "local" if process_group is None else f"group-{process_group.group_name}"
    key, generation = stem, 1
    # Names of destroyed process groups come again.
    while key in _groups and not _groups[key].is_of(process_group):
        generation += 1
        key = f"{stem}@{generation}"
    if key not in _groups:
        _groups[key] = Group(process_group, key)
    return _groups[key]


def create(
    group: Group,
    settings: dict[str, Any],
    new_core: Callable[[], Any],
    timeout_s: float,
    *,
    confirm: bool = False,
) -> Any:
    """Makes this rank's window by `new_core` and maps the peers'. Collective.

    The ranks compare `settings` and learn of each other's failures before they touch memory; with
    `confirm` they also learn whether all could map all windows, before any of them returns.
    """
    if group.num_ranks == 1:
        core = new_core()
        core.connect([], 0.0)
        return core
    store = group.store()
    prefix = _next_prefix(group)
    mine = f"{prefix}/{group.rank}"
    try:
        core = new_core()
    except Exception as error:
        store.set(mine, json.dumps({"settings": settings, "error": str(error)}))
        raise
    try:
        store.set(mine, json.dumps({"settings": settings, "address": core.address()}))
        entries = _gather(store, prefix, "", group, timeout_s)
        _check(entries, group)
        try:
            core.connect([entry["address"] for entry in entries], timeout_s)
        except Exception as error:
            if confirm:
                store.set(f"{mine}/mapped", json.dumps(str(error)))
            raise
        if confirm:
            store.set(f"{mine}/mapped", json.dumps(None))
            _check_mapped(_gather(store, prefix, "/mapped", group, timeout_s))
    except Exception:
        core.close(0)
        raise
    # All peers have our window, so they have read this; a later group may use the same store.
    with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can
        store.delete_key(mine)
        # Who reads the confirmations last removes them.
        if confirm and store.add(f"{prefix}/confirmed", 1) == group.num_ranks:
            for rank in range(group.num_ranks):
                store.delete_key(f"{prefix}/{rank}/mapped")
            store.delete_key(f"{prefix}/confirmed")
    return core


def abort(group: Group, settings: dict[str, Any], reason: str) -> None:
    """In the place of this rank's `create`: the peers' raises PeerAbortedError. Does not wait."""
    if group.num_ranks == 1:
        return
    key = f"{_next_prefix(group)}/{group.rank}"
    group.store().set(key, json.dumps({"settings": settings, "aborted": reason}))


def _next_prefix(group: Group) -> str:
    prefix = f"mok/workspace/{group.num_created}"
    group.num_created += 1
    return prefix


def _gather(
    store: dist.Store, prefix: str, suffix: str, group: Group, timeout_s: float
) -> list[Any]:
    keys = [f"{prefix}/{rank}{suffix}" for rank in range(group.num_ranks)]
    deadline = time.monotonic() + timeout_s
    while True:
        start = time.monotonic()
        part = max(0.01, min(deadline - start, _WAIT_SLICE_S))
        try:
            # In slices, between which Python sees a Ctrl-C.
            store.wait(keys, timedelta(seconds=part))
            break
        except Exception as error:  # stores do not agree on the class of a time-out
            in_time = time.monotonic() - start < part / 2
            if not in_time and time.monotonic() < deadline:
                continue
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise (SymmetricHeapError if in_time else PeerTimeoutError)(
                f"rank {group.rank} of {group.key} waited {timeout_s:g} s for rank(s) "
                f"{', '.join(missing)} to create the workspace with it; all ranks of the group "
                "must make the same first call (MOK_TIMEOUT_S sets the time)."
            ) from error
    return [json.loads(store.get(key)) for key in keys]


def _check(entries: list[dict], group: Group) -> None:
    for rank, entry in enumerate(entries):
        if "aborted" in entry:
            raise PeerAbortedError(
                f"the call that creates the workspace was aborted by rank {rank}: "
                f"{entry['aborted']}"
            )
    for rank, entry in enumerate(entries):
        for setting, value in entries[0]["settings"].items():
            if entry["settings"][setting] != value:
                raise SymmetricHeapError(
                    f"{setting} is {entry['settings'][setting]} on rank {rank} and {value} on rank "
                    f"0 of {group.key}, but must be equal on all ranks."
                )
    for rank, entry in enumerate(entries):
        if "error" in entry:
            raise SymmetricHeapError(f"rank {rank} could not create its window: {entry['error']}")


def _check_mapped(failures: list[str | None]) -> None:
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise SymmetricHeapError(f"rank {rank} could not map its peers' windows: {failure}")
