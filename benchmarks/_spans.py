"""What kernels that are launched by hand record, as mok.trace would show it."""

import numpy as np
import torch

from mok._traced_call import ENTRY_BYTES, TracedCall, read_call

SPAN_WORDS = ENTRY_BYTES // 4  # of int32


def span_memory(count: int) -> torch.Tensor:
    """Memory for `count` tasks or batches of pulls."""
    return torch.full((count, SPAN_WORDS), -1, dtype=torch.int32, device="cuda")


def traced_call(
    direction: str, sizes: dict[str, int], tasks: torch.Tensor, pulls: torch.Tensor | None = None
) -> TracedCall:
    """The recorded call of one rank. `sizes`: T, H, I, E, K."""
    memories = [tasks] if pulls is None else [tasks, pulls]
    stamps = np.full((1, ENTRY_BYTES), 0xFF, np.uint8)
    entries = [memory.cpu().numpy().view(np.uint8) for memory in memories]
    call = {
        "kind": {"forward": 1, "backward": 2}[direction],
        "num_tokens": sizes["T"],
        "hidden": sizes["H"],
        "intermediate": sizes["I"],
        "shared_intermediate": 0,
        "num_experts": sizes["E"],
        "top_k": sizes["K"],
        "rank": 0,
        "num_ranks": 1,
        "num_ctas": torch.cuda.get_device_properties(0).multi_processor_count,
        "num_tasks": len(tasks),
    }
    return read_call(call, np.concatenate([stamps, *entries]))
