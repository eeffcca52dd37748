"""Two micro-batches in flight, block by block as in a pipeline, each in a workspace of its own.

    forward:  A block 1, B block 1, A block 2, B block 2        backward: A, then B

The order is the same on all ranks. One workspace would do as well: its calls are one after the
other. Two let the kernels of A and B overlap, where a device can.

torchrun --nproc-per-node 2 examples/recipes/interleaved.py
"""

import mok
import torch
import torch.distributed as dist

from common import LEARNING_RATE, MAX_NORM, Model, batches, main, mean_over_ranks, mean_squares

TAGS = ("a", "b")


def forward(model: Model, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    for block in model.blocks:
        parts = [block(x, workspace_tag=tag) for x, tag in zip(parts, TAGS, strict=True)]
    return [model.head(x) for x in parts]


def train(group: dist.ProcessGroup) -> list[float]:
    model = Model(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for x_TH, target_TH in batches(group.rank(), group.size()):
        optimizer.zero_grad()
        outs = forward(model, list(x_TH.chunk(2)))
        parts = [mean_squares(*pair) / 2 for pair in zip(outs, target_TH.chunk(2), strict=True)]
        for loss in parts:
            loss.backward()
        mok.average_gradients(model, group)
        mok.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        losses.append(sum(part.detach() for part in parts))
    return mean_over_ranks(losses, group)


if __name__ == "__main__":
    main(train)
