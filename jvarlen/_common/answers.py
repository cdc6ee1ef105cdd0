"""Answers that lie behind the prompt they share: their segments, and how far from it they lie. T positions of a row."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jvarlen._common.types import Array

__all__ = ["Answers", "find_answers"]


class Answers(NamedTuple):
    """What follows from the ids of samples and of their answers, for every position.

    Attributes:
      segment_ids: int32[..., T], ascending: each prompt and each answer has its own; 0 where there is no token.
      shifts: int32[..., T], the tokens of other answers between an answer and its prompt.
    """

    segment_ids: Array
    shifts: Array


def find_answers(segment_ids: Array, answer_ids: Array) -> Answers:
    """The answers of rows, from int[..., T]; samples without answers are prompts."""
    is_traced = isinstance(segment_ids, jax.Array) or isinstance(answer_ids, jax.Array)
    np_: Any = jnp if is_traced else np
    places = np_.broadcast_to(np_.arange(segment_ids.shape[-1], dtype=np.int32), segment_ids.shape)

    def latest(is_start: Array) -> Array:
        starts = np_.where(is_start, places, 0)
        return lax.cummax(starts, axis=starts.ndim - 1) if is_traced else np.maximum.accumulate(starts, axis=-1)

    begins_sample = (places == 0) | (segment_ids != np_.roll(segment_ids, 1, axis=-1))
    before = np_.where(begins_sample, 0, np_.roll(answer_ids, 1, axis=-1))
    begins = begins_sample | (answer_ids != before)
    own_ids = np_.cumsum(begins, axis=-1, dtype=np.int32) * (segment_ids != 0)
    return Answers(own_ids, latest(begins) - latest(begins & (before == 0)))
