"""Experts spread over pairs of ranks, and replicas of these pairs: DDP averages what is replicated.

    rank    0 1   2 3
    experts a b   a b      expert groups {0, 1}, {2, 3}; replica groups {0, 2}, {1, 3}

torchrun --nproc-per-node 4 examples/recipes/ddp_replicas.py
"""

import mok
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from common import (
    DEVICE,
    LEARNING_RATE,
    MAX_NORM,
    Model,
    batches,
    main,
    mean_over_ranks,
    mean_squares,
)


def train(group: dist.ProcessGroup) -> list[float]:
    mesh = init_device_mesh(
        DEVICE.type, (group.size() // 2, 2), mesh_dim_names=("replica", "expert")
    )
    replicas = mesh["replica"].get_group()
    model = Model(mesh["expert"].get_group())
    mok.exclude_experts_from_ddp(model)  # before wrapping
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for x_TH, target_TH in batches(group.rank(), group.size()):
        optimizer.zero_grad()
        loss = mean_squares(wrapped(x_TH), target_TH)
        loss.backward()  # DDP averages everything but the experts
        for parameter in mok.expert_parameters(model).values():
            dist.all_reduce(parameter.grad, group=replicas)
            parameter.grad /= replicas.size()
        mok.scale_expert_gradients(model)
        mok.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        losses.append(loss.detach())
    return mean_over_ranks(losses, group)


if __name__ == "__main__":
    main(train)
