"""Four micro-batches per step; experts add theirs to FP32 main_grad buffers inside the backward.

torchrun --nproc-per-node 2 examples/recipes/gradient_accumulation.py
"""

import mok
import torch
import torch.distributed as dist

from common import LEARNING_RATE, MAX_NORM, Model, batches, main, mean_over_ranks, mean_squares

MICRO_BATCHES = 4


def train(group: dist.ProcessGroup) -> list[float]:
    model = Model(group)
    experts = list(mok.expert_parameters(model).values())
    for parameter in experts:
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for x_TH, target_TH in batches(group.rank(), group.size()):
        optimizer.zero_grad()
        for parameter in experts:
            parameter.main_grad.zero_()
        total = x_TH.new_zeros(())
        micro_batches = zip(x_TH.chunk(MICRO_BATCHES), target_TH.chunk(MICRO_BATCHES), strict=True)
        for x_MH, target_MH in micro_batches:
            loss = mean_squares(model(x_MH), target_MH) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        mok.average_gradients(model, group)  # once per step; it knows main_grad
        mok.clip_grad_norm_(model, MAX_NORM)
        for parameter in experts:
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        optimizer.step()
        losses.append(total)
    return mean_over_ranks(losses, group)


if __name__ == "__main__":
    main(train)
