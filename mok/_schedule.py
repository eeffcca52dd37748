"""`torch.ops.mok.build_schedule`: the plan of this rank's rows as tensors, for `mok.functional`.

The layer's ops build the plan themselves, from the same ids; this one is for callers that look at
it. Shapes: T tokens of this rank, K experts per token, E experts in all R ranks.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mok import _native, workspace
from mok.shapes import PAD, worst_case_rows

_native.load()


class BuiltSchedule(NamedTuple):
    """Where the rows of this rank's experts come from, expert by expert.

    Rows of one expert are ordered by (source rank, slot) and padded to a multiple of 128.
    """

    peer_rank: Tensor  # int32 [capacity]: the row's home rank, -1 on padding and behind the end
    peer_token_idx: Tensor  # int32 [capacity]: token * K + choice there, -1 likewise
    num_tokens: Tensor  # int32 [1]: rows in use, padding included
    tokens_per_expert: Tensor  # int32 [E/R]: routes of each local expert, without padding
    top_experts: Tensor  # [T, K]: the ids it was built from
    num_experts: int  # E


_library = torch.library.Library("mok", "FRAGMENT")
_library.define(
    "build_schedule(Tensor top_experts, str workspace, int num_experts, int num_ranks, "
    "int max_tokens) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def build(
    top_experts: Tensor, workspace_name: str, num_experts: int, num_ranks: int, max_tokens: int
) -> BuiltSchedule:
    """The schedule for ids [T, K] of all ranks; a collective."""
    tensors = torch.ops.mok.build_schedule(
        top_experts, workspace_name, num_experts, num_ranks, max_tokens
    )
    return BuiltSchedule(*tensors, top_experts, num_experts)


def _empty(top_experts, num_experts, num_ranks, max_tokens) -> list[Tensor]:
    capacity = worst_case_rows(num_ranks, num_experts, top_experts.shape[1], max_tokens)
    sizes = (capacity, capacity, 1, num_experts // num_ranks)
    return [top_experts.new_empty(size, dtype=torch.int32) for size in sizes]


def _build(top_experts, workspace_name, num_experts, num_ranks, max_tokens):
    group, rank = workspace.group_of(workspace_name)
    top_k = top_experts.shape[1]
    is_route_TK = (top_experts >= 0) & (top_experts < num_experts)
    ids = torch.full((max_tokens, top_k), -1, dtype=torch.int32, device=top_experts.device)
    ids[: len(top_experts)] = torch.where(is_route_TK, top_experts, -1)
    ids_RTK = _of_all_ranks(ids, num_ranks, group)
    results = _empty(top_experts, num_experts, num_ranks, max_tokens)
    fill_schedule(ids_RTK, rank, num_experts, *results)
    return tuple(results)


def refuse(workspace_name: str, num_ranks: int, max_tokens: int, top_k: int) -> None:
    """Takes part in the peers' `build` without routes: this rank cannot make its own."""
    group, _ = workspace.group_of(workspace_name)
    device = workspace.device_of(workspace_name)
    ids = torch.full((max_tokens, top_k), -1, dtype=torch.int32, device=device)
    _of_all_ranks(ids, num_ranks, group)


def _of_all_ranks(ids: Tensor, num_ranks: int, group: dist.ProcessGroup | None) -> Tensor:
    ids_RTK = ids.new_empty(num_ranks, *ids.shape)
    if num_ranks > 1:
        dist.all_gather(list(ids_RTK.unbind()), ids, group=group)
    else:
        ids_RTK[0] = ids
    return ids_RTK


def fill_schedule(
    ids_RTK: Tensor, rank: int, num_experts: int, peer_rank, peer_slot, num_rows, counts_E
) -> None:
    """Writes the plan of `rank` for the ids of all ranks; sizes do not depend on the ids.

    Equals csrc/layout/plan.h, by sorting: rows are ordered by (expert, source rank, slot).
    """
    num_ranks = len(ids_RTK)
    num_local = num_experts // num_ranks
    local_N = ids_RTK.reshape(-1).long() - rank * num_local
    local_N = torch.where((local_N >= 0) & (local_N < num_local), local_N, num_local)
    expert_N, order_N = torch.sort(local_N, stable=True)
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=local_N.device)
    counts.scatter_add_(0, local_N, torch.ones_like(local_N))
    padded = (counts[:-1] + PAD - 1) // PAD * PAD
    begin = torch.cumsum(padded, 0) - padded
    first = torch.cumsum(counts, 0) - counts
    index_N = torch.arange(len(local_N), device=local_N.device) - first[expert_N]
    # What is no row of this rank goes to one element behind the end.
    is_row_N = expert_N < num_local
    row_N = torch.where(is_row_N, torch.cat([begin, begin[:1]])[expert_N] + index_N, len(peer_rank))
    slots = local_N.numel() // num_ranks
    for target, source in ((peer_rank, order_N // slots), (peer_slot, order_N % slots)):
        rows = target.new_full((len(target) + 1,), -1)
        rows.scatter_(0, row_N, torch.where(is_row_N, source, -1).to(target.dtype))
        target.copy_(rows[:-1])
    num_rows.copy_(padded.sum())
    counts_E.copy_(counts[:-1])


def _build_fake(top_experts, workspace_name, num_experts, num_ranks, max_tokens):
    return tuple(_empty(top_experts, num_experts, num_ranks, max_tokens))


_library.impl("build_schedule", _build, "CompositeExplicitAutograd")
torch.library.register_fake("mok::build_schedule", _build_fake, lib=_library)
# The peers wait in it also where a rank uses none of its results.
torch.fx.node.has_side_effect(torch.ops.mok.build_schedule.default)
