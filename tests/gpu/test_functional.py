"""`mok.functional` on a GPU: the bits of `mok.moe`, with and without a recomputed context."""

import pytest

from mok import functional
from mok.functional import MoKConfig
from tests._functional import step
from tests._numerics import assert_bitwise_equal
from tests.gpu._moe import gpu_case, ours

pytestmark = pytest.mark.usefixtures("needs_sm90")


@pytest.fixture(autouse=True)
def no_workspaces_left():
    yield
    functional.clear_workspace_cache()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("save", ["all", "gate_up", "none"])
@pytest.mark.parametrize("shared", [None, 72])
def test_gives_the_bits_of_moe(shared, save, recompute):
    case = gpu_case(300, 4, 8, 128, 64, shared=shared)
    got = step(MoKConfig(save=save), case, recompute=recompute)
    assert_bitwise_equal(got, ours(case))
