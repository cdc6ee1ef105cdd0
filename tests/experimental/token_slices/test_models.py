"""Attention over slices: that of whole rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen.attention import attend
from jvarlen.experimental.token_slices.models import attend_last
from tests.attention.inputs import random_qkv

T = 600
SEGMENTS = jnp.array(
    [np.repeat(ids, lengths) for ids, lengths in [([1], [T]), ([1, 2, 3, 4, 0], [1, 299, 256, 3, 41]), ([0], [T])]]
)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["rows", "packed"])
def test_the_last_positions_attend_as_those_of_whole_rows(segments):
    query, key, value = random_qkv(3, T, heads=2, size=8, dtype="float32")[:3]
    whole = segments if segments is not None else jnp.ones((3, T), jnp.int32)
    within = jax.jit(functools.partial(attend, implementation="xla"))
    expected, in_window = (
        np.asarray(within(query, key, value, segment_ids=whole, window=window)) for window in (None, 7)
    )
    for num_queries in (600, 270, 1):

        @jax.jit
        def attended(query, key, value):
            return [
                [attend_last(query, key, value, segments, window=window, implementation=each) for window in (None, 7)]
                for each in ("xla", "blocks")
            ]

        for last, last_in_window in attended(query[:, -num_queries:], key, value):
            np.testing.assert_allclose(last, expected[:, -num_queries:], atol=2e-6)
            np.testing.assert_allclose(last_in_window, in_window[:, -num_queries:], atol=2e-6)
