"""Real text that every Python install has: the sources of the standard library, read as bytes."""

import sysconfig
from pathlib import Path

import torch

HELD_OUT_EVERY = 10
MIN_BYTES = 500_000


def load_text(folder: Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (training, held-out) text as two 1-D uint8 tensors.

    The files are the top-level modules of `folder` (default: the standard library) in the order of
    their names, which is the same on every machine; every tenth file is held out, so that no
    held-out byte is ever trained on. Generated build data is left out: it differs between machines.
    Raises RuntimeError when the install has too few sources (a zipped or stripped library).
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in folder.glob("*.py") if not f.name.startswith("_sysconfigdata"))
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    training = [f for f in files if f not in held_out]
    texts = [b"".join(f.read_bytes() for f in part) for part in (training, held_out)]
    if len(texts[0]) < MIN_BYTES:
        raise RuntimeError(
            f"{folder} has {len(texts[0])} bytes of Python sources and the demo needs {MIN_BYTES}; "
            "use a Python that ships its standard library as .py files."
        )
    train, held = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    return train, held


def global_batch(text: torch.Tensor, batch: int, length: int, seed: int) -> torch.Tensor:
    """Returns `batch` windows of length + 1 bytes as int64 [batch, length + 1].

    The windows are a function of `seed` alone (the training loop passes the step), so a resumed run
    continues with the batch it would have had, and any number of ranks can share one batch by
    slicing rows.
    """
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - length - 1, (batch,), generator=generator)
    return text[starts[:, None] + torch.arange(length + 1)].long()
