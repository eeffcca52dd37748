"""The wrappers of csrc/ptx in the emulator, by the same cases as tests/gpu/test_ptx.py."""

import pytest

from tests.emu._emulator import EmulatorRunner
from tests.ptx_cases import CASES, Case

SEEDS = 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrappers(emulator, case: Case):
    for seed in range(SEEDS):
        case.check(EmulatorRunner(emulator, seed), *case.arguments)


@pytest.mark.parametrize("policy", ["random", "run_until_blocked", "starved_warps", "held_copies"])
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if not case.name.startswith("wgmma")],
    ids=lambda case: case.name,
)
def test_wrappers_under_every_policy(emulator, case: Case, policy: str):
    case.check(EmulatorRunner(emulator, 11, policy), *case.arguments)
