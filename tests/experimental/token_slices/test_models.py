"""Attention over slices: that of whole rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen.attention import attend
from jvarlen.experimental.token_slices.models import SlicedAxes, attend_over_slices
from jvarlen.parallel.layers import Axes
from tests.attention.inputs import random_qkv

T = 600
SEGMENTS = jnp.array(
    [np.repeat(ids, lengths) for ids, lengths in [([1], [T]), ([1, 2, 3, 4, 0], [1, 299, 256, 3, 41]), ([0], [T])]]
)


@pytest.mark.parametrize(
    "of_rows", [{"lengths": np.array([600, 332, 0], np.uint16)}, {"segment_ids": SEGMENTS}], ids=["padded", "packed"]
)
def test_the_last_positions_attend_as_those_of_whole_rows(of_rows):
    query, key, value = random_qkv(3, T, heads=2, size=8, dtype="float32")[:3]
    within = jax.jit(functools.partial(attend, implementation="xla"))
    expected = [within(query, key, value, window=window, **of_rows) for window in (None, 7)]
    whole = key, value, of_rows.get("segment_ids")

    @functools.partial(jax.jit, static_argnums=0)
    def attended(before):
        axes = SlicedAxes.of(Axes(), lambda own: jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, :before], whole))
        of_slice = {name: leaf[:, before:] if leaf.ndim > 1 else jnp.asarray(leaf) for name, leaf in of_rows.items()}
        qkv = (leaf[:, before:] for leaf in (query, key, value))
        over_slices = functools.partial(attend_over_slices, *map(jnp.asarray, qkv), axes=axes, **of_slice)
        return [over_slices(window=window) for window in (None, 7)]

    for before in (0, 330, 599):
        for last, whole_rows in zip(attended(before), expected, strict=True):
            np.testing.assert_allclose(last, whole_rows[:, before:], atol=2e-6)
