"""Experts as DTensors, so that torch.distributed.checkpoint knows them by their global index.

A plain tensor counts as replicated there: one rank's copy of it is kept. That is right for routers
and shared experts, and would silently lose every other rank's experts.
"""

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from mok import _group
from mok.experts import Experts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard_experts(model: nn.Module, mesh: "DeviceMesh | None" = None) -> nn.Module:
    """Makes the experts' parameters DTensors, `Shard(0)` over their expert-parallel ranks.

    No data moves: a parameter's local part is what it was. Gradients and optimizer states become
    DTensors too, and state dicts have global shapes: what torch.distributed.checkpoint saves from
    two ranks loads into one or four (docs/checkpoints.md). Call it before the optimizer is made and
    before `fully_shard`.

    Args:
        model: with any number of `mok.MoELayer`s; layers of one rank stay as they are.
        mesh: one-dimensional, of the layers' group; None makes one for each group. To shard experts
            further by FSDP2, pass a slice of the mesh it uses.

    Returns:
        The model.

    Raises:
        ValueError: for a mesh that does not have a layer's ranks.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import (
        DTensor,
        Shard,
    )  # takes a second: not for all who import mok

    meshes: dict[str, DeviceMesh] = {}
    for name, module in model.named_modules():
        if not isinstance(module, Experts) or module.num_ranks == 1:
            continue
        group = _group.resolve_group(module.group_name)
        device_type = module.w_gate.device.type
        layer_mesh = mesh
        if mesh is None:
            if module.group_name not in meshes:
                mesh_device = "cpu" if device_type == "meta" else device_type
                meshes[module.group_name] = DeviceMesh.from_group(group, mesh_device)
            layer_mesh = meshes[module.group_name]
        ranks = dist.get_process_group_ranks(group)
        if layer_mesh.ndim != 1 or layer_mesh.mesh.tolist() != ranks:
            raise ValueError(
                f"mesh has the ranks {layer_mesh.mesh.tolist()}, but the experts of {name!r} are "
                f"spread over {ranks}: pass the one-dimensional mesh of the layer's group"
            )
        for key, parameter in list(module.named_parameters()):
            if isinstance(parameter, DTensor):
                continue
            shard = DTensor.from_local(parameter.detach(), layer_mesh, [Shard(0)], run_check=False)
            module.register_parameter(
                key, nn.Parameter(shard, requires_grad=parameter.requires_grad)
            )
        module.mark()
    return model
