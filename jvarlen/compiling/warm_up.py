"""What would else be compiled or tuned in the first steps: the first runs, and a loop's arithmetic on metrics."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

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
            batch = jax.tree.map(zeros_of, recipe.spec(bucket))
            executable = programs.executables.get(bucket)
            state, _ = jax.block_until_ready(programs.run(executable, bucket, state, batch))


def prepare_arithmetic(recipe: Recipe, programs: Programs, state: Any) -> None:
    """Compiles the arithmetic that loops do on metrics, such as sums, so that a guard allows it.

    Args:
      recipe: what the programs were made by.
      programs: on a mesh at least one is compiled, which tells how metrics are spread.
      state: decides whether the arrays are committed to their devices, as the results of a step will be.
    """
    mesh = recipe.mesh
    is_committed = mesh is not None or any(getattr(leaf, "committed", False) for leaf in jax.tree.leaves(state))
    infos = jax.tree.leaves(programs.metrics)
    shardings: list[jax.sharding.Sharding] = [SingleDeviceSharding(recipe.device)] * len(infos)
    if mesh is not None:
        of_outputs = programs.executables.any_live().output_shardings
        shardings = jax.tree.leaves(of_outputs if programs.keeps_state else of_outputs[1])
    for info, sharding in zip(infos, shardings, strict=True):
        is_summed = info.shape == () or (sharding.is_fully_replicated and info.size <= _MAX_SIZE_OF_METRICS)
        if is_summed and jnp.issubdtype(info.dtype, jnp.floating):
            _prepare(info.shape, info.dtype, sharding if is_committed else None)


def _prepare(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding | None) -> None:
    """Sums of arrays; of scalars differences, products and quotients as well.

    JAX keeps the last few thousand programs of a process: those of an earlier call may be gone.
    """
    array = jax.device_put(np.ones(shape, dtype), sharding)
    operations = [operator.add] if shape else [operator.add, operator.sub, operator.mul, operator.truediv]
    with uncounted_in_thread():
        for calculate in operations:
            for pair in ((array, array), (array, 1.0), (1.0, array), (array, 1), (1, array)):
                calculate(*pair)
