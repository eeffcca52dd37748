"""What the ranks of a group tell each other before a layer's first call.

Groups enter by name, as in torch's functional collectives: a name survives deepcopy and pickling.
While Dynamo traces, `run_at_trace_time` functions run for real and their results are constants of
the graph; `run_eagerly` functions break the graph. A failure is told to the peers by the latter,
once: what raises while Dynamo traces is run again eagerly. (Not so with fullgraph=True: there the
error ends the compilation, and the peers time out.)

Nothing here imports Dynamo before somebody compiles: it would triple the time `import mok` takes.
"""

import functools
import sys

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from mok import workspace
from mok.errors import PeerAbortedError

_agreed_max_tokens: dict[str, int] = {}


def run_at_trace_time(function):
    """Like `torch.compiler.assume_constant_result`."""
    function._dynamo_marked_constant = True
    return function


def run_eagerly(function):
    """Like `torch.compiler.disable`."""

    @functools.wraps(function)
    def wrapper(*args):
        dynamo = sys.modules.get("torch._dynamo")
        return (function if dynamo is None else dynamo.disable(function))(*args)

    wrapper._torchdynamo_disable = True
    return wrapper


@run_at_trace_time
def resolve_group(group_name: str) -> dist.ProcessGroup:
    """The process group of that name; ValueError if this process has none."""
    try:
        return _resolve_process_group(group_name)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"there is no process group named {group_name!r} in this process, which the layer was "
            "made for: create the groups in the same order as there, before the first call"
        ) from error


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether the group is still one of this process: neither destroyed nor one of another job."""
    try:
        return _resolve_process_group(group.group_name) is group
    except (RuntimeError, ValueError):
        return False


@run_at_trace_time
def agreed_max_tokens(layer_key: str) -> int | None:
    """What `agree_max_tokens` found for this layer, or None."""
    return _agreed_max_tokens.get(layer_key)


def _agree_max_tokens(
    layer_key: str, group_name: str, num_tokens: int, failure: str | None = None
) -> None:
    """One collective over the group: the largest num_tokens of all ranks, kept under layer_key.

    A rank that failed before it could call its layer passes the reason as `failure`: then its peers
    raise PeerAbortedError here and nothing is kept.
    """
    group = resolve_group(group_name)
    replies = [None] * dist.get_world_size(group)
    dist.all_gather_object(replies, (num_tokens, failure), group=group)
    if failure is not None:
        return
    for rank, (_, reason) in enumerate(replies):
        if reason is not None:
            raise PeerAbortedError(f"rank {rank} of group {group_name!r} gave up: {reason}")
    largest = max(tokens for tokens, _ in replies)
    if largest == 0:
        raise ValueError(
            "max_tokens is None and no rank has a token in the layer's first call, whose largest "
            "number of tokens it would be: pass max_tokens"
        )
    _agreed_max_tokens[layer_key] = largest


agree_max_tokens = run_eagerly(_agree_max_tokens)


@run_eagerly
def abort_call(
    group_name: str,
    max_tokens: int,
    hidden_size: int,
    top_k: int,
    dtype: torch.dtype | None,
    device: torch.device,
    tag: str,
    reason: str,
) -> None:
    """Makes the peers raise PeerAbortedError(reason) in the call that this rank cannot make.

    dtype is the call's compute dtype; None if this rank does not know it: then it is taken from the
    workspaces that the group works in.
    """
    names = {
        each: workspace.declare(
            resolve_group(group_name),
            max_tokens=max_tokens,
            hidden_size=hidden_size,
            top_k=top_k,
            dtype=each,
            device=device if device.type in ("cpu", "cuda") else None,
            tag=tag,
        )
        for each in (torch.bfloat16, torch.float32)
    }
    if dtype is None:
        affected = [name for name in names.values() if workspace.is_open(name)] or [
            names[torch.bfloat16]
        ]
    else:
        affected = [names[dtype]]
    for name in affected:
        workspace.abort(name, reason)


def abort_only_workspace(group_name: str, reason: str) -> None:
    """`abort_call` for a rank that does not know which call it is: only the group's one workspace
    can be meant. With several, or none yet, the peers learn of it by their timeout."""
    group = resolve_group(group_name)
    names = [each.name for each in workspace.all_open() if each._spec.group.is_of(group)]
    if len(names) == 1:
        workspace.abort(names[0], reason)


def agree_at_trace_time(layer_key: str, group_name: str, x_TH: torch.Tensor) -> None:
    """`agree_max_tokens` while Dynamo traces: the number of tokens may be symbolic there."""
    from torch._dynamo.comptime import comptime

    comptime(_agree_from_trace)


def _agree_from_trace(context) -> None:
    num_tokens = context.get_local("x_TH").size(0)
    if isinstance(num_tokens, torch.SymInt):
        num_tokens = num_tokens.node.hint
    _agree_max_tokens(
        context.get_local("layer_key").as_python_constant(),
        context.get_local("group_name").as_python_constant(),
        num_tokens,
    )
