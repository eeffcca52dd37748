"""Arguments of torch.ops.mok._sm90_grouped_gemm_out."""

import math

import torch

BLOCK = 128


def segments(counts: list[int]) -> torch.Tensor:
    """segment_begin [E + 1]: each expert's rows padded to whole blocks."""
    padded = [math.ceil(count / BLOCK) * BLOCK for count in counts]
    return torch.tensor([0, *padded]).cumsum(0)


def valid_rows(counts: list[int]) -> torch.Tensor:
    """Indices of the rows that are no padding."""
    begins = segments(counts)[:-1].tolist()
    return torch.cat([torch.arange(b, b + c) for b, c in zip(begins, counts, strict=True)])


class GroupedGemm:
    """y = x W^T by segments: buffers on the GPU, y poisoned."""

    def __init__(self, counts: list[int], x: torch.Tensor, weights_ENK: torch.Tensor):
        self.counts = counts
        self.begin = segments(counts)
        assert x.shape[0] >= self.begin[-1]
        self.x, self.weights = x, weights_ENK
        self.y = torch.full(
            (x.shape[0], weights_ENK.shape[1]), math.nan, dtype=torch.bfloat16, device="cuda"
        )
        self.device_begin = self.begin.cuda()
        self.device_counts = torch.tensor(counts).cuda()
        self.scratch = torch.zeros(64, dtype=torch.int32, device="cuda")
        self.record = torch.zeros(32, dtype=torch.int32, pin_memory=True)

    def __call__(self) -> torch.Tensor:
        torch.ops.mok._sm90_grouped_gemm_out(
            self.x,
            self.weights,
            self.device_begin,
            self.device_counts,
            5000,
            self.scratch,
            self.record,
            self.y,
        )
        return self.y

    def exact(self) -> torch.Tensor:
        """The valid rows in FP64, in their order."""
        parts = []
        for expert, count in enumerate(self.counts):
            begin = int(self.begin[expert])
            rows = self.x[begin : begin + count].double()
            parts.append(rows @ self.weights[expert].double().T)
        return torch.cat(parts)
