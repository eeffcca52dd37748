"""tests/_products.py on the CPU, where integers make every order of summation exact: the oracle of
tests/gpu/test_moe.py says what `mok.moe` says."""

import pytest

from tests._numerics import assert_bitwise_equal, relative_error
from tests._products import make_chain


@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 40), (136, 264), (256, 128)])
def test_the_oracle_and_the_layer_agree_where_sums_are_exact(hidden, intermediate):
    chain = make_chain(150, hidden, intermediate, integers=True)
    expected = chain.by_matmul()
    assert expected.unique().numel() > 20
    assert_bitwise_equal({"out": chain.by_mok()}, {"out": expected})
    for first, last in ((0, 1), (17, 62), (149, 150)):
        assert_bitwise_equal({"out": chain.by_mok(first, last)}, {"out": expected[first:last]})


def test_random_values_show_another_order_of_summation():
    chain = make_chain(150, 512, 384)
    expected = chain.by_matmul()
    g, u = chain.x @ chain.gate[0].T, chain.x @ chain.up[0].T
    h = (g.float() * u.float()).bfloat16()
    first, second = (
        (h[:, part] @ chain.down[0, :, part].T).float() for part in (slice(192), slice(192, None))
    )
    assert ((first + second).bfloat16() != expected).any()
    assert relative_error(chain.by_mok(), expected) < 2**-7
