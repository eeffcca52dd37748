"""The wrappers of csrc/ptx on the hardware: tests/ptx_cases has what each must give."""

import pytest

from tests.gpu._isolated import Isolated
from tests.gpu._ptx import check_on_gpu
from tests.ptx_cases import CASES, Case


@pytest.fixture(scope="module")
def isolated():
    child = Isolated()
    yield child
    child.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrappers(isolated: Isolated, request: pytest.FixtureRequest, case: Case):
    if case.needs_sm90:
        request.getfixturevalue("needs_sm90")
    if case.may_trap:
        isolated.run(check_on_gpu, case)
    else:
        check_on_gpu(case)
