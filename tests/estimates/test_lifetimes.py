"""What a traced function holds at its fullest point, counted by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen.estimates.lifetimes import lifetimes_of

W = jax.ShapeDtypeStruct((8, 8), np.float32)
ONE = 8 * 8 * 4


def peak(function, *args):
    return lifetimes_of(jax.make_jaxpr(function)(*args)).peak()


def test_elementwise_results_are_computed_where_they_are_used():
    assert peak(lambda x: jnp.sum(3 * x + 1), W) == 4
    assert peak(lambda x: x @ x + 1, W) == ONE  # in the place of the product
    assert peak(lambda x: (x + 1) @ x, W) == 2 * ONE  # the sum is stored for the product


def test_a_product_is_added_in_place():
    assert peak(lambda x: x @ x + (x @ x) @ x, W) == 2 * ONE  # one of the products is added to the other

    def accumulating(x):
        return jax.lax.scan(lambda total, _: (total + x @ x, None), x @ x, None, length=5)[0]

    assert peak(accumulating, W) == ONE


def test_a_product_that_is_only_rounded_is_stored_in_the_narrower_type():
    def rounding(x):
        return (x @ x).reshape(64).astype(jnp.bfloat16)

    assert peak(rounding, W) == ONE / 2
    assert peak(lambda x: (rounding(x), x @ x), W) == 1.5 * ONE


def test_results_of_one_kernel_take_the_places_of_all_that_it_reads():
    def gated(x):
        y, z = x @ x, x @ x
        return (jnp.cos(y) * jnp.sin(z)) @ x

    assert peak(gated, W) == 2 * ONE  # the factors, one of which the result replaces


def test_zeros_that_are_added_are_no_array():
    assert peak(lambda x: (x + jnp.zeros(())) @ x, W) == ONE


def test_constants_are_made_before_the_last_loop():
    def updating(x):
        square = (x @ x) @ x
        looped = jax.lax.scan(lambda total, _: (jnp.tanh(total), None), square, None, length=5)[0]
        return jnp.zeros((16, 8)).at[jnp.arange(8)].add(looped)

    assert peak(updating, W) == pytest.approx(3 * ONE, abs=64)  # not with both products of the square


def test_what_is_not_used_is_not_there():
    assert peak(lambda x: (x @ x, x @ (x @ x))[0], W) == ONE


def test_a_loop_holds_what_it_carries_once_and_what_it_stacks():
    def carrying(x):
        return jax.lax.scan(lambda total, _: (total + 1, None), x @ x, None, length=5)[0]

    def stacking(x):
        return jax.lax.scan(lambda total, _: (total + 1, total), x @ x, None, length=5)[1]

    assert peak(carrying, W) == ONE
    assert peak(stacking, W) == 6 * ONE


def test_branches_share_memory():
    def branching(x, i):
        return jax.lax.cond(i > 0, lambda: (x @ x) @ x, lambda: ((x @ x) @ x) @ x)

    assert peak(branching, W, jax.ShapeDtypeStruct((), np.int32)) <= 2 * ONE + 4


def test_other_sizes_of_the_same_arrays():
    lifetimes = lifetimes_of(jax.make_jaxpr(lambda x: (x @ x) @ x)(W))
    many = np.stack([lifetimes.num_bytes, 10 * lifetimes.num_bytes])
    assert lifetimes.peak(many).tolist() == [2 * ONE, 20 * ONE]
