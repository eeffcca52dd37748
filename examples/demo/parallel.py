"""What data parallelism has to do to gradients when the experts are spread over the same ranks."""

import torch
import torch.distributed as dist

from model import is_expert


def synchronize_gradients(model: torch.nn.Module, world: int) -> None:
    """Turns the gradients of each rank's own mean loss into those of the global batch's mean loss.

    Every rank's loss is a mean over its B sequences; the loss of the global batch is the mean of
    these R losses, (L_0 + ... + L_{R-1}) / R. (All ranks have the same B; with ragged batches each
    loss would be weighted by its share of the tokens.)
    - Shared parameters (embeddings, attention, norms, router): a rank's gradient covers its own
      tokens only, d L_r / d w. Averaging over the ranks gives the mean's gradient.
    - Experts: the tokens of all ranks reach an expert, so its gradient is already the sum over
      ranks, d (L_0 + ... + L_{R-1}) / d w. It must not be reduced (the other ranks hold other
      experts), only divided by R. Left out, experts train on a gradient R times too large. Adam
      hides that, as it is nearly blind to scale; clipping and plain SGD do not.
    """
    if world == 1:
        return
    for name, param in model.named_parameters():
        if is_expert(name):
            param.grad /= world
    # One message instead of one per parameter: these gradients are small.
    shared = [p.grad for name, p in model.named_parameters() if not is_expert(name)]
    flat = torch.cat([grad.flatten() for grad in shared])
    dist.all_reduce(flat)
    flat /= world
    for grad, mean in zip(shared, flat.split([g.numel() for g in shared]), strict=True):
        grad.copy_(mean.view_as(grad))


def clip_gradients(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """Scales the gradients so that their norm over all parameters is at most `max_norm`.

    Returns the norm before clipping. The norm has to count every expert of every rank once:
    with its own experts only, each rank would scale the shared parameters by another factor and
    they would drift apart.
    """
    squares = {True: [], False: []}
    for name, param in model.named_parameters():
        squares[is_expert(name)].append(param.grad.square().sum())
    expert_square = torch.stack(squares[True]).sum()
    dist.all_reduce(expert_square)
    norm = (expert_square + torch.stack(squares[False]).sum()).sqrt()
    scale = (max_norm / norm).clamp(max=1.0)
    for param in model.parameters():
        param.grad *= scale
    return norm


def mean_over_ranks(value: torch.Tensor, world: int) -> float:
    """Returns the mean of a scalar tensor over the ranks."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return float(total) / world
