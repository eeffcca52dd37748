"""FSDP2: experts are sharded over the ranks that hold the same ones, all else over all ranks.

    rank    0 1   2 3
    experts a b   a b      expert groups {0, 1}, {2, 3}; replica groups {0, 2}, {1, 3}

torchrun --nproc-per-node 4 examples/recipes/fsdp2.py
"""

import mok
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    ranks = group.size()
    mesh = init_device_mesh(DEVICE.type, (ranks // 2, 2), mesh_dim_names=("replica", "expert"))
    everyone = init_device_mesh(DEVICE.type, (ranks,))
    model = Model(mesh["expert"].get_group())
    mok.shard_experts(model, mesh["expert"])  # so that checkpoints know experts by global index
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh=mesh["replica"])
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for x_TH, target_TH in batches(group.rank(), ranks):
        optimizer.zero_grad()
        loss = mean_squares(model(x_TH), target_TH)
        loss.backward()  # FSDP averages over its ranks: experts over their replicas
        mok.scale_expert_gradients(model)
        mok.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        losses.append(loss.detach())
    return mean_over_ranks(losses, group)


if __name__ == "__main__":
    main(train)
