"""Masks: what each position may attend to, by lengths and by segments."""

import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen.attention import padding_mask
from jvarlen.attention.masks import resolve_window, segment_mask

LENGTHS = jnp.array([5, 3, 0, 1])
T = 5


@pytest.mark.parametrize("causal", [True, False])
def test_a_position_sees_tokens_only_and_nothing_later_where_causal(causal):
    is_token = np.asarray(padding_mask(LENGTHS, T))
    segments = jnp.asarray(is_token.astype(int))
    mask = np.asarray(segment_mask(segments, segments, causal=causal))
    for row, length in enumerate(LENGTHS.tolist()):
        assert is_token[row].tolist() == [place < length for place in range(T)]
        for query in range(length):
            for key in range(T):
                assert mask[row, query, key] == (key < length and (key <= query or not causal))


def test_a_window_of_numpy_is_a_number_that_programs_know():
    for window, in_force in ((np.int64(3), 3), (np.int32(5), None), (np.int32(0), None)):
        assert resolve_window(window, 5) == in_force
        assert not isinstance(resolve_window(window, 5), np.integer)
