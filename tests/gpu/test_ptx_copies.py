"""Wrappers of csrc/ptx that copy: bulk, tensor and multicast copies, clusters."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tests.gpu._isolated import Isolated
from tests.gpu._ptx import filled, run, to_gpu, words

SWIZZLE_BYTES = {0: 0, 1: 32, 2: 64, 3: 128}  # as tensor maps number them
PLAIN, HINT, REDUCE = 0, 1, 2


@pytest.fixture(scope="module")
def isolated():
    child = Isolated()
    yield child
    child.close()


def swizzled(lines: np.ndarray, swizzle: int) -> np.ndarray:
    """Raw bytes of a tile whose lines (rows of bytes, as wide as the swizzle) follow one another.

    16-byte piece p of line l goes to piece p xor (the low bits of the number of the 128 bytes that
    the line lies in); the tile starts at a multiple of 1024.
    """
    width = SWIZZLE_BYTES[swizzle]
    if width == 0:
        return lines.ravel()
    assert lines.shape[1] == width
    pieces = lines.reshape(-1, 16)
    index = np.arange(len(pieces))
    mask = width // 16 - 1
    target = index ^ ((index * 16 >> 7) & mask)
    raw = np.empty_like(pieces)
    raw[target] = pieces
    return raw.ravel()


@pytest.mark.parametrize("hint", [False, True])
@pytest.mark.parametrize("chunk", [16, 144, 4096, 65536])
def test_bulk_copies_and_reductions(chunk, hint):
    floats = torch.arange(chunk // 4 * 5, device="cuda") % 1009
    source = floats.float()
    copy, total = filled(len(source), dtype=torch.float32), source * 2
    run("bulk", [source], [chunk, int(hint)], [copy, total])
    assert torch.equal(copy, source + 1)
    assert torch.equal(total, source * 4 + 2)


@dataclass
class TensorCopy:
    """One box from `source` at `load_at` to `target` at `store_at`; all innermost first."""

    name: str
    sizes: tuple[int, int, int]
    box: tuple[int, int, int]
    load_at: tuple[int, int, int]
    target_sizes: tuple[int, int, int]
    store_at: tuple[int, int, int]
    swizzle: int = 0
    dtype: torch.dtype = torch.bfloat16
    dims: int = 2
    mode: int = PLAIN
    numbers: list[int] = field(init=False)

    def __post_init__(self):
        element_bytes = self.dtype.itemsize
        shapes = (self.sizes, self.box, self.load_at, self.target_sizes, self.store_at)
        self.numbers = [element_bytes, self.dims, self.swizzle, self.mode]
        for shape in shapes:
            self.numbers += shape


BF16, FP32 = torch.bfloat16, torch.float32
COPIES = [
    TensorCopy("128B", (256, 200, 1), (64, 64, 1), (64, 32, 0), (64, 64, 1), (0, 0, 0), 3),
    TensorCopy("64B", (256, 200, 1), (32, 64, 1), (64, 32, 0), (64, 64, 1), (32, 0, 0), 2),
    TensorCopy("32B", (256, 200, 1), (16, 256, 1), (64, 0, 0), (64, 256, 1), (16, 0, 0), 1),
    TensorCopy("fp32 128B", (96, 40, 1), (32, 40, 1), (32, 0, 0), (32, 40, 1), (0, 0, 0), 3, FP32),
    TensorCopy("past the end", (72, 70, 1), (64, 64, 1), (64, 64, 0), (72, 70, 1), (64, 64, 0), 3),
    # Only loads may begin before 0.
    TensorCopy("before 0", (72, 70, 1), (64, 64, 1), (-16, -5, 0), (72, 70, 1), (8, 3, 0), 3),
    TensorCopy("load outside", (64, 64, 1), (64, 64, 1), (0, 64, 0), (64, 64, 1), (0, 0, 0), 3),
    TensorCopy("store outside", (64, 64, 1), (64, 64, 1), (0, 0, 0), (64, 64, 1), (64, 0, 0), 3),
    TensorCopy("hint", (256, 200, 1), (64, 8, 1), (8, 8, 0), (64, 64, 1), (0, 3, 0), 3, mode=HINT),
    TensorCopy(
        "fp32 sum",
        (64, 64, 1),
        (32, 64, 1),
        (8, 0, 0),
        (40, 60, 1),
        (12, 0, 0),
        3,
        FP32,
        mode=REDUCE,
    ),
    TensorCopy(
        "bf16 sum",
        (64, 64, 1),
        (64, 64, 1),
        (0, 0, 0),
        (64, 64, 1),
        (0, 1, 0),
        3,
        BF16,
        mode=REDUCE,
    ),
    TensorCopy("stack", (64, 20, 3), (64, 16, 1), (0, 12, 1), (64, 10, 3), (0, 4, 2), 3, BF16, 3),
    TensorCopy("stack 64B", (40, 9, 4), (32, 3, 2), (16, 8, 3), (40, 9, 4), (8, 0, 3), 2, BF16, 3),
]


def window(tensor: np.ndarray, at: tuple[int, ...], box: tuple[int, ...]) -> np.ndarray:
    """The box at `at` (innermost first) of tensor [z, y, x], zeros outside."""
    result = np.zeros(box[::-1], tensor.dtype)
    for z, y, x in np.ndindex(result.shape):
        place = (z + at[2], y + at[1], x + at[0])
        if all(0 <= p < size for p, size in zip(place, tensor.shape, strict=True)):
            result[z, y, x] = tensor[place]
    return result


def check_tensor_copy(case: TensorCopy) -> None:
    # Integers that BF16 holds exactly, sums of two as well.
    source = np.arange(np.prod(case.sizes)).reshape(case.sizes[::-1]) % 101 + 1.0
    before = np.arange(np.prod(case.target_sizes)).reshape(case.target_sizes[::-1]) % 17 - 40.0
    source_gpu = torch.from_numpy(source).to("cuda", case.dtype)
    target_gpu = torch.from_numpy(before).to("cuda", case.dtype)
    element_bytes = case.dtype.itemsize
    raw = filled(int(np.prod(case.box)) * element_bytes // 4)
    run("tma", [source_gpu], case.numbers, [raw, target_gpu])

    tile = window(source, case.load_at, case.box)
    tile_bytes = torch.from_numpy(tile).to(case.dtype).view(torch.uint8).numpy()
    lines = tile_bytes.reshape(-1, case.box[0] * element_bytes)
    np.testing.assert_array_equal(words(raw).view(np.uint8), swizzled(lines, case.swizzle))

    expected = before.copy()
    for z, y, x in np.ndindex(tile.shape):
        place = (z + case.store_at[2], y + case.store_at[1], x + case.store_at[0])
        if all(0 <= p < size for p, size in zip(place, expected.shape, strict=True)):
            added = expected[place] if case.mode == REDUCE else 0
            expected[place] = tile[z, y, x] + added
    np.testing.assert_array_equal(target_gpu.double().cpu().numpy(), expected)


@pytest.mark.parametrize("case", COPIES, ids=lambda case: case.name)
def test_tensor_copies(isolated, case):
    isolated.run(check_tensor_copy, case)


def check_cluster(clusters: int) -> None:
    blocks = 2 * clusters
    tiles = torch.randn(clusters * 64, 64, device="cuda").bfloat16()
    out, copies = filled(blocks, 256), filled(blocks, 64, 64, dtype=torch.bfloat16)
    run("cluster", [tiles], [clusters], [out, copies])
    block = np.arange(blocks)
    peer = block ^ 1
    expected = np.concatenate(
        [
            peer[:, None] * 1000 + (np.arange(128) + 1) % 128,  # the neighbour's words
            7000 + peer[:, None],  # released to it at cluster scope
            peer[:, None] + np.arange(0, 40, 10),  # sent by st.async
            np.ones((blocks, 1), int),  # a plain arrival came
            block[:, None] % 2,
            np.full((blocks, 1), 2),
        ],
        axis=1,
    )
    np.testing.assert_array_equal(words(out)[:, : expected.shape[1]], expected)
    assert torch.equal(copies, tiles.view(clusters, 64, 64).repeat_interleave(2, dim=0))


@pytest.mark.parametrize("clusters", [1, 3, 40])
def test_clusters_share_memory_barriers_and_multicasts(isolated, clusters):
    isolated.run(check_cluster, clusters)


@pytest.mark.parametrize(
    ("load_at", "store_at", "message"),
    [
        ((0, 0, 0), (-8, 0, 0), "stores at -8, 0, 0: a store must not begin before 0"),
        ((0, 0, 0), (0, -1, 0), "stores at 0, -1, 0: a store must not begin before 0"),
        ((0, 0, 0), (4, 0, 0), "stores at 4, 0, 0: the first must be a multiple of 8 elements"),
        ((9, 0, 0), (0, 0, 0), "loads at 9, 0, 0: the first must be a multiple of 8 elements"),
    ],
)
def test_coordinates_on_which_the_hardware_traps_are_refused(load_at, store_at, message):
    case = TensorCopy("x", (64, 64, 1), (64, 64, 1), load_at, (64, 64, 1), store_at, 3)
    source, target = (torch.zeros(64, 64, device="cuda", dtype=BF16) for _ in range(2))
    with pytest.raises(ValueError, match=message):
        run("tma", [source], case.numbers, [filled(2048), target])


def test_a_tensor_map_that_the_driver_refuses_is_described():
    case = TensorCopy("x", (60, 64, 1), (64, 64, 1), (0, 0, 0), (64, 64, 1), (0, 0, 0), 3)
    source = torch.zeros(64, 60, device="cuda", dtype=torch.bfloat16)
    target = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    # Rows of 120 bytes: strides must be multiples of 16.
    with pytest.raises(
        RuntimeError, match=r"cuTensorMapEncodeTiled refused .* row stride 120 bytes"
    ):
        run("tma", [source], case.numbers, [filled(2048), target])


def test_bits_of_uint16_arrays_reach_the_gpu():
    array = np.array([0x3F80, 0xC000], np.uint16)
    assert to_gpu(array).float().tolist() == [1.0, -2.0]
