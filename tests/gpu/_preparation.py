"""The preparation of calls on one GPU, for ranks that this process plays itself."""

import contextlib
import itertools

import numpy as np
import torch

from mok import _C
from tests.preparation_cases import Case, compare

_names = itertools.count()


class _Memory:
    def __init__(self, address: int, shape: tuple[int, ...], typestr: str):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "version": 2,
        }


def view(address: int, shape: tuple[int, ...], typestr: str) -> torch.Tensor:
    """A tensor over memory that somebody else owns; BF16 comes as "<i2"."""
    return torch.as_tensor(_Memory(address, shape, typestr), device="cuda")


class VirtualRanks:
    """Workspaces of a case's ranks on one GPU, with tensors that outlive captures."""

    def __init__(
        self,
        case: Case,
        ids_dtype=torch.int64,
        x_in_heap=False,
        timed=False,
        blocks=0,
        may_be_small=True,
    ):
        self.case = case
        tokens, hidden = case.max_tokens, case.hidden
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        self.workspaces = _C.virtual_workspaces(
            f"virtual-{next(_names)}",
            case.num_ranks,
            tokens,
            hidden,
            case.top_k,
            True,
            4 * tokens * hidden + (1 << 16),
            0,
            multiprocessors,
        )
        for workspace in self.workspaces:
            workspace.set_timeout(10.0)
        self.preparations = [
            _C.DevicePreparation(
                workspace,
                case.top_k,
                tokens,
                case.settings(),
                most_blocks=blocks,
                timed=timed,
                may_be_small=may_be_small,
            )
            for workspace in self.workspaces
        ]
        self.streams = [torch.cuda.Stream() for _ in case.tokens]
        self.ids = [
            torch.full((count, case.top_k), -1, dtype=ids_dtype, device="cuda")
            for count in case.tokens
        ]
        backward = case.direction == "backward"
        self.x = self._rows(x_in_heap)
        self.dout = self._rows(x_in_heap) if backward else [None] * case.num_ranks

    def _rows(self, in_heap: bool) -> list[torch.Tensor]:
        rows = []
        for rank, count in enumerate(self.case.tokens):
            values = torch.randint(-9999, 9999, (count, self.case.hidden), device="cuda")
            values = values.to(torch.int16)
            if in_heap and count > 0:
                block = self.workspaces[rank].arena_allocate(2 * values.numel())
                kept = torch.as_tensor(block, device="cuda").view(torch.int16).view(values.shape)
                values = kept.copy_(values)
            rows.append(values)
        return rows

    def set_ids(self, ids_per_rank: list[np.ndarray]) -> None:
        for tensor, ids in zip(self.ids, ids_per_rank, strict=True):
            tensor.copy_(torch.from_numpy(ids))

    def launch_rank(self, rank: int, stream: torch.cuda.Stream, meets_outputs=True) -> None:
        def rows(tensor):
            if tensor is None or tensor.numel() == 0:
                return _C.InputRows()
            return _C.InputRows(tensor.data_ptr(), 2 * tensor.stride(0))

        ids = self.ids[rank]
        self.preparations[rank].launch(
            ids.data_ptr(),
            ids.dtype == torch.int64,
            len(ids),
            rows(self.x[rank]),
            rows(self.dout[rank]),
            meets_outputs,
            stream.cuda_stream,
        )

    def launch(self, calls=1, meets_outputs=True) -> None:
        """All ranks side by side, behind the current stream and before its further work.

        Without meeting again a rank may publish the next call's ids while a peer reads the last
        one's: only for calls that are all alike.
        """
        current = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(current)
        for _ in range(calls):
            for rank, stream in enumerate(self.streams):
                self.launch_rank(rank, stream, meets_outputs)
        for stream in self.streams:
            current.wait_stream(stream)

    def check(self, ids_per_rank: list[np.ndarray]) -> None:
        torch.cuda.synchronize()
        for rank, (workspace, preparation) in enumerate(
            zip(self.workspaces, self.preparations, strict=True)
        ):
            workspace.check()
            result = preparation.result()
            compare(result, self.case.expected(ids_per_rank, rank), f"rank {rank} of {self.case}")
            self._check_inputs(result["inputs"])

    def _check_inputs(self, inputs) -> None:
        """The addresses that each rank holds of everyone's rows lead to these rows."""
        for source, (x, x_stride, dout, dout_stride, tokens) in enumerate(inputs):
            assert tokens == self.case.tokens[source]
            for address, stride, rows in (
                (x, x_stride, self.x[source]),
                (dout, dout_stride, self.dout[source]),
            ):
                if rows is None or rows.numel() == 0:
                    continue
                assert stride % 16 == 0
                assert address % 16 == 0
                seen = view(address, (tokens, stride // 2), "<i2")[:, : self.case.hidden]
                assert torch.equal(seen, rows)

    def close(self) -> None:
        torch.cuda.synchronize()
        for workspace in self.workspaces:
            workspace.close(0)


@contextlib.contextmanager
def virtual_ranks(case: Case, **options):
    ranks = VirtualRanks(case, **options)
    try:
        yield ranks
    finally:
        ranks.close()


def publish_by_hand(preparation, ids_per_rank: list[np.ndarray], num_experts: int) -> None:
    """Ids and headers of all ranks as the publishing kernels leave them."""
    for rank, ids in enumerate(ids_per_rank):
        ids_at, header_at = preparation.published(rank)
        valid = (ids >= 0) & (ids < num_experts)
        published = torch.from_numpy(np.where(valid, ids, -1).astype(np.int32).ravel())
        if len(published):
            view(ids_at, (len(published),), "<i4").copy_(published)
        words = torch.from_numpy(preparation.header(len(ids)))
        view(header_at, (len(words),), "<i8").copy_(words)
