"""What would else be compiled or tuned in the first steps: the first runs, and a loop's arithmetic on metrics."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.progress import progress_bar
from jvarlen._common.pytree import zeros_of
from jvarlen.compiling.lowering import Recipe
from jvarlen.compiling.pending import Programs
from jvarlen.compiling.recompiles import uncounted_in_thread
from jvarlen.planning.buckets import AnyBucket

__all__ = ["prepare_arithmetic", "warm_up"]

_MAX_SIZE_OF_METRICS = 2**16  # numbers; what is larger is no metric that a loop adds up
_OPERATIONS = (operator.add, operator.sub, operator.mul, operator.truediv)
_RUNS_TO_RECORD = 3  # of an executable on a GPU: to tune, to record its launches, and to replay them


def warm_up(
    recipe: Recipe, programs: Programs, buckets: Sequence[AnyBucket], state: Any, *, progress: bool = True
) -> None:
    """Runs the executables on batches of zeros and a copy of the state: once, on GPUs three times.

    Args:
      recipe: what they were made by.
      programs: holds them.
      buckets: whose executables; those that were released are left out.
      state: a pytree of arrays; it is not changed.
      progress: whether to show a progress bar.

    Raises:
      ValueError: a state of `jax.ShapeDtypeStruct`.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        raise UserError("warming up runs the step: it needs a state of arrays, not of shapes")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, recipe.state_spec)
    state = jax.jit(lambda state: jax.tree.map(jnp.copy, state), out_shardings=shardings)(state)
    held = [bucket for bucket in buckets if programs.executables.has(bucket)]
    bar = progress_bar(held, desc=f"warm up {recipe.name}", unit="bucket", progress=progress)
    for bucket in bar:
        raise_if_interrupted()
        bar.set_postfix_str(str(bucket))
        for _ in range(1 if recipe.device.platform == "cpu" else _RUNS_TO_RECORD):
            batch = jax.tree.map(zeros_of, recipe.shapes.spec(bucket))
            executable = programs.executables.get(bucket)
            state, _ = jax.block_until_ready(programs.run(executable, bucket, state, batch))


def prepare_arithmetic(metrics: Any) -> None:
    """Compiles the arithmetic that loops do on metrics, so that a guard allows it.

    Sums of arrays; of scalars differences, products and quotients as well.

    Args:
      metrics: a pytree of arrays that a step returned; they tell shapes, dtypes and shardings.
    """
    with uncounted_in_thread(), jax.transfer_guard("allow"):
        for leaf in jax.tree.leaves(metrics):
            is_summed = not leaf.shape or (leaf.sharding.is_fully_replicated and leaf.size <= _MAX_SIZE_OF_METRICS)
            if not is_summed or not jnp.issubdtype(leaf.dtype, jnp.floating):
                continue
            ones = np.ones(leaf.shape, leaf.dtype)
            array = jax.device_put(ones)
            if leaf.committed:
                array = jax.make_array_from_callback(leaf.shape, leaf.sharding, ones.__getitem__)
            for calculate in [operator.add] if leaf.shape else _OPERATIONS:
                for pair in ((array, array), (array, 1.0), (1.0, array), (array, 1), (1, array)):
                    calculate(*pair)
