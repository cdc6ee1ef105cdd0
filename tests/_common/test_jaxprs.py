"""Traced functions, taken apart and changed."""

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.jaxprs import scan_parts, with_zeros


def zeros_among(x):
    """Two arrays of zeros, of two dtypes, and one of ones."""
    return x + jnp.zeros(3), {"narrow": jnp.zeros((2, 3), jnp.bfloat16), "ones": jnp.ones(3)}


def test_zeros_are_made_of_given_scalars_and_other_constants_stay():
    changed = with_zeros(zeros_among, [jnp.float32(0), jnp.bfloat16(0)])
    x = jnp.arange(3.0)
    for found, expected in zip(jax.tree.leaves(changed(x)), jax.tree.leaves(zeros_among(x)), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    # Other scalars than 0 show which arrays are made of them.
    shifted, others = with_zeros(zeros_among, [jnp.float32(5), jnp.bfloat16(7)])(x)
    assert shifted.tolist() == [5, 6, 7]
    assert (others["narrow"] == 7).all()
    assert (others["ones"] == 1).all()


def test_the_arrays_of_a_scan_are_told_apart():
    def summed(fixed, start, sliced):
        return jax.lax.scan(lambda carry, row: (carry + fixed * row, carry), start, sliced)

    closed = jax.make_jaxpr(summed)(jnp.ones(3), jnp.zeros(3), jnp.ones((4, 3)))
    (equation,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
    assert scan_parts(equation) == (1, 1)
