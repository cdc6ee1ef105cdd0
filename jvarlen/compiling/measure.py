"""Seconds and bytes of steps: a clock for those of a loop, and timings of buckets.

Letters: K buckets.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, check_at_least_one
from jvarlen._common.interrupts import raise_if_interrupted, without_interrupts
from jvarlen._common.progress import progress_bar
from jvarlen.batches.batches import full_batch

if TYPE_CHECKING:
    from jvarlen.compiling.compiled_buckets import CompiledBuckets

__all__ = ["MeasuredBuckets", "StepClock", "measure_buckets"]

_NUM_KEPT = 1001  # seconds of a key that the median is over: odd, so that it is one of them


class StepClock:
    """Times steps from their dispatch, or from the end of the step before if that is later; the caller never waits."""

    def __init__(self) -> None:
        self._seconds: dict[Hashable, deque[float]] = {}
        self._ready = 0.0  # when the step before was
        # Its thread ends once nothing refers to it. At exit Python waits for the thread: ending it while it waits for a
        # device would take the process down.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="step clock")
        with without_interrupts():  # Ctrl-C is for the main thread to handle
            self._thread.submit(int)

    def step(self, key: Hashable, started: float, outputs: Any) -> None:
        """Takes note of a step that has just been dispatched, and of outputs that the next step does not overwrite."""
        arrays = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
        if arrays:
            self._thread.submit(self._wait, key, started, arrays[0])

    def _wait(self, key: Hashable, started: float, array: jax.Array) -> None:
        before = self._ready
        try:
            jax.block_until_ready(array)
        finally:
            self._ready = time.perf_counter()
        self._seconds.setdefault(key, deque(maxlen=_NUM_KEPT)).append(self._ready - max(started, before))

    def median_seconds(self) -> dict[Hashable, float]:
        """The median seconds of the last steps of each key, without failed ones, once all steps so far have ended."""
        self._thread.submit(int).result()
        return {key: statistics.median(seconds) for key, seconds in self._seconds.items()}


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
    state: Any,
    *,
    repeats: int = 3,
    make_batch: Callable[[Any], Any] = full_batch,
    progress: bool = True,
) -> MeasuredBuckets:
    """Measures the step of every bucket, on a copy of the state and rows without padding.

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
    state = jax.tree.map(jnp.array, state)
    seconds = []
    for spec in progress_bar(compiled.specs.values(), desc="measure", unit="bucket", progress=progress):
        raise_if_interrupted()
        batch = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), make_batch(spec), spec)
        state, _ = jax.block_until_ready(compiled(state, batch))
        fastest = math.inf
        for _ in range(repeats):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(compiled(state, batch))
            fastest = min(fastest, time.perf_counter() - start)
        seconds.append(fastest / compiled.shapes.num_microbatches)
    rows = {row.bucket: row for row in compiled.report}
    cold = [row.lower_s + row.compile_s for row in compiled.report if not row.cache_hit]
    return MeasuredBuckets(
        tuple((bucket.rows, bucket.lengths[0]) for bucket in compiled.specs),
        np.array(seconds),
        np.array([rows[bucket].total_bytes for bucket in compiled.specs]),
        float(np.mean(cold)) if cold else math.nan,
        compiled.device,
    )
