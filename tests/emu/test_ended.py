"""A rank whose waits the host ends while its kernels run: every block leaves, and none with a copy
into or out of its shared memory still on its way, which would land in another block's."""

import re

import numpy as np
import pytest

from tests.emu._moe_backward import (
    BackwardData,
    BackwardLayer,
    ExpectedBackward,
    backward_numbers,
    make_rank,
)
from tests.emu._moe_forward import Data, Layer, needs_isa, run
from tests.emu.test_grouped_gemm import Case

pytestmark = needs_isa

ENDS = 24


class Forward:
    def __init__(self, layer: Layer):
        self.num_ranks, self.data = layer.num_ranks, Data(layer)

    def run(self, emulator, **options):
        """The run's result, and whether each rank has been ended."""
        ranks, result = run(emulator, self.data, emulator.RunOptions(**options))
        return result, [bool(rank["limits"][0]) for rank in ranks]


class Backward:
    def __init__(self, layer: BackwardLayer):
        self.num_ranks, self.layer = layer.num_ranks, layer
        self.expected = ExpectedBackward(BackwardData(layer))

    def run(self, emulator, **options):
        limits = [np.zeros(80, np.uint32) for _ in range(self.num_ranks)]
        ranks = [make_rank(self.expected, r) | {"limits": limits[r]} for r in range(self.num_ranks)]
        options = emulator.RunOptions(**options)
        result = emulator.moe_backward(backward_numbers(self.layer), ranks, options)
        return result, [bool(words[0]) for words in limits]


class Gemm:
    num_ranks = 1

    def __init__(self, case: Case):
        self.case = case

    def run(self, emulator, **options):
        try:
            return self.case.run(emulator, emulator.RunOptions(**options)), [False]
        except AssertionError:  # some of the results are missing
            return emulator.last_result(), [True]


# Long first tiles, whose weights are fetched before their rows; rows in pieces, so that pulls are
# on their way for long; rings that are used again, so that pulls wait as well.
CASES = {
    "forward": (Forward, Layer((90, 60), shared=16, hidden=328)),
    "forward, long rows": (Forward, Layer((24, 10), hidden=4104, intermediate=8, num_experts=2)),
    "forward, chunks": (
        Forward,
        Layer((300, 60), num_experts=2, hidden=200, save="gate_up", ring_rows=128),
    ),
    "backward": (Backward, BackwardLayer((90, 60), num_experts=2, shared=16, save="all")),
    "backward, long rows": (
        Backward,
        BackwardLayer((24, 10), hidden=4104, intermediate=8, num_experts=2),
    ),
    "backward, chunks": (
        Backward,
        BackwardLayer((300, 60), num_experts=2, hidden=24, save="gate_up", ring_rows=256),
    ),
    "backward, chunks through stages": (
        Backward,
        BackwardLayer((90, 33), hidden=296, accumulate=True, float32=("w_gate", "w_down")),
    ),
    "grouped GEMM": (Gemm, Case([0, 300, 129, 70, 128, 1], 840, 136)),
}


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request):
    kind, arguments = CASES[request.param]
    return kind(arguments)


def ends(emulator, case, count: int = ENDS):
    """Options of runs that end at steps spread over a whole one, the first at its beginning."""
    case.run(emulator, seed=0)
    steps = emulator.last_result().stats.steps
    for i in range(count):
        yield {"seed": i, "end": (i % case.num_ranks, steps * i // count)}


def test_a_rank_ended_at_any_step_leaves_no_copy_behind(emulator, case):
    ended = 0
    for options in ends(emulator, case):
        result, is_ended = case.run(emulator, **options)
        assert not result.trapped
        assert result.warnings == []
        ended += is_ended[options["end"][0]]
    assert ended > ENDS // 2


@pytest.mark.parametrize("policy", ["held_copies", "starved_warps", "run_until_blocked"])
def test_under_other_policies(emulator, case, policy):
    for options in ends(emulator, case, 6):
        result, _ = case.run(emulator, policy=policy, **options)
        assert not result.trapped


# Who waits for what it has loaded at a block's end, and where.
WAITS = {"load": "gemm/sm90_mainloop.cuh", "pull": "kernels/sm90_bf16_moe_pull.cuh"}


@pytest.mark.parametrize("name", ["forward", "forward, long rows", "backward"])
@pytest.mark.parametrize("role", WAITS)
def test_without_its_waits_a_block_leaves_copies_behind(emulator, name, role):
    kind, arguments = CASES[name]
    case, sites = kind(arguments), set()
    for options in ends(emulator, case):
        result, _ = case.run(emulator, collect_sites=True, **options)
        sites |= {(each.wrapper, each.file, each.line) for each in result.sites}
    [left_out] = [
        each for each in sites if each[0] == "mbar_wait_landed" and each[1].endswith(WAITS[role])
    ]
    reports = []
    for options in ends(emulator, case):
        try:
            case.run(emulator, left_out=left_out, **options)
        except emulator.EmulatorError as error:
            reports.append(str(error))
    assert reports
    for report in reports:
        assert report.startswith("exited"), report
        assert "a load is waited for before the end" in report
        assert "of stage full[" in report if role == "load" else "of pulled[" in report
        assert re.search(rf"load\w* at csrc/\S+ by rank \d block \d warp \d \({role}\)", report), (
            report
        )


def test_the_end_of_a_rank_that_is_not_there_is_refused(emulator):
    with pytest.raises(ValueError, match="end is of rank 3, which has no limits in this run"):
        Forward(Layer((5,), num_experts=2)).run(emulator, end=(3, 0))
    with pytest.raises(ValueError, match="end is of rank -1: ranks count from 0"):
        emulator.RunOptions(end=(-1, 0))
