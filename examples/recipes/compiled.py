"""The whole forward in one graph of torch.compile. BACKEND=aot_eager traces without compiling.

torchrun --nproc-per-node 2 examples/recipes/compiled.py
"""

import os

import mok
import torch
import torch.distributed as dist

from common import LEARNING_RATE, MAX_NORM, Model, batches, main, mean_over_ranks, mean_squares


def train(group: dist.ProcessGroup) -> list[float]:
    model = Model(group)
    compiled = torch.compile(model, fullgraph=True, backend=os.environ.get("BACKEND", "inductor"))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for x_TH, target_TH in batches(group.rank(), group.size()):
        optimizer.zero_grad()
        loss = mean_squares(compiled(x_TH), target_TH)
        loss.backward()
        mok.average_gradients(model, group)
        mok.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        losses.append(loss.detach())
    return mean_over_ranks(losses, group)


if __name__ == "__main__":
    main(train)
