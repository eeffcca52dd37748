"""The backward megakernel in the emulator: its source gives the CPU executor's bits, under seeded
schedules, for every feature and several ranks."""

import numpy as np
import pytest

from tests.emu._moe_backward import (
    BackwardData,
    BackwardLayer,
    ExpectedBackward,
    backward_numbers,
    check,
    make_rank,
)
from tests.emu._moe_forward import UNTOUCHED, needs_isa

pytestmark = needs_isa

Case = BackwardLayer
ROUTED = ("w_gate", "w_up", "w_down")
CASES = {
    "one rank": Case((150,)),
    "two ranks": Case((150, 70)),
    "three ranks": Case((90, 40, 130), num_experts=6, top_k=3),
    "small sizes": Case((33,), hidden=8, intermediate=8),
    "several tiles": Case((140,), hidden=520, intermediate=264, num_experts=2),
    "shared expert": Case((150, 20), shared=200),
    "shared expert, saved": Case((150, 20), shared=40, save="all", shared_weighted=False),
    "biases": Case((100, 50), biases=True, intermediate=152, hidden=264),
    "limit": Case((60,), activation="swiglu_limit", biases=True, save="gate_up"),
    "gpt-oss": Case((60,), activation="gpt_oss", biases=True),
    "saves gate and up": Case((150, 70), save="gate_up"),
    "saves all": Case((100, 170), save="all"),
    "chunks": Case((300, 100), ring_rows=256, num_experts=8),
    "chunks, saved": Case((300, 100), ring_rows=384, num_experts=8, save="all"),
    "chunks, gate and up": Case(
        (300, 100), ring_rows=256, num_experts=8, save="gate_up", biases=True
    ),
    "cut segments": Case((700,), ring_rows=128, skew=0.8, hidden=16, intermediate=16, biases=True),
    "cut segments, saved": Case((600, 30), ring_rows=256, skew=0.9, save="gate_up", hidden=72),
    "packed": Case((70,), view="packed", hidden=64, intermediate=192, num_experts=2),
    "interleaved": Case((70,), view="interleaved", hidden=64, intermediate=192, num_experts=2),
    "FP32 gradients": Case((90,), float32=ROUTED, shared=24),
    "adds to FP32": Case((90, 33), float32=ROUTED, accumulate=True, hidden=296),
    "adds to BF16": Case((90, 33), accumulate=True, biases=True, intermediate=264, num_experts=16),
    "adds, cut segments": Case((500,), ring_rows=128, skew=0.9, hidden=24, accumulate=True),
    "some in FP32": Case(
        (90,), float32=("w_up", "b_down", "shared_w_down"), biases=True, shared=24
    ),
    "frozen experts": Case((150, 70), gradients=("x", "weights"), save="gate_up"),
    "frozen x": Case((150, 70), gradients=("weights", *ROUTED), biases=True),
    "router alone": Case((150, 70), gradients=("weights", "shared_weight"), shared=40),
    "one matrix": Case((100,), gradients=("w_down",)),
    "nothing but biases": Case((140,), gradients=("b_gate", "b_up", "b_down"), biases=True),
    "nothing": Case((50,), gradients=()),
    "no tokens on one rank": Case((0, 120), shared=16),
    "no tokens": Case((0, 0), shared=16),
    "no tokens, one rank": Case((0,), shared=16, biases=True),
    "no tokens, added": Case((0,), float32=ROUTED, accumulate=True),
    "one token": Case((1,)),
    "no routes": Case((50, 50), none_share=1.0),
    "one block": Case((150, 70), num_blocks=1),
    "rows in pieces": Case((20, 10), hidden=4104, intermediate=8, num_experts=2),
    "rows in pieces, chunks": Case(
        (30, 10), hidden=4104, intermediate=8, num_experts=6, ring_rows=128
    ),
}


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def expected(request) -> ExpectedBackward:
    return ExpectedBackward(BackwardData(CASES[request.param]))


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_executor(emulator, expected, seed):
    check(emulator, expected, emulator.RunOptions(seed=seed))


@pytest.mark.parametrize(
    "policy", ["random", "run_until_blocked", "starved_warps", "held_copies", "late_rank"]
)
@pytest.mark.parametrize("name", ["two ranks", "chunks, gate and up", "shared expert, saved"])
def test_under_every_policy(emulator, name, policy):
    expected = ExpectedBackward(BackwardData(CASES[name]))
    for seed in range(2):
        check(emulator, expected, emulator.RunOptions(seed=seed, policy=policy))


KERNEL = "mok's backward kernel"
PLACES = range(32, 39)  # csrc/layout/wait_place.h


@pytest.mark.parametrize("seed", range(5))
def test_a_wait_that_expires_ends_every_role_and_traps(emulator, seed):
    layer = Case((90, 60), shared=16, lose_pulls=True)
    expected = ExpectedBackward(BackwardData(layer))
    limits = [np.zeros(80, np.uint32) for _ in range(2)]
    ranks = [make_rank(expected, r) | {"limits": limits[r]} for r in range(2)]
    options = emulator.RunOptions(seed=seed, time_outs=True)
    result = emulator.moe_backward(backward_numbers(layer), ranks, options)
    assert KERNEL in result.trapped
    for words in limits:
        complete, place = words[64:66]
        assert (words[0] != 0) == (complete == 1)
        assert complete == 0 or place in PLACES


@pytest.mark.parametrize("seed", range(3))
def test_a_workspace_that_has_ended_writes_nothing(emulator, seed):
    layer = Case((90, 60), shared=16)
    expected = ExpectedBackward(BackwardData(layer))
    limits = [np.array([1] + [0] * 79, np.uint32) for _ in range(2)]
    ranks = [make_rank(expected, r) | {"limits": limits[r]} for r in range(2)]
    result = emulator.moe_backward(backward_numbers(layer), ranks, emulator.RunOptions(seed=seed))
    assert not result.trapped
    for rank in ranks:
        assert (rank["home_rows"] == UNTOUCHED).all()
        assert (rank["shared_rows"] == UNTOUCHED).all()


def test_a_wrong_bit_is_seen(emulator):
    expected = ExpectedBackward(BackwardData(CASES["one token"]))
    name = "w_down"
    expected.gradients[name][0, 0, 0] ^= 1
    with pytest.raises(AssertionError, match="gradient of w_down: 1 of"):
        check(emulator, expected, emulator.RunOptions())
