"""Buffers for torch.ops.mok._plan_out."""

import numpy as np
import torch

import mok

RECORD_WORDS = 32


class DevicePlanner:
    """All that a plan of any rank needs, made once, as a workspace does it."""

    POISON = -123456789

    def __init__(self, num_ranks, num_experts, top_k, max_tokens, pad=mok._C.DEFAULT_PAD):
        self.num_ranks, self.num_experts, self.top_k, self.pad = num_ranks, num_experts, top_k, pad
        self.max_tokens = max_tokens
        local_experts = num_experts // num_ranks
        rows = mok._C.worst_case_rows(num_ranks, num_experts, top_k, max_tokens, pad)
        blocks = torch.cuda.get_device_properties(0).multi_processor_count
        device = {"device": "cuda"}
        self.ids = torch.zeros(num_ranks, max_tokens * top_k, dtype=torch.int32, **device)
        self.num_tokens = torch.zeros(num_ranks, dtype=torch.int64, **device)
        self.row_peer = torch.zeros(rows, dtype=torch.int32, **device)
        self.row_slot = torch.zeros(rows, dtype=torch.int32, **device)
        self.segment_begin = torch.zeros(local_experts + 1, dtype=torch.int64, **device)
        self.counts = torch.zeros(local_experts, dtype=torch.int64, **device)
        self.scratch = torch.zeros(128 + blocks * local_experts, dtype=torch.int32, **device)
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int32, pin_memory=True)

    def set_ids(self, ids_per_rank: list[np.ndarray]) -> None:
        """ids [T_r, K] of each rank; an id outside [0, E) is published as -1, as by the layer."""
        slots = self.max_tokens * self.top_k
        published = np.full((self.num_ranks, slots), 3 % self.num_experts, np.int32)
        for rank, ids in enumerate(ids_per_rank):
            valid = (ids >= 0) & (ids < self.num_experts)
            published[rank, : ids.size] = np.where(valid, ids, -1).ravel()
        self.ids.copy_(torch.from_numpy(published))
        self.num_tokens.copy_(torch.tensor([len(ids) for ids in ids_per_rank]))

    def poison(self) -> None:
        for tensor in (self.row_peer, self.row_slot, self.segment_begin, self.counts):
            tensor.fill_(self.POISON)

    def launch(self, rank: int) -> None:
        torch.ops.mok._plan_out(
            self.ids,
            self.num_tokens,
            rank,
            self.num_experts,
            self.top_k,
            self.pad,
            2000,
            self.scratch,
            self.record,
            self.row_peer,
            self.row_slot,
            self.segment_begin,
            self.counts,
        )

    def result(self) -> dict[str, np.ndarray]:
        torch.cuda.synchronize()
        names = ("segment_begin", "counts", "row_peer", "row_slot")
        return {name: getattr(self, name).cpu().numpy() for name in names}
