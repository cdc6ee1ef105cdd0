"""Checks that padding rows leave loss and gradient finite. Letters: M microbatches, B rows of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import optax

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen.batches.batches import arrays_by_name, mark_padding_rows
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import replicate
from jvarlen.training.losses import LossFn
from jvarlen.training.reduction import sum_over_shards
from jvarlen.training.train_state import new_state

__all__ = ["assert_finite_on_padding_rows"]


def assert_finite_on_padding_rows(
    loss_fn: LossFn, params: Any, batches: Iterable[Any], *, extra: Any = None, seed: int = 0
) -> None:
    """Asserts that loss and gradient stay finite if a microbatch has padding rows, or nothing but padding rows.

    Of the first batch of each bucket, the first row is computed repeated, then with a padding row at the end, and then
    padding rows alone, as they come at the end of a bucket's samples. A model can break on a row without tokens: a
    softmax over nothing, or a mean over no positions, gives NaN, which a weight of 0 takes out of the loss, but not out
    of the gradient.

    Everything is computed in the dtypes given, as in training. That padding rows also add nothing is checked by
    `assert_partition_invariant`.

    Args:
      loss_fn: as for `make_train_step`.
      params: pytree of arrays.
      batches: batches of all buckets, such as a loader: pytrees of arrays that begin with axes M and B, or are scalars.
        A row of zeros is a padding row.
      extra: for a loss that takes it.
      seed: for a loss that takes `key`.

    Raises:
      AssertionError: something is not finite; the message names the buckets, rows and leaves.
      ValueError: there are no batches, or a loss that `make_train_step` rejects.

    Example:
      >>> import jax.numpy as jnp
      >>> from jvarlen.batches import Batch
      >>> tokens, lengths, ids = np.ones((1, 2, 3), int), np.array([[3, 0]]), np.array([[0, -1]])
      >>> batch = Batch(tokens, lengths, np.ones((1, 2, 3)), np.float32(1), ids, ids >= 0)
      >>> def loss_fn(scale, microbatch):
      ...     mean_B = (scale * microbatch.tokens).sum(axis=1) / microbatch.lengths
      ...     return jnp.where(microbatch.lengths > 0, mean_B, 0).sum(), (microbatch.lengths > 0).sum()
      >>> assert_finite_on_padding_rows(loss_fn, 0.5, [batch])
      Traceback (most recent call last):
      AssertionError: padding rows make values that are not finite, in 1 of 1 buckets
        2×3: with a padding row: gradient; with padding rows alone: gradient
      likely: ...
    """
    placement = Layout(data=1).on()
    state = replicate(new_state(params, optax.identity(), extra=extra, seed=seed), placement.mesh)
    sums_of = jax.jit(sum_over_shards(loss_fn, mesh=placement.mesh))

    def not_finite(rows: Any) -> list[str]:
        sums = sums_of(state, jax.device_put(rows, placement.batch_shardings(rows)))
        values = {"loss_sum": sums.loss_sum, "weight_sum": sums.weight_sum, "sums": sums.sums}
        values |= {"gradient": sums.grads, "change of extra": list(sums.extra)}
        return [name for key, tree in values.items() for name in _not_finite(key, tree)]

    first_rows = {}
    for batch in batches:
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        if shapes not in first_rows:
            first_rows[shapes] = (_bucket_of(batch), jax.tree.map(_first_row_repeated, batch))
    if not first_rows:
        raise UserError("batches are empty: at least one is needed, of each bucket that is to be checked")
    lines = []
    for bucket, rows in first_rows.values():
        if alone := not_finite(rows):
            raise AssertionError(f"{bucket}: without any padding row, these are not finite: {list_first(alone)}")
        found = {
            "with a padding row": not_finite(mark_padding_rows(jax.tree.map(_with_padding_row, rows))),
            "with padding rows alone": not_finite(mark_padding_rows(jax.tree.map(np.zeros_like, rows))),
        }
        if said := [f"{how}: {list_first(names)}" for how, names in found.items() if names]:
            lines.append(f"  {bucket}: {'; '.join(said)}")
    if lines:
        raise AssertionError(
            f"padding rows make values that are not finite, in {len(lines)} of {len(first_rows)} buckets\n"
            + list_first(lines, "\n")
            + "\nlikely: a softmax over no keys, a division by a length of 0, or a root or logarithm of 0. A weight of "
            "0 or jnp.where around the result does not keep NaN out of the gradient: change what goes in, as by "
            "jnp.maximum(lengths, 1), or let positions without a token attend to themselves"
        )


def _not_finite(key: str, tree: Any) -> list[str]:
    return [f"{key}{name}" for name, leaf in leaves_by_name(tree).items() if not np.isfinite(np.asarray(leaf)).all()]


def _bucket_of(batch: Any) -> str:
    """The bucket as text; of a batch of another type, what its leaves are."""
    if (arrays := arrays_by_name(batch)) is None:
        return list_first(f"{name} {describe(leaf)}" for name, leaf in leaves_by_name(batch).items())
    _, num_rows, length = arrays["weights"].shape
    if "source_tokens" in arrays:
        return f"{num_rows}×{(arrays['source_tokens'].shape[2], length)}"
    return f"{num_rows}×{length}"


def _first_row_repeated(leaf: Any) -> Any:
    """One microbatch of B times the first row, which is of a sample."""
    array = np.asarray(leaf)
    return np.broadcast_to(array[:1, :1], (1, *array.shape[1:])) if array.ndim else array


def _with_padding_row(leaf: Any) -> Any:
    """The last row as zeros."""
    if not leaf.ndim:
        return leaf
    array = leaf.copy()
    array[:, -1] = 0
    return array
