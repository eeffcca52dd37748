"""Builds and loads the emulator (csrc/emu and the kernels over it), and runs kernels on it.

    emulator = load()                                     # builds what changed
    emulator.ptx_test("warp", inputs, numbers, outputs, emulator.RunOptions(seed=7))

A kernel's error is an `EmulatorError` with the machine's report; its seed and policy repeat it.
"""

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

from tests.ptx_cases import Runner
from tools import emulator_build

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def load() -> ModuleType:
    """The `_emulator` module, brought up to date first. Raises native_build.BuildError."""
    path = emulator_build.build(emulator_build.make_config(ROOT, Path(torch.__file__).parent))
    spec = importlib.util.spec_from_file_location("_emulator", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["_emulator"] = module
    return module


class EmulatorRunner(Runner):
    """Test kernels under one schedule."""

    is_device = False

    def __init__(self, emulator: ModuleType, seed: int = 1, policy: str = "by_seed") -> None:
        self.emulator, self.seed, self.policy = emulator, seed, policy

    @property
    def multiprocessors(self) -> int:
        return self.emulator.num_multiprocessors()

    def launch(self, name, inputs, numbers, outputs, sm90, time_outs) -> None:
        options = self.emulator.RunOptions(seed=self.seed, policy=self.policy, time_outs=time_outs)
        test = self.emulator.sm90_ptx_test if sm90 else self.emulator.ptx_test
        test(name, inputs, numbers, outputs, options)
