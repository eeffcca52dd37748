"""What this machine can do: where to run, and how to multiply BF16 matrices."""

import time

import torch


def choose_device(requested: str, ranks: int) -> str:
    """Returns "cuda" or "cpu"; prints one line when "auto" finds GPUs and does not use them.

    Raises SystemExit with the reason when "cuda" is requested and not possible. mok's ops must be
    loaded.
    """
    gpus = torch.cuda.device_count()
    if requested == "cpu" or (requested == "auto" and gpus == 0):
        return "cpu"
    # Asks torch's dispatcher which devices mok has registered its kernels for.
    if not torch._C._dispatch_has_kernel_for_dispatch_key("mok::moe_forward_out", "CUDA"):
        reason = "this build of mok has no CUDA kernels"
    elif gpus < ranks:
        reason = f"{ranks} ranks need {ranks} GPUs and there are {gpus}"
    else:
        return "cuda"
    if requested == "cuda":
        raise SystemExit(f"The demo failed: --device cuda is not possible, {reason}.")
    print(f"The demo runs on the CPU: {reason}.")
    return "cpu"


def bf16_is_slow() -> bool:
    """Says whether this CPU multiplies BF16 matrices slower than FP32 ones (it lacks the units)."""
    torch.set_num_threads(1)
    seconds = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.ones(512, 128, dtype=dtype), torch.ones(128, 256, dtype=dtype)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - start)
        seconds[dtype] = min(times)
    return seconds[torch.bfloat16] > seconds[torch.float32]
