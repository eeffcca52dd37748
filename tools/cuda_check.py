"""Compiles every CUDA source for all its own architectures, without torch, Python or a GPU.

CI's check: an install builds only what MOK_CUDA_ARCHS names. Does nothing where nvcc is missing.
"""

import dataclasses
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import native_build  # noqa: E402

ALL_ARCHS = ("90a", "100f", "103a")


def main() -> None:
    cuda, reason = native_build.find_toolkit(os.environ)
    if cuda is None:
        print(f"CUDA sources were not compiled: {reason}")
        return
    cuda = dataclasses.replace(cuda, archs=ALL_ARCHS)
    config = native_build.Config(ROOT, ROOT / "build" / "cuda-check", None, cuda)
    sources = native_build.compiled_cuda_sources(config)
    if sources:
        native_build.build(config, [config.object_file(source) for source in sources])
    print(f"{len(sources)} CUDA sources compile ({reason}; sm_{', sm_'.join(ALL_ARCHS)})")


if __name__ == "__main__":
    try:
        main()
    except native_build.BuildError as error:
        sys.exit(str(error))
