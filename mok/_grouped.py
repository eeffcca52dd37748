"""Matrix products over the rows of several experts at once, for the collective backend.

Rows of one expert lie together and are padded with rows of zeros to a multiple of 16, one block at
least: a grouped product never sees an expert without rows, and an idle expert's weight gradient is
a product of zeros.

Shapes: E experts, N rows with padding, H and I columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROW_BLOCK = 16


@dataclass(frozen=True)
class Segments:
    """Where each expert's rows lie."""

    counts: list[int]  # routes per expert
    sizes: list[int]  # the same, padded
    row_of: Tensor  # int64 [routes]: the row of each route, routes being sorted by expert
    ends: Tensor  # int32 [E]: for grouped products

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    def spread(self, routes: Tensor) -> Tensor:
        """Rows with padding [N, ...] from one entry per route; padding is 0."""
        rows = routes.new_zeros(self.num_rows, *routes.shape[1:])
        return rows.index_copy_(0, self.row_of, routes)

    def gather(self, rows: Tensor) -> Tensor:
        """One entry per route from rows with padding."""
        return rows.index_select(0, self.row_of)

    def per_row(self, values_EI: Tensor) -> Tensor:
        """Each expert's vector for each of its rows: [N, I]."""
        sizes = torch.tensor(self.sizes, device=values_EI.device)
        return values_EI.repeat_interleave(sizes, dim=0, output_size=self.num_rows)

    def sums(self, rows_NI: Tensor) -> Tensor:
        """The sum over each expert's rows: FP32 [E, I]."""
        parts = rows_NI.float().split(self.sizes)
        return torch.stack([part.sum(0) for part in parts])


def make_segments(counts: list[int], device: torch.device) -> Segments:
    sizes = [max(1, -(-count // ROW_BLOCK)) * ROW_BLOCK for count in counts]
    sizes_E = torch.tensor(sizes, device=device)
    counts_E = torch.tensor(counts, device=device)
    ends_E = sizes_E.cumsum(0)
    shift_E = (ends_E - sizes_E) - (counts_E.cumsum(0) - counts_E)
    routes = torch.arange(sum(counts), device=device)
    row_of = routes + shift_E.repeat_interleave(counts_E, output_size=sum(counts))
    return Segments(counts, sizes, row_of, ends_E.to(torch.int32))


class LoopProducts:
    """Expert by expert in FP32, results unrounded: the CPU, and FP32 everywhere.

    (torch's BF16 products on CPUs without BF16 units are slower than FP32 ones.)
    """

    @staticmethod
    def transposed(rows, weights, segments: Segments) -> Tensor:
        """x W^T for each expert: rows [N, H], weights [E, I, H] -> FP32 [N, I]."""
        parts = zip(rows.split(segments.sizes), weights, strict=True)
        return torch.cat([part.float() @ weight.float().T for part, weight in parts])

    @staticmethod
    def plain(rows, weights, segments: Segments) -> Tensor:
        """x W for each expert: rows [N, I], weights [E, I, H] -> FP32 [N, H]."""
        parts = zip(rows.split(segments.sizes), weights, strict=True)
        return torch.cat([part.float() @ weight.float() for part, weight in parts])

    @staticmethod
    def outer(left, right, segments: Segments) -> Tensor:
        """sum over an expert's rows of left^T right: [N, I], [N, H] -> FP32 [E, I, H]."""
        parts = zip(left.split(segments.sizes), right.split(segments.sizes), strict=True)
        return torch.stack([a.float().T @ b.float() for a, b in parts])


class GroupedProducts:
    """torch's grouped GEMM, results rounded once to BF16, their dtype: CUDA."""

    @staticmethod
    def transposed(rows, weights, segments: Segments) -> Tensor:
        weights = weights.to(rows.dtype).transpose(1, 2)
        return torch.nn.functional.grouped_mm(rows, weights, offs=segments.ends)

    @staticmethod
    def plain(rows, weights, segments: Segments) -> Tensor:
        return torch.nn.functional.grouped_mm(rows, weights.to(rows.dtype), offs=segments.ends)

    @staticmethod
    def outer(left, right, segments: Segments) -> Tensor:
        return torch.nn.functional.grouped_mm(left.T, right, offs=segments.ends)


def products_for(x: Tensor) -> type[LoopProducts] | type[GroupedProducts]:
    is_grouped = x.device.type == "cuda" and x.dtype == torch.bfloat16
    return GroupedProducts if is_grouped else LoopProducts
