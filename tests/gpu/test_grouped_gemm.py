"""The grouped GEMM on the GPU against FP64, for all shapes, ragged segments and weight views."""

import pytest
import torch

from tests._numerics import assert_bitwise_equal
from tests.gpu._grouped_gemm import BLOCK, GroupedGemm, segments, valid_rows

pytestmark = pytest.mark.usefixtures("needs_sm90")

BF16 = torch.bfloat16
RAGGED = [0, 1, 63, 64, 65, 127, 128, 129, 0, 300, 0]


def make(counts, columns, depth, *, seed=0, view=None) -> GroupedGemm:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    rows = int(segments(counts)[-1])
    x = torch.full((rows, depth), torch.nan, dtype=BF16, device="cuda")
    x[valid_rows(counts).cuda()] = normal(sum(counts), depth).to(BF16)
    experts = len(counts)
    if view == "packed":  # the second half of [E, 2 N, K]
        weights = normal(experts, 2 * columns, depth).to(BF16)[:, columns:]
    elif view == "interleaved":  # every second row
        weights = normal(experts, 2 * columns, depth).to(BF16)[:, 1::2]
    else:
        weights = normal(experts, columns, depth).to(BF16)
    return GroupedGemm(counts, x, weights * depth**-0.5 if view is None else weights)


def check(gemm: GroupedGemm) -> None:
    """Rounding to BF16 is 2^-9 of each element; sums in FP32 add next to nothing."""
    rows = valid_rows(gemm.counts).cuda()
    y, exact = gemm()[rows].double(), gemm.exact()
    assert torch.isfinite(y).all()
    assert (y - exact).norm() <= 2**-8 * exact.norm()
    # Where no 64-row half of a block has a valid row, y is left alone.
    written = torch.zeros(len(gemm.y), dtype=torch.bool, device="cuda")
    for row in (rows // 64 * 64).unique().tolist():
        written[row : row + 64] = True
    assert gemm.y[~written].isnan().all()


@pytest.mark.parametrize(
    ("columns", "depth"),
    [
        (256, 64),  # one tile, one K step
        (8, 8),
        (24, 72),
        (256, 128),
        (264, 320),
        (128, 192),
        (768, 2048),
        (2880, 2880),
        (2048, 776),
    ],
)
def test_shapes(columns, depth):
    check(make(RAGGED, columns, depth))


@pytest.mark.parametrize("view", ["packed", "interleaved"])
def test_weights_may_be_views(view):
    check(make([100, 0, 200, 3], 328, 520, view=view))


def test_one_expert_and_many():
    check(make([1000], 512, 256))
    check(make([5 * i % 97 for i in range(192)], 256, 64))


def test_nothing_to_do():
    gemm = make([0, 0, 0], 256, 64)
    assert gemm().numel() == 0
    gemm = GroupedGemm([0, 0], torch.zeros(BLOCK, 64, dtype=BF16, device="cuda"), gemm.weights[:2])
    assert gemm().isnan().all()


def test_the_same_bits_every_time_and_under_replay():
    gemm = make([777, 0, 130, 1025], 1032, 520)
    first = gemm().clone()
    for _ in range(20):
        gemm.y.fill_(torch.nan)
        rows = valid_rows(gemm.counts).cuda()
        assert_bitwise_equal({"y": gemm()[rows]}, {"y": first[rows]})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm()
    gemm.y.fill_(torch.nan)
    graph.replay()
    assert_bitwise_equal({"y": gemm.y[rows]}, {"y": first[rows]})


def test_a_row_depends_on_itself_alone():
    gemm = make([400], 512, 1024)
    together = gemm()[:400].clone()
    for row in (0, 64, 399):
        x = torch.zeros(BLOCK, 1024, dtype=BF16, device="cuda")
        x[0] = gemm.x[row]
        alone = GroupedGemm([1], x, gemm.weights)()[0]
        assert_bitwise_equal({"y": alone}, {"y": together[row]})


def test_more_than_2_to_the_31_elements():
    """x, y and the weights: a 32-bit offset would wrap in each."""
    free, _ = torch.cuda.mem_get_info()
    if free < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    depth, columns, experts = 4096, 8192, 66
    counts = [0] * experts
    counts[0], counts[-1] = (2**31 // depth) // BLOCK * BLOCK - BLOCK, 200
    rows = int(segments(counts)[-1])
    x = torch.zeros(rows, depth, dtype=BF16, device="cuda")
    weights = torch.zeros(experts, columns, depth, dtype=BF16, device="cuda")
    assert x.numel() > 2**31
    assert weights.numel() > 2**31
    begin = int(segments(counts)[-2])
    generator = torch.Generator("cuda").manual_seed(0)
    x[begin : begin + 200] = torch.randn(200, depth, generator=generator, device="cuda").to(BF16)
    weights[-1] = torch.randn(columns, depth, generator=generator, device="cuda").to(BF16)
    y = GroupedGemm(counts, x, weights)()
    exact = x[begin : begin + 200].double() @ weights[-1].double().T
    actual = y[begin : begin + 200].double()
    assert (actual - exact).norm() <= 2**-8 * exact.norm()
    assert not y[: counts[0]].any()
