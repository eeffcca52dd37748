"""Arrays for the kernel tests: BF16 as uint16 bits, layouts, memory that ends at a fault."""

import ctypes
import mmap

import numpy as np

_LIBC = ctypes.CDLL(None, use_errno=True)
_PROT_NONE = 0
_MAP_NORESERVE = 0x4000  # Linux; mmap.MAP_NORESERVE from Python 3.13 on


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; a NaN stays a quiet NaN."""
    words = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = ((words >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(x), quiet, rounded)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def bits(x: np.ndarray) -> np.ndarray:
    """Floats as integers, so that -0 differs from 0 and a NaN equals itself."""
    return x if x.dtype == np.uint16 else np.ascontiguousarray(x).view(np.uint32)


def with_layout(x: np.ndarray, layout: str) -> np.ndarray:
    """The same [index, k] matrix, contiguous along k ("k") or along the index ("mn")."""
    return np.ascontiguousarray(x) if layout == "k" else np.asfortranarray(x)


def before_forbidden_page(x: np.ndarray, layout: str = "k") -> np.ndarray:
    """A copy of x whose last byte is the last one before a page without access."""
    page = mmap.PAGESIZE
    size = -(-max(x.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, size + page)
    whole = np.frombuffer(memory, np.uint8)
    if _LIBC.mprotect(ctypes.c_void_p(whole.ctypes.data + size), page, _PROT_NONE) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    flat = whole[size - x.nbytes : size].view(x.dtype)
    shaped = flat.reshape(x.shape) if layout == "k" else flat.reshape(x.shape[::-1]).T
    shaped[...] = x
    return shaped


def address_space(elements: int, dtype: type) -> np.ndarray:
    """Address space that costs memory only where it is written."""
    size = elements * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), dtype)
