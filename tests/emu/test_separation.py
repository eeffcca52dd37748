"""The device's code does not depend on the emulator: it neither names nor includes it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.emu._emulator import ROOT
from tools import native_build

EMULATOR = tuple(f"csrc/{folder}/" for folder in native_build.EMULATOR_FOLDERS)
# Each takes the emulator's side of a pair of headers where nvcc is not the compiler.
SWITCHES = {"csrc/ptx/ptx.h", "csrc/launch/launch.cuh"}
KERNEL_FOLDERS = ("ptx", "layout", "schedule", "comm", "gemm", "kernels")


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / "csrc" / folder).rglob("*.*")]
    return [path for path in found if not is_emulator(path)]


def is_emulator(path: Path) -> bool:
    return str(path.relative_to(ROOT)).startswith(EMULATOR)


def test_only_two_headers_choose_between_device_and_emulator():
    naming = set()
    for path in sources("."):
        text = path.read_text()
        if any(f'#include "{folder}' in text for folder in EMULATOR):
            naming.add(str(path.relative_to(ROOT)))
    bindings = {name for name in naming if name.startswith("csrc/bindings/emulator/")}
    assert naming - bindings == SWITCHES


def test_kernels_have_no_branches_for_the_emulator():
    words = re.compile(r"MOK_EMULATOR|\bemu::|#\s*if.*__CUDA_ARCH__")
    named = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sources(*KERNEL_FOLDERS)
        if str(path.relative_to(ROOT)) not in SWITCHES
        for match in words.finditer(path.read_text())
    ]
    assert not named


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("device", [True, False])
def test_what_kernels_include(device):
    """As the preprocessor follows it, with CUDA's headers taken for granted (-MG)."""
    entry = ROOT / "csrc" / "launch" / "ptx_tests.cu"
    define = "-D__CUDACC__" if device else "-DMOK_EMULATOR"
    command = [
        "g++",
        "-x",
        "c++",
        "-std=c++20",
        "-E",
        "-MM",
        "-MG",
        define,
        f"-I{ROOT}",
        str(entry),
    ]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    files = {Path(name).resolve() for name in re.findall(r"[^\s\\]+\.(?:h|cuh)", output)}
    ours = {str(file.relative_to(ROOT)) for file in files if ROOT in file.parents}
    of_emulator = {name for name in ours if name.startswith(EMULATOR)}
    of_device = {name for name in ours if name.startswith("csrc/ptx/device/")}
    assert bool(of_emulator) != device
    assert bool(of_device) == device
