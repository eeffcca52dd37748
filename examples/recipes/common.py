"""What the recipes share: a small model, its data, and how a script becomes one of several ranks.

Every recipe trains the same model on the same global batches, so all end with the same loss, on any
number of ranks: tests/dist/test_recipes.py compares them, on the CPU. Where torchrun finds a GPU
for each of its ranks they train there, with BF16 tokens; that way has not been run yet.
"""

import os
from collections.abc import Callable, Iterator

import mok
import torch
import torch.distributed as dist
from torch import nn

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 32, 48, 8, 2
STEPS = 12
TOKENS = 64  # of a global batch
LEARNING_RATE = 0.5
MAX_NORM = 1.0

_RANKS_HERE = int(os.environ.get("LOCAL_WORLD_SIZE", 0))  # torchrun sets it
if 0 < _RANKS_HERE <= torch.cuda.device_count():
    DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    TOKEN_DTYPE = torch.bfloat16  # what mok's own kernels take on a GPU
else:
    DEVICE = torch.device("cpu")
    TOKEN_DTYPE = torch.float32


class Block(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.moe = mok.MoELayer(
            *(HIDDEN, INTERMEDIATE, EXPERTS, TOP_K),
            shared_intermediate_size=16,
            group=group,
            max_tokens=TOKENS,
        )

    def forward(self, x_TH: torch.Tensor, **options) -> torch.Tensor:
        return x_TH + self.moe(self.norm(x_TH).to(TOKEN_DTYPE), **options)


class Model(nn.Module):
    """Two MoE blocks and a projection; equal on all ranks but for the experts."""

    def __init__(self, group: dist.ProcessGroup | None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(group) for _ in range(2))
        self.head = nn.Linear(HIDDEN, HIDDEN)
        self.to(DEVICE)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_TH = block(x_TH)
        return self.head(x_TH)


def batches(rank: int, ranks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each global batch: tokens and what the model shall make of them."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
    for _ in range(STEPS):
        x_TH = torch.randn(TOKENS, HIDDEN, generator=generator)
        target_TH = torch.tanh(x_TH @ teacher)
        yield x_TH.chunk(ranks)[rank].to(DEVICE), target_TH.chunk(ranks)[rank].to(DEVICE)


def mean_squares(out_TH: torch.Tensor, target_TH: torch.Tensor) -> torch.Tensor:
    return (out_TH - target_TH).square().mean()


def mean_over_ranks(losses: list[torch.Tensor], group: dist.ProcessGroup) -> list[float]:
    """The loss of each global batch."""
    values = torch.stack(losses)
    dist.all_reduce(values, group=group)
    return (values / group.size()).tolist()


def main(train: Callable[[dist.ProcessGroup], list[float]]) -> None:
    """Runs `train` on this process as one of torchrun's ranks and prints the losses."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("gloo" if DEVICE.type == "cpu" else "cpu:gloo,cuda:nccl")
    losses = train(dist.group.WORLD)
    if dist.get_rank() == 0:
        print("loss:", " ".join(f"{loss:.4f}" for loss in losses), flush=True)
    dist.barrier()
    # gloo's threads may still be at work when the interpreter takes down what they use.
    os._exit(0)
