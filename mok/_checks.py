"""Checks of settings and of what has to be a tensor."""

import torch
import torch.distributed as dist


def size_and_rank(group) -> tuple[int, int]:
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"group is {group!r}: it must be a process group that this rank belongs to, or None"
        )
    return dist.get_world_size(group), dist.get_rank(group)


def check_size(name, value, multiple_of=1):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % multiple_of:
        rule = "a positive integer" if multiple_of == 1 else f"a positive multiple of {multiple_of}"
        raise ValueError(f"{name} is {value!r}: it must be {rule}")


def check_tensors(arguments, optional=False):
    """Raises TypeError naming the first of `arguments`, a dict, that is no tensor (nor None)."""
    for name, value in arguments.items():
        if not (isinstance(value, torch.Tensor) or (optional and value is None)):
            rule = "a tensor or None" if optional else "a tensor"
            raise TypeError(f"{name} is {kind_of(value)}: it must be {rule}")


def kind_of(value):
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def compute_dtype(x):
    """x's dtype, or autocast's where that is on; the meta device has none."""
    device_type = x.device.type
    if not x.is_meta and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def check_choice(name, value, choices):
    if value not in choices:
        options = ", ".join(repr(choice) for choice in choices[:-1])
        raise ValueError(f"{name} is {value!r}: it must be {options} or {choices[-1]!r}")
