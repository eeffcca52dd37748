"""Heaps on GPUs that are not there: mok loads tests/_fake_cuda.cpp in the driver's place."""

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from mok import _C
from tests.dist._heaps import exchange

SOURCE = Path(__file__).resolve().parents[1] / "_fake_cuda.cpp"
GRANULARITY = 2 << 20
COUNTED = ("contexts", "streams", "handles", "mappings", "reservations", "plain", "pinned")


def cuda_headers() -> Path | None:
    """Where cuda.h is, if mok was built with it."""
    from mok import _build_info

    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    return (
        home / "include"
        if _build_info.CUDA_VERSION and (home / "include/cuda.h").exists()
        else None
    )


def build_fake_driver(folder: Path, *, old: bool = False) -> str:
    headers = cuda_headers()
    if headers is None:
        pytest.skip("mok was built without CUDA, or cuda.h is not where CUDA_HOME says")
    library = folder / ("libold.so" if old else "libfake.so")
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-shared", "-fPIC"]
    command += [f"-isystem{headers}", str(SOURCE), "-o", str(library)]
    subprocess.run(command + ["-DFAKE_OLD_DRIVER"] * old, check=True, timeout=120)
    return str(library)


class FakeDriver:
    """What the stand-in is to lack; `fail` takes the name of a driver function."""

    def __init__(self, path: str):
        self._library = ctypes.CDLL(path)
        self._library.fake_live.restype = ctypes.c_long

    def set(self, **settings: int) -> None:
        for name, value in settings.items():
            self._library.fake_set(name.encode(), ctypes.c_long(value))

    def fail(self, function: str, result: int = 999, calls_before: int = 0) -> None:
        self._library.fake_fail(function.encode(), result, calls_before)

    def live(self) -> dict[str, int]:
        """What was taken from the driver and not given back."""
        counts = {what: self._library.fake_live(what.encode()) for what in COUNTED}
        return {what: count for what, count in counts.items() if count}

    def reset(self) -> None:
        self._library.fake_reset()


@contextlib.contextmanager
def fake_driver(path: str):
    _C.set_cuda_libraries(path, path)
    driver = FakeDriver(path)
    driver.reset()
    try:
        yield driver
    finally:
        driver.reset()
        _C.set_cuda_libraries("", "")


def open_device_heap(rank, group, fixed_bytes=None, arena_bytes=0):
    num_ranks = group.size()
    fixed_bytes = fixed_bytes or _C.PeerComm.control_bytes(num_ranks) + 4096
    heap = _C.SymmHeap(rank, num_ranks, fixed_bytes, arena_bytes, device=rank % 2)
    heap.connect(exchange(group, heap.address()), 30.0)
    return heap


def open_or_tell(rank, group, **options) -> str:
    """ "" or what came of it on this rank. A rank that fails early publishes nothing, as in mok."""
    address, error, heap = None, "", None
    num_ranks = group.size()
    try:
        heap = _C.SymmHeap(rank, num_ranks, 65536, 0, **({"device": rank % 2} | options))
        address = heap.address()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    addresses = exchange(group, address)
    if not error and None not in addresses:
        try:
            heap.connect(addresses, 5.0)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    exchange(group, None)
    if heap is not None:
        heap.close()
    return error
