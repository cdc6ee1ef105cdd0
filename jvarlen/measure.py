"""Measuring: in go compiled buckets, or a model and some shapes, out come seconds, bytes and cost models of them.

Letters: K buckets.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float64, Int64

from jvarlen.checks import check_at_least_one
from jvarlen.collate import full_batch, packed_batch_spec, token_batch_spec
from jvarlen.compilation_cache import without_compilation_cache
from jvarlen.compile import compile_buckets
from jvarlen.compile_options import CompileOptions
from jvarlen.compiled_buckets import CompiledBuckets
from jvarlen.costs import CostModel, fit_cost_model
from jvarlen.edges import check_edges
from jvarlen.interrupts import raise_if_interrupted
from jvarlen.models import TransformerConfig, init_params, make_loss_fn
from jvarlen.progress import progress_bar
from jvarlen.train import init_train_state, make_train_step

__all__ = ["MeasuredBuckets", "MeasuredCosts", "measure_buckets", "measure_costs"]

_SHARES_OF_BUDGET = (1, 4)  # a full bucket and a quarter of one tell what a step costs whatever it holds


class MeasuredBuckets(NamedTuple):
    """What compiled buckets take, for `fit_cost_model`.

    Attributes:
      shapes: (rows, length) of each.
      seconds: float64[K], of one microbatch.
      num_bytes: int64[K], that one device holds during a step.
      compile_seconds: of lowering and compiling one bucket, the mean of those that no cache held; NaN without such.
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
    """Runs the step of every bucket some times, on a copy of the state and rows without padding.

    Args:
      compiled: what `compile_buckets` gave; its buckets have one length.
      state: the state that it was compiled for; it is left as it is.
      repeats: how often each bucket runs after a first time that does not count; the fastest counts.
      make_batch: makes a batch from the pytree of `jax.ShapeDtypeStruct` of a bucket.
      progress: whether to show a progress bar.

    Returns:
      `MeasuredBuckets`.

    Raises:
      ValueError: buckets of pairs, or repeats below 1.

    Example:
      >>> def count(state, batch):
      ...     return state + batch.num_sequences, {}
      >>> compiled = compile_buckets(count, np.float32(0), [(2, 4), (1, 8)], progress=False)
      >>> measure_buckets(compiled, np.float32(0), progress=False).shapes
      ((2, 4), (1, 8))
    """
    check_at_least_one(repeats=repeats)
    if any(len(bucket.lengths) != 1 for bucket in compiled.specs):
        raise ValueError("buckets of pairs have two lengths, and a cost model knows one")
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
        seconds.append(fastest / compiled.microbatches_per_step)
    rows = {row.bucket: row for row in compiled.ledger}
    cold = [row.lower_s + row.compile_s for row in compiled.ledger if not row.cache_hit]
    return MeasuredBuckets(
        tuple((bucket.rows, bucket.lengths[0]) for bucket in compiled.specs),
        np.array(seconds),
        np.array([rows[bucket].total_bytes for bucket in compiled.specs]),
        float(np.mean(cold)) if cold else math.nan,
        compiled.device,
    )


class MeasuredCosts(NamedTuple):
    """What training steps of a model take.

    Attributes:
      seconds: of one microbatch.
      num_bytes: on one device, during a step.
      compile_seconds: of lowering and compiling one bucket, one after the other and without a cache.
    """

    seconds: CostModel
    num_bytes: CostModel
    compile_seconds: float


def measure_costs(
    model: TransformerConfig,
    *,
    max_tokens: int,
    lengths: Sequence[int],
    microbatches_per_step: int = 1,
    packed: bool = False,
    repeats: int = 3,
    progress: bool = True,
) -> MeasuredCosts:
    """Compiles AdamW steps of the built-in model in some shapes, runs them, and fits cost models.

    Args:
      model: the model.
      max_tokens: tokens of the full buckets; a quarter of that is measured as well.
      lengths: lengths of rows to measure, at least 2, strictly ascending.
      microbatches_per_step: M.
      packed: whether rows hold several samples.
      repeats: runs of each shape; the fastest counts.
      progress: whether to show progress bars.

    Returns:
      `MeasuredCosts`.

    Raises:
      ValueError: lengths that are not as described, or above a quarter of `max_tokens`; other numbers below 1.
    """
    check_at_least_one(max_tokens=max_tokens, microbatches_per_step=microbatches_per_step, repeats=repeats)
    check_edges(lengths)
    if len(lengths) < 2:
        raise ValueError(f"at least 2 lengths are needed to tell what attention costs, not {list(lengths)}")
    too_long = [length for length in lengths if length * max(_SHARES_OF_BUDGET) > max_tokens]
    if too_long:
        raise ValueError(f"a quarter of max_tokens {max_tokens} holds no row of {too_long} tokens")
    optimizer = optax.adamw(1e-3)
    state = init_train_state(init_params(model, seed=0), optimizer)
    shapes: list[tuple[int, int]] = []
    seconds: list[float] = []
    num_bytes: list[int] = []
    compile_seconds = []
    for share in _SHARES_OF_BUDGET:
        with without_compilation_cache():  # what is asked is what compiling takes
            compiled = compile_buckets(
                make_train_step(make_loss_fn(model), optimizer),
                state,
                [(max_tokens // share // length, length) for length in lengths],
                microbatches_per_step=microbatches_per_step,
                batch_spec=packed_batch_spec if packed else token_batch_spec,
                progress=progress,
                options=CompileOptions(cache_dir=None, num_threads=1),
            )
        measured = measure_buckets(compiled, state, repeats=repeats, progress=progress)
        shapes += measured.shapes
        seconds += measured.seconds.tolist()
        num_bytes += measured.num_bytes.tolist()
        compile_seconds.append(measured.compile_seconds)
    name = ", ".join(f"{key} {value}" for key, value in dataclasses.asdict(model).items() if value is not None)
    name += f", {microbatches_per_step} microbatches a step{', packed' if packed else ''}"
    return MeasuredCosts(
        fit_cost_model(shapes, seconds, device=measured.device, model=name),
        fit_cost_model(shapes, num_bytes, unit="bytes", device=measured.device, model=name),
        sum(compile_seconds) / len(compile_seconds),
    )
