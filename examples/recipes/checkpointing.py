"""Activation checkpointing: full for the first block, selective for the second.

Selective checkpointing keeps what `torch.ops.mok.*` return, so that backward does not dispatch
again. All ranks recompute the same calls in the same order, as they must.

torchrun --nproc-per-node 2 examples/recipes/checkpointing.py
"""

import functools

import mok
import torch
import torch.distributed as dist
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from common import LEARNING_RATE, MAX_NORM, Model, batches, main, mean_over_ranks, mean_squares


def keep_what_talks_to_peers(context, op, *args, **kwargs) -> CheckpointPolicy:
    if getattr(op, "namespace", "") == "mok":
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, keep_what_talks_to_peers)


def forward(model: Model, x_TH: torch.Tensor) -> torch.Tensor:
    first, second = model.blocks
    x_TH = checkpoint(first, x_TH, use_reentrant=False)
    x_TH = checkpoint(second, x_TH, use_reentrant=False, context_fn=SELECTIVE)
    return model.head(x_TH)


def train(group: dist.ProcessGroup) -> list[float]:
    model = Model(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for x_TH, target_TH in batches(group.rank(), group.size()):
        optimizer.zero_grad()
        loss = mean_squares(forward(model, x_TH), target_TH)
        loss.backward()
        mok.average_gradients(model, group)
        mok.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        losses.append(loss.detach())
    return mean_over_ranks(losses, group)


if __name__ == "__main__":
    main(train)
