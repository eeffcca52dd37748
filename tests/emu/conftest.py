"""Tests of this folder run GPU kernels on the CPU, in an emulator that is built on demand."""

import faulthandler
from types import ModuleType

import pytest

from tests.emu import _emulator
from tools.native_build import BuildError


@pytest.fixture(scope="session")
def emulator() -> ModuleType:
    """The `_emulator` module."""
    if not (_emulator.ROOT / "csrc").is_dir():
        pytest.skip("the emulator is built from csrc, which is not here")
    faulthandler.cancel_dump_traceback_later()  # compiling may take longer than a test
    try:
        return _emulator.load()
    except BuildError as error:
        pytest.fail(f"the emulator could not be built: {error}", pytrace=False)
