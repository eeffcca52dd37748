"""What data parallelism does to gradients when experts are spread over the same ranks.

Each of W ranks has the mean loss of its own tokens; the loss that is trained is the mean of these W
losses. What a backward leaves in a gradient, and what makes the mean's gradient of it:

    router, shared expert and its gate,   this rank's tokens           average over the W ranks
    everything outside of MoE layers
    routed experts, on R expert-parallel  the sum over these R ranks   divide by R, and average over
    ranks                                                              ranks with the same experts

With W = R no other rank has the same experts, and only the division is left. Left out, experts
train on a gradient R times too large: Adam hides that, clipping and SGD do not.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mok import _group
from mok.experts import Experts


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that differ between ranks, by name: routed experts of layers with a group.

    They carry `allreduce = False`, by which Megatron knows them.
    """
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, module in _spread_experts(model)
        for name, parameter in module.named_parameters()
    }


def exclude_experts_from_ddp(model: nn.Module) -> None:
    """Tells DistributedDataParallel to leave the experts alone; call it before wrapping `model`.

    Afterwards each step needs `scale_expert_gradients`, or `average_gradients` over replicas.
    """
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, list(expert_parameters(model))
    )


@torch.no_grad()
def scale_expert_gradients(model: nn.Module) -> None:
    """Divides the experts' gradients by their number of expert-parallel ranks: once per step, after
    the last backward. `main_grad` counts as the gradient where there is one."""
    for _, module in _spread_experts(model):
        for parameter in module.parameters():
            gradient = _gradient_of(parameter)
            if gradient is not None:
                gradient.div_(module.num_ranks)


@torch.no_grad()
def average_gradients(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    replica_group: dist.ProcessGroup | None = None,
) -> None:
    """Turns each rank's gradients into those of the mean loss, experts and all else.

    For training without DDP or FSDP. One collective per dtype, not one per parameter. A parameter
    that got no gradient on this rank (no token reached it) takes part with zeros.

    Args:
        group: the W ranks whose losses are averaged; None is the default group.
        replica_group: the ranks that hold the same experts; None is this rank alone (W = R).
    """
    experts = list(expert_parameters(model).values())
    are_experts = {id(parameter) for parameter in experts}
    others = [parameter for parameter in model.parameters() if id(parameter) not in are_experts]
    _average(others, group)
    if replica_group is not None:
        _average(experts, replica_group)
    scale_expert_gradients(model)


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of a model whose experts are spread over ranks.

    The norm counts each expert of each rank once, so that every rank scales by the same factor;
    with its own experts only, ranks would drift apart. All ranks call it, after gradients were
    averaged. Parameters outside of MoE layers are taken as equal on all ranks, or are DTensors
    (FSDP2), which know their ranks. `main_grad` counts as the gradient where there is one.

    Args:
        model: with any number of `mok.MoELayer`s, also over several groups.
        max_norm: the largest norm that is left.
        norm_type: p of the norm, positive; float("inf") is the largest element.
        error_if_nonfinite: raise RuntimeError instead of scaling by a norm that is not finite.

    Returns:
        The norm before clipping, FP32, equal on all ranks: also NaN where one rank has one.

    Raises:
        TypeError, ValueError: for parameters instead of a model, and a norm_type that is no norm.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}: pass the module and not its parameters, since "
            "its layers know which of them are spread over ranks"
        )
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}: it must be positive, or float('inf')")
    spread = {
        id(parameter): module.group_name
        for _, module in _spread_experts(model)
        for parameter in module.parameters()
    }
    # Which ranks hold other parts of a gradient; in the same order on all of them, also where one
    # has no gradient.
    by_place: dict[tuple, list[Tensor]] = {}
    gradients = []
    for parameter in model.parameters():
        gradient = _gradient_of(parameter)
        part = by_place.setdefault(_place_of(parameter, spread.get(id(parameter))), [])
        if gradient is not None:
            part.append(_local(gradient))
            gradients.append(_local(gradient))
    # A rank without gradients takes part in the sums, on the device that its group reduces on.
    devices = [gradient.device for gradient in gradients]
    devices += [_local(parameter).device for parameter in model.parameters()]
    norm = _total_norm(by_place, norm_type, devices[0] if devices else torch.device("cpu"))
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is {norm.item()}: pass "
            "error_if_nonfinite=False to clip by it all the same"
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
    return norm


def _total_norm(
    by_place: dict[tuple, list[Tensor]], norm_type: float, device: torch.device
) -> Tensor:
    is_max = norm_type == float("inf")
    parts = [torch.zeros((), dtype=torch.float64, device=device)]
    for place, gradients in by_place.items():
        norms = [
            torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float32).double().to(device)
            for gradient in gradients
            if gradient.numel()
        ]
        powers = torch.stack([torch.zeros_like(parts[0]), *norms])
        part = powers.max() if is_max else (powers**norm_type).sum()
        for group in _groups_of(place):
            part = _largest_of(part, group) if is_max else _sum_of(part, group)
        parts.append(part)
    total = torch.stack(parts)
    return (total.max() if is_max else total.sum() ** (1 / norm_type)).float()


def _sum_of(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(value, group=group)
    return value


def _largest_of(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest of the ranks' values >= 0, NaN if any is one: collectives' own maximum may leave
    NaNs out."""
    is_nan = value.isnan()
    both = torch.stack([torch.where(is_nan, 0, value), is_nan.to(value.dtype)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return torch.where(both[1] > 0, torch.nan, both[0])


def _place_of(parameter: nn.Parameter, expert_group: str | None) -> tuple:
    """(mesh, placements, group name): the ranks that hold other parts, or nothing of it."""
    if not _is_dtensor(parameter):
        return None, (), expert_group
    mesh = parameter.device_mesh
    if expert_group is not None:
        ranks = dist.get_process_group_ranks(_group.resolve_group(expert_group))
        if set(ranks) <= set(mesh.mesh.flatten().tolist()):
            expert_group = None  # the mesh has them: experts as DTensors
    return mesh, parameter.placements, expert_group


def _groups_of(place: tuple) -> list[dist.ProcessGroup]:
    """The groups over which a norm has to be summed: none for what all ranks hold alike."""
    mesh, placements, expert_group = place
    groups = [mesh.get_group(dim) for dim, part in enumerate(placements) if not part.is_replicate()]
    return groups if expert_group is None else [*groups, _group.resolve_group(expert_group)]


def _is_dtensor(tensor: Tensor) -> bool:
    """Without importing DTensor, which takes a second."""
    return hasattr(tensor, "to_local")


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if _is_dtensor(gradient) else gradient


def _spread_experts(model: nn.Module) -> list[tuple[str, Experts]]:
    modules = [(n, m) for n, m in model.named_modules() if isinstance(m, Experts)]
    return [(name, module) for name, module in modules if module.num_ranks > 1]


def _gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """main_grad of a parameter in Megatron's protocol, else its grad."""
    if hasattr(parameter, "grad_added_to_main_grad"):
        getter = getattr(parameter, "get_main_grad", None)
        main_grad = getattr(parameter, "main_grad", None) if getter is None else getter()
        if main_grad is not None:
            return main_grad
    return parameter.grad


def _average(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        gradient = _gradient_of(parameter)
        if gradient is None:
            gradient = parameter.grad = torch.zeros_like(parameter)
        local = _local(gradient)
        by_dtype.setdefault(local.dtype, []).append(local)
    num_ranks = dist.get_world_size(group)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat.div_(num_ranks)
        for gradient, mean in zip(
            gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(mean.view_as(gradient))
