"""Who sends which row to whom in the collective backend, and the two exchanges.

Each direction copies a row once where there is one rank, and once on either side of the all-to-all
where there are several: sorting, padding and the way back are one index each.

Shapes: T tokens of this rank, K experts per token, E experts in all R ranks, N rows of this rank's
experts with padding.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mok._grouped import Segments, make_segments


@dataclass(frozen=True)
class Routes:
    """Where each route of this rank, and each that comes to it, lies. Indices are int64."""

    slots: Tensor  # this rank's routes (token * K + choice), by (expert, slot)
    no_routes: Tensor  # the other slots
    top_k: int
    send: list[int]  # how many routes go to each rank
    receive: list[int]  # how many come from each rank
    row_of_received: Tensor  # the row of each received route, in the order of arrival
    received_of_row: Tensor  # the other way [N]; 0 on padding
    padding: Tensor  # the rows that are padding
    position_of_slot: Tensor  # of each slot among `slots` [T K]; 0 where there is no route
    segments: Segments
    group: dist.ProcessGroup | None

    def tokens_there(self, values_T: Tensor) -> Tensor:
        """What this rank's tokens have, at their experts: rows [N, ...], 0 on padding."""
        return self._there(values_T, self.slots // self.top_k)

    def slots_there(self, values_S: Tensor) -> Tensor:
        """The same for values of slots [T K, ...]."""
        return self._there(values_S, self.slots)

    def _there(self, values: Tensor, home: Tensor) -> Tensor:
        if self.group is None:
            rows = _select(values, _select(home, self.received_of_row))
        else:
            received = self._exchange(values.index_select(0, home), self.send, self.receive)
            rows = _select(received, self.received_of_row)
        return rows.index_fill_(0, self.padding, 0)

    def back(self, rows_N: Tensor) -> Tensor:
        """Rows of this rank's experts, at home: one entry per slot [T K, ...], 0 for no route."""
        if self.group is None:
            values = _select(rows_N, _select(self.row_of_received, self.position_of_slot))
        else:
            received = rows_N.index_select(0, self.row_of_received)
            mine = self._exchange(received, self.receive, self.send)
            values = _select(mine, self.position_of_slot)
        return values.index_fill_(0, self.no_routes, 0)

    def _exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send, group=self.group)
        return received


def _select(values: Tensor, index: Tensor) -> Tensor:
    """index_select; of no values at all, zeros."""
    if values.shape[0] == 0:
        return values.new_zeros(index.shape[0], *values.shape[1:])
    return values.index_select(0, index)


def make_routes(
    topk_ids_TK: Tensor, num_experts: int, num_local: int, group: dist.ProcessGroup | None
) -> Routes:
    """Every rank of `group` must call it; waits for the device to learn the numbers of rows."""
    ids, device = topk_ids_TK.reshape(-1).long(), topk_ids_TK.device
    is_route = (ids >= 0) & (ids < num_experts)
    ids = torch.where(is_route, ids, num_experts)
    order = torch.sort(ids, stable=True).indices
    send_E = torch.bincount(ids, minlength=num_experts + 1)[:num_experts]
    num_ranks = num_experts // num_local
    receive_E = send_E
    if num_ranks > 1:
        receive_E = torch.empty_like(send_E)
        dist.all_to_all_single(receive_E, send_E, group=group)
    send_RE, receive_RE = (
        part.reshape(num_ranks, num_local).tolist() for part in (send_E, receive_E)
    )
    send, receive = ([sum(part) for part in parts] for parts in (send_RE, receive_RE))
    experts = torch.arange(num_local, device=device).repeat(num_ranks)
    expert_of = experts.repeat_interleave(receive_E, output_size=sum(receive))
    by_expert = torch.sort(expert_of, stable=True).indices
    segments = make_segments([sum(counts) for counts in zip(*receive_RE, strict=True)], device)
    slots, no_routes = order[: sum(send)], order[sum(send) :]
    is_padding = torch.ones(segments.num_rows, dtype=torch.bool, device=device)
    is_padding[segments.row_of] = False
    received_of_row = torch.zeros(segments.num_rows, dtype=torch.int64, device=device)
    position_of_slot = torch.zeros_like(ids)
    return Routes(
        slots,
        no_routes,
        topk_ids_TK.shape[1],
        send,
        receive,
        torch.empty_like(by_expert).index_copy_(0, by_expert, segments.row_of),
        received_of_row.index_copy_(0, segments.row_of, by_expert),
        is_padding.nonzero().squeeze(1),
        position_of_slot.index_copy_(0, slots, torch.arange(sum(send), device=device)),
        segments,
        group if num_ranks > 1 else None,
    )
