"""Samples of two texts, as rows of one text each.

Letters: B rows of samples, S and U positions of source and target, T the larger of both.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jvarlen._common.types import Array, Microbatch, PyTree
from jvarlen.batches.batches import arrays_by_name

__all__ = ["by_text", "has_two_texts", "texts_of"]

_SIDES = ("source", "target")


def has_two_texts(microbatch: Microbatch) -> bool:
    """Whether its samples are two texts of tokens."""
    return {f"{side}_tokens" for side in _SIDES} <= (arrays_by_name(microbatch) or {}).keys()


def texts_of(microbatch: Microbatch) -> Microbatch:
    """A microbatch of texts: of two texts a sample, named fields of 2B rows, those of sources before those of targets.

    Rows have T positions, and weights are 1 everywhere. A microbatch of one text a sample stays as it is.
    """
    if not has_two_texts(microbatch):
        return microbatch
    arrays = arrays_by_name(microbatch) or {}
    longest = max(arrays[f"{side}_tokens"].shape[1] for side in _SIDES)

    def stack(name: str) -> jax.Array:
        sides = [jnp.asarray(arrays[f"{side}_{name}"]) for side in _SIDES]
        room = [((0, 0), (0, longest - each.shape[1])) if each.ndim > 1 else ((0, 0),) for each in sides]
        return jnp.concatenate([jnp.pad(each, width) for each, width in zip(sides, room, strict=True)])

    names = ("tokens", "lengths") if "source_lengths" in arrays else ("tokens", "segment_ids", "positions")
    rows = {name: stack(name) for name in names}
    twice = {name: jnp.concatenate([arrays[name]] * 2) for name in ("ids", "is_real")}
    weights = jnp.ones(rows["tokens"].shape, jnp.float32)
    return {**rows, **twice, "weights": weights, "num_sequences": arrays["num_sequences"]}


def by_text(of_rows: Array, microbatch: Microbatch) -> PyTree:
    """What was made of the rows of `texts_of`, [2B, T, …]: a pair of those of both texts, where a sample has two."""
    if not has_two_texts(microbatch):
        return of_rows
    arrays = arrays_by_name(microbatch) or {}
    halves = jnp.split(of_rows, 2)
    return tuple(half[:, : arrays[f"{side}_tokens"].shape[1]] for half, side in zip(halves, _SIDES, strict=True))
