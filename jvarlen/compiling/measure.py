"""Measures the seconds and bytes of compiled buckets. Letters: K buckets."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, check_at_least_one
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.terminal import progress_bar
from jvarlen._common.types import Batch, PyTree, Shapes
from jvarlen.batches.batches import full_batch
from jvarlen.compiling.compiled_buckets import CompiledBuckets

__all__ = ["MeasuredBuckets", "measure_buckets"]


class MeasuredBuckets(NamedTuple):
    """Measured time and memory of compiled buckets, for `fit_cost_model`.

    Attributes:
      shapes: (rows, length) of each.
      seconds: float64[K], of one microbatch.
      num_bytes: int64[K], bytes that one device holds during a step.
      compile_seconds: of lowering and compiling one bucket, the mean over buckets in no cache; NaN without any.
      device: number and kind of the devices.
    """

    shapes: tuple[tuple[int, int], ...]
    seconds: Float64[np.ndarray, " K"]
    num_bytes: Int64[np.ndarray, " K"]
    compile_seconds: float
    device: str


def measure_buckets(
    compiled: CompiledBuckets,
    state: PyTree,
    *,
    repeats: int = 3,
    make_batch: Callable[[Shapes], Batch] = full_batch,
    progress: bool = True,
) -> MeasuredBuckets:
    """Measures the step of every bucket, on a copy of the state and rows without padding; of halves, those of groups.

    Args:
      compiled: the result of `compile_buckets`; its buckets have one length.
      state: the state that it was compiled for; it is not changed.
      repeats: timed runs of each bucket after one untimed run; the fastest counts.
      make_batch: makes a batch from the pytree of `jax.ShapeDtypeStruct` of a bucket.
      progress: whether to show a progress bar.

    Returns:
      `MeasuredBuckets`.

    Raises:
      ValueError: buckets of pairs, or repeats below 1.

    Example:
      >>> from jvarlen.batches import BatchShapes
      >>> from jvarlen.compiling.compile import compile_buckets
      >>> def count(state, batch):
      ...     return state + batch.num_sequences, {}
      >>> compiled = compile_buckets(count, np.float32(0), BatchShapes([(2, 4), (1, 8)]), progress=False)
      >>> measure_buckets(compiled, np.float32(0), progress=False).shapes
      ((2, 4), (1, 8))
    """
    check_at_least_one(repeats=repeats)
    if any(len(bucket.lengths) != 1 for bucket in compiled.specs):
        raise UserError("buckets of pairs have two lengths, but a cost model takes one")
    seconds = []
    for spec in progress_bar(compiled.specs.values(), desc="measure", unit="bucket", progress=progress):
        raise_if_interrupted()
        batch = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), make_batch(spec), spec)
        own_state = jax.tree.map(jnp.array, state)
        times = [_fastest(run, repeats) for run in compiled.passes_over(own_state, batch)]
        seconds.append(sum(times) / compiled.shapes.num_microbatches)
    num_bytes = {
        bucket: max(row.total_bytes for row in compiled.report if row.bucket == bucket) for bucket in compiled.specs
    }
    cold = [row.lower_s + row.compile_s for row in compiled.report if not row.cache_hit]
    return MeasuredBuckets(
        tuple((bucket.rows, bucket.lengths[0]) for bucket in compiled.specs),
        np.array(seconds),
        np.array([*num_bytes.values()]),
        float(np.mean(cold)) if cold else math.nan,
        compiled.device,
    )


def _fastest(run: Callable[[PyTree], PyTree], repeats: int) -> float:
    """The fewest seconds of a function of what it returned before, after one call that does not count."""
    before, fastest = jax.block_until_ready(run(None)), math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        before = jax.block_until_ready(run(before))
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
