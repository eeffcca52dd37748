"""Which backend runs a call, and why: one rule, in `choose`.

megakernel   one kernel forward, one backward, over GPUs that map each other's memory
cpu          the executor in C++, over processes of one machine
collective   torch.distributed's all-to-all and torch's products: anywhere
"""

import dataclasses
import warnings
import weakref

import torch
import torch.distributed as dist

from mok import _group, _kernels, workspace
from mok.errors import PeersNotLocalError
from mok.shapes import BACKENDS


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a call takes and why."""

    backend: str  # "megakernel", "cpu" or "collective"
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


# Why the ranks of a group cannot map each other's memory, as the first call has found out.
_not_local: dict[str, str] = {}
_groups_not_local: dict[str, weakref.ref] = {}


@_group.run_at_trace_time
def forget_destroyed(group_name: str) -> None:
    """Names of destroyed process groups come again: what was found of such a one does not hold."""
    known = _groups_not_local.get(group_name)
    if known is not None and known() is not _group.resolve_group(group_name):
        del _groups_not_local[group_name], _not_local[group_name]


def choose(
    requested: str,
    device_type: str,
    group_name: str | None,
    *,
    dtype: torch.dtype | None = None,
    needs_gradients: bool = True,
) -> Choice:
    """The rule. It depends on what is equal on all ranks only, so that all choose alike.

    Raises:
        NotImplementedError: for a backend that cannot run on this device in this build.
    """
    if requested == "collective":
        return Choice("collective", 'asked for by backend="collective"')
    device_type = "cpu" if device_type == "meta" else device_type
    if requested == "cpu" and device_type != "cpu":
        raise _unavailable(requested, device_type, "it runs on CPU tensors")
    if device_type == "cpu":
        if requested == "megakernel":
            raise _unavailable(requested, device_type, "it runs on CUDA tensors")
        if requested == "cpu":
            return Choice("cpu", 'asked for by backend="cpu"')
        if group_name in _not_local:
            return Choice("collective", _not_local[group_name])
        if group_name is None:
            return Choice("cpu", "CPU tensors of one rank")
        return Choice("cpu", "CPU tensors, and ranks that can map each other's memory")
    reason = f"this build of mok has no kernels of the layer for {device_type!r} tensors"
    if device_type == "cuda":
        reason = _kernels.why_not(dtype, needs_gradients)
    if requested == "megakernel":
        if reason is not None:
            raise _unavailable(requested, device_type, reason)
        return Choice("megakernel", 'asked for by backend="megakernel"')
    if reason is None and group_name in _not_local:
        reason = _not_local[group_name]
    if reason is not None:
        return Choice("collective", reason)
    if group_name is None:
        return Choice("megakernel", "CUDA tensors of one rank")
    return Choice("megakernel", "CUDA tensors, and ranks that can map each other's memory")


def _unavailable(backend: str, device_type: str, reason: str) -> NotImplementedError:
    return NotImplementedError(
        f"backend {backend!r} cannot run here for {device_type!r} tensors ({reason}): use "
        '"auto", which takes what there is, or "collective".'
    )


@_group.run_at_trace_time
def runs_collectively(
    requested: str,
    device_type: str,
    group_name: str | None,
    workspace_name: str | None,
    dtype: torch.dtype | None,
    needs_gradients: bool,
) -> bool:
    """Whether the call goes to the collective backend; creates the workspace to find out whether
    the ranks are local, together with all of them, and warns once where they are not."""
    options = {"dtype": dtype, "needs_gradients": needs_gradients}
    choice = choose(requested, device_type, group_name, **options)
    if choice.backend == "collective":
        if device_type != "cpu" and requested == "auto":
            _warn_once(device_type, choice.reason)
        return True
    if requested == "auto" and group_name is not None and workspace_name is not None:
        try:
            workspace.ensure(workspace_name)
        except PeersNotLocalError as error:
            _not_local[group_name] = str(error)
            _groups_not_local[group_name] = weakref.ref(_group.resolve_group(group_name))
            _warn_once(group_name, str(error))
            return True
    return False


_warned: set[str] = set()


def _warn_once(key: str, reason: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(
            f'mok falls to the collective backend: {reason} Pass backend="collective" to choose it '
            "without this warning.",
            RuntimeWarning,
            stacklevel=2,
        )


def explain(
    layer=None,
    *,
    backend: str = "auto",
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
) -> Choice:
    """Which backend a layer's calls take (or calls with these arguments), and why.

    Asks no peer: whether the ranks of a group can map each other's memory is known after the first
    call only, and assumed before. A call is taken to need gradients.

        print(mok.explain(layer))    # cpu: CPU tensors of one rank

    Args:
        layer: a `mok.MoELayer`; all other arguments but dtype are taken from it.
        backend, device, group: as in `mok.moe`.
        dtype: of x; None is BF16. GPU kernels take no FP32 tokens.

    Raises:
        NotImplementedError: if the backend asked for cannot run there.
        ValueError: for a backend that does not exist.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: it must be one of {BACKENDS}")
    if layer is not None:
        device_type = layer.experts.w_gate.device.type
        return choose(layer.requested_backend, device_type, layer.group_name, dtype=dtype)
    num_ranks = 1 if group is None else dist.get_world_size(group)
    name = group.group_name if num_ranks > 1 else None
    return choose(backend, torch.device(device).type, name, dtype=dtype)
