"""Makes uninitialised memory visible: `empty` gives NaN, so that a test sees who reads it."""

import torch


def poison_uninitialized_memory(enabled: bool = True) -> None:
    """Fills what torch allocates without writing: NaN in floats, the largest value in integers.

    torch's deterministic mode does it inside ATen, so that `empty`, `empty_like`, `new_empty`,
    `empty_strided` and `resize_` are covered from Python, from C++ and in compiled graphs alike.
    """
    # Not torch.use_deterministic_algorithms: it imports inductor, 1.3 s for each worker.
    torch.set_deterministic_debug_mode("warn" if enabled else "default")
    torch.utils.deterministic.fill_uninitialized_memory = enabled
