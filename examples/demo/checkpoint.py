"""Saves and resumes a training state with torch.distributed.checkpoint."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from model import is_expert


def save(path: Path, model, optimizer, step: int) -> None:
    """Writes the state after `step` steps; every rank calls this."""
    dcp.save(_training_state(model, optimizer, torch.tensor(step)), checkpoint_id=path)


def load(path: Path, model, optimizer) -> int:
    """Overwrites the state of model and optimizer in place; returns the number of steps done."""
    # Adam creates its moments in the first step; a step with learning rate 0 makes room for them.
    # Every value it leaves is overwritten below.
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    step = torch.tensor(0)
    dcp.load(_training_state(model, optimizer, step), checkpoint_id=path)
    return int(step)


def _training_state(model, optimizer, step: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the state as flat names -> tensors that share memory with model and optimizer.

    A plain tensor counts as replicated: the checkpoint keeps one rank's copy of it. That is right
    for the shared parameters and would silently lose every other rank's experts, so experts go in
    as DTensors sharded over the expert dimension. The checkpoint then knows them by their global
    index, and can also be loaded with another number of ranks.
    """
    device_type = next(model.parameters()).device.type
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    state = {"step": step}
    for name, param in model.named_parameters():
        tensors = {"param": param.detach(), **optimizer.state[param]}
        for kind, tensor in tensors.items():
            if is_expert(name) and tensor.dim() > 0:
                tensor = DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
            state[f"{kind}.{name}"] = tensor
    return state
