"""The forward megakernel in the emulator: its source gives the CPU executor's bits, under seeded
schedules, for every feature and several ranks."""

import pytest

from tests.emu._moe_forward import UNTOUCHED, Data, Expected, Layer, check, needs_isa, run

pytestmark = needs_isa

CASES = {
    "one rank": Layer((150,)),
    "two ranks": Layer((150, 70)),
    "three ranks": Layer((90, 40, 130), num_experts=6, top_k=3),
    "small sizes": Layer((33,), hidden=8, intermediate=8),
    "sizes 24 and 72": Layer((40, 9), hidden=24, intermediate=72),
    "several tiles": Layer((140,), hidden=520, intermediate=264, num_experts=2),
    "one column tile of each": Layer((40,), hidden=256, intermediate=128, num_experts=2),
    "wide, the table's second row": Layer((40,), hidden=16, intermediate=1536, num_experts=2),
    "shared expert": Layer((150, 20), shared=200),
    "shared expert, saved": Layer((150, 20), shared=40, save="all"),
    "biases": Layer((100, 50), biases=True, intermediate=152, hidden=264),
    "limit": Layer((60,), activation="swiglu_limit", biases=True),
    "gpt-oss": Layer((60,), activation="gpt_oss", biases=True),
    "saves gate and up": Layer((150, 70), save="gate_up"),
    "saves all": Layer((100, 170), save="all"),
    "recomputes": Layer((100, 70), save="all", recompute=True, shared=24),
    "recomputes gate and up": Layer((200,), save="gate_up", recompute=True, ring_rows=256),
    "chunks": Layer((300, 100), ring_rows=256, num_experts=8),
    "chunks, saved": Layer((300, 100), ring_rows=384, num_experts=8, save="all"),
    "cut segments": Layer((700,), ring_rows=128, skew=0.8, hidden=16, intermediate=16),
    "cut segments, saved": Layer((600, 30), ring_rows=256, skew=0.9, save="gate_up", hidden=16),
    "packed": Layer((70,), view="packed", hidden=64, intermediate=192, num_experts=2),
    "interleaved": Layer((70,), view="interleaved", hidden=64, intermediate=192, num_experts=2),
    "no tokens on one rank": Layer((0, 120), shared=16),
    "no tokens": Layer((0, 0), shared=16),
    "one token": Layer((1,)),
    "no routes": Layer((50, 50), none_share=1.0),
    "one block": Layer((150, 70), num_blocks=1),
    "more choices than lanes": Layer((40,), num_experts=48, top_k=40, hidden=16, intermediate=8),
    "a short pull list": Layer((3, 4), num_blocks=3, top_k=1),
    "rows in pieces": Layer((20, 10), hidden=4104, intermediate=8, num_experts=2),
    "rows in pieces, chunks": Layer(
        (30, 10), hidden=4104, intermediate=8, num_experts=6, ring_rows=128
    ),
}


@pytest.fixture(scope="module", params=CASES, ids=lambda name: name.replace(" ", "-"))
def expected(request) -> Expected:
    return Expected(Data(CASES[request.param]))


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_executor(emulator, expected, seed):
    check(emulator, expected, emulator.RunOptions(seed=seed))


@pytest.mark.parametrize(
    "policy", ["random", "run_until_blocked", "starved_warps", "held_copies", "late_rank"]
)
@pytest.mark.parametrize("name", ["two ranks", "chunks, saved", "shared expert, saved"])
def test_under_every_policy(emulator, name, policy):
    expected = Expected(Data(CASES[name]))
    for seed in range(2):
        check(emulator, expected, emulator.RunOptions(seed=seed, policy=policy))


KERNEL = "mok's forward kernel"
PLACES = range(32, 39)  # csrc/layout/wait_place.h


@pytest.mark.parametrize("seed", range(5))
def test_a_wait_that_expires_ends_every_role_and_traps(emulator, seed):
    layer = Layer((90, 60), lose_pulls=True, shared=16)
    options = emulator.RunOptions(seed=seed, time_outs=True)
    ranks, result = run(emulator, Data(layer), options)
    assert KERNEL in result.trapped
    for rank in ranks:
        complete, place = rank["limits"][64:66]
        assert (rank["limits"][0] != 0) == (complete == 1)
        assert complete == 0 or place in PLACES


@pytest.mark.parametrize("seed", range(3))
def test_a_workspace_that_has_ended_runs_nothing(emulator, seed):
    layer = Layer((90, 60), shared=16, save="all")
    ranks, result = run(emulator, Data(layer), emulator.RunOptions(seed=seed), has_ended=1)
    assert not result.trapped
    for rank in ranks:
        for name in ("home_rows", "shared_rows", "saved_x", "saved_gate"):
            assert (rank[name] == UNTOUCHED).all()
