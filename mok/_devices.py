"""What the GPUs of this machine can do for a symmetric heap; for people and for `mok doctor`."""

import dataclasses

from mok import _C


@dataclasses.dataclass(frozen=True)
class DeviceReport:
    """What a symmetric heap on a GPU would be made of, and why."""

    device: int
    gpu: str  # as in "NVIDIA H200 (cuda:0)"; empty if there is no such GPU
    backing: str | None  # "fabric" or "posix_fd"; None if its memory cannot be shared
    reason: str  # why that one, or what is missing and what to do
    nvlink_domain: str | None  # cluster and clique; None outside a domain of several machines
    reachable: tuple[int, ...]  # visible GPUs whose memory this one can access
    unreachable: tuple[int, ...]  # the other visible ones


def describe_device(device: int | None = None) -> DeviceReport:
    """Finds out by a small allocation what a heap on this CUDA device (default: 0) would take.

    Raises nothing for what a machine lacks: the report says it. Several ranks take fabric handles
    if all offer them within one NVLink domain, else descriptors; one rank alone needs neither.
    """
    found = _C.describe_device(0 if device is None else device)
    return DeviceReport(
        found.device,
        found.gpu,
        found.backing or None,
        found.reason,
        f"{found.cluster}/{found.clique}" if found.cluster else None,
        tuple(found.reachable),
        tuple(found.unreachable),
    )
