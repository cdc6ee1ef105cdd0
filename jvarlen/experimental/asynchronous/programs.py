"""A training step as three programs: the sums of one microbatch, their sum over microbatches, and the update.

So the gradients of a step can be computed anywhere, and on older parameters. Letters: M microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import serialize_executable

from jvarlen._common.checks import UserError
from jvarlen._common.pytree import is_key
from jvarlen.compiling.program_store import without_compilation_cache
from jvarlen.training.losses import LossFn
from jvarlen.training.step import update_state, with_extra_args
from jvarlen.training.step_sums import LossProgram, StepSums, field_of, microbatches_of, step_key
from jvarlen.training.train_state import Metrics, TrainState

__all__ = [
    "GradientProgram",
    "StepPrograms",
    "Version",
    "host_arrays",
    "host_batches",
    "split_microbatches",
]

Version = list[np.ndarray]  # what a gradient depends on besides its microbatch: parameters, extra and the key


class GradientProgram(NamedTuple):
    """The sums of a microbatch of one shape, as a program from lists of arrays to a list of arrays.

    Attributes:
      number: of the program, from 0, in the order of compilation.
      compiled: takes a version, the step, the place of the microbatch in the step, and the microbatch.
    """

    number: int
    compiled: jax.stages.Compiled

    def serialized(self) -> tuple[bytes, Any, Any]:
        """The program as bytes, with the structures of its arguments and results, for another process.

        Raises:
          ValueError: the backend cannot, or not with this program.
        """
        try:
            return serialize_executable.serialize(self.compiled)
        except Exception as error:  # its type depends on the backend
            raise UserError(
                f"the gradient of this loss cannot be sent to other processes: {error}. A loss that calls Python "
                "functions while it runs, by jax.pure_callback or jax.debug.print, cannot"
            ) from error


class StepPrograms:
    """Compiles and runs the parts of the steps of one run: gradients on the default device, updates where the state is.

    Args:
      loss_fn: as for `make_train_step`.
      optimizer: likewise, without one that evaluates the loss itself, as line searches do.
      state: the first one, after which all have their shapes.
    """

    def __init__(self, loss_fn: LossFn, optimizer: optax.GradientTransformation | optax.MultiSteps, state: TrainState):
        self._loss_fn = loss_fn
        self._like = (state.params, state.extra, state.key)
        self._first_step = 0 if state.step is None else int(state.step)
        self._gradients: dict[Any, GradientProgram] = {}
        self._sums_shapes: Any = None
        extended = with_extra_args(optimizer)
        self._add = jax.jit(lambda sums, others: jax.tree.map(jnp.add, sums, others))
        self._update = jax.jit(lambda *args: update_state(extended, *args))

    def version_of(self, state: TrainState) -> Version:
        """A copy on the host; waits for the state."""
        return host_arrays((state.params, state.extra, state.key))

    def compile(self, state: TrainState, batch: Any) -> None:
        """Compiles what the first steps of a run need: gradients of this batch's shape, and the update."""
        microbatches = split_microbatches(batch)
        self.gradient_of(microbatches[0])
        zeros = [np.zeros(shape.shape, shape.dtype) for shape in jax.tree.leaves(self._sums_shapes)]
        jax.block_until_ready(self.update(state, batch, [zeros] * len(microbatches)))

    def gradient_of(self, microbatch: Any) -> GradientProgram:
        """The program for microbatches of this shape, compiled where it is the first of them."""
        leaves, structure = jax.tree.flatten(microbatch)
        shape = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if shape not in self._gradients:
            self._gradients[shape] = GradientProgram(len(self._gradients), self._compile(structure, leaves))
        return self._gradients[shape]

    def run(self, program: GradientProgram, version: Version, place: tuple[int, int], microbatch: Any) -> Version:
        """The sums of a microbatch, as `arguments` are computed in any process."""
        return [np.asarray(leaf) for leaf in program.compiled(*self.arguments(version, place, microbatch))]

    def arguments(self, version: Version, place: tuple[int, int], microbatch: Any) -> tuple[Any, ...]:
        """What a gradient program takes, on the host; `place` is the step, from 0 in this run, and that in the step."""
        step, i = place
        return version, np.int32(self._first_step + step), np.int32(i), jax.tree.leaves(microbatch)

    def update(
        self, state: TrainState, batch: Any, sums_of_microbatches: Sequence[Version]
    ) -> tuple[TrainState, Metrics]:
        """Adds the sums of a step's microbatches, in their order, and updates the state.

        Args:
          state: before the update.
          batch: of the step, for its counts.
          sums_of_microbatches: M times what a gradient program gave.

        Returns:
          The state and the metrics after the update.
        """
        sums = functools.reduce(self._add, map(self._sums_of, sums_of_microbatches))
        counts = {name: field_of(batch, name) for name in ("num_sequences", "num_tokens")}
        scalars = {name: count for name, count in counts.items() if count is not None and np.ndim(count) == 0}
        return self._update(state, scalars, sums)

    def _compile(self, structure: Any, leaves: list[np.ndarray]) -> jax.stages.Compiled:
        loss = LossProgram(self._loss_fn)

        def gradient(version: Any, step: jax.Array, i: jax.Array, leaves: Any) -> list[jax.Array]:
            params, extra, key = _from_arrays(version, self._like)
            state = TrainState(params, None, extra, key, step)
            folded = step_key(state)
            folded = None if folded is None else jax.random.fold_in(folded, i)
            sums = loss.sum_microbatch(state, jax.tree.unflatten(structure, leaves), folded)
            self._sums_shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), sums)
            return jax.tree.leaves(sums)

        arguments = self.arguments(host_arrays(self._like), (0, 0), leaves)
        with without_compilation_cache():
            return jax.jit(gradient).lower(*arguments).compile()

    def _sums_of(self, leaves: Version) -> StepSums:
        return jax.tree.unflatten(jax.tree.structure(self._sums_shapes), leaves)


def split_microbatches(batch: Any) -> list[Any]:
    """The microbatches of a step on the host; each gets the scalars of the batch."""
    return [
        jax.tree.map(lambda leaf, i=i: np.ascontiguousarray(leaf[i]) if leaf.ndim else leaf, batch)
        for i in range(microbatches_of(batch))
    ]


def host_batches(batches: Iterable[Any], steps: range, num_microbatches: int) -> Iterator[tuple[int, Any]]:
    """The batches of these steps, with their steps, as arrays on the host.

    Raises:
      ValueError: there are fewer, or one has another M.
    """
    read = iter(batches)
    for step in steps:
        try:
            batch = next(read)
        except StopIteration:
            raise UserError(f"the batches end before step {step}, and the plan has {steps.stop} steps") from None
        leaves, structure = jax.tree.flatten(batch)
        batch = jax.tree.unflatten(structure, host_arrays(leaves))
        if microbatches_of(batch) != num_microbatches:
            raise UserError(
                f"the batch of step {step} has {microbatches_of(batch)} microbatches, the plan {num_microbatches}"
            )
        yield step, batch


def host_arrays(tree: Any) -> list[np.ndarray]:
    """The leaves as arrays on the host, in the dtypes that JAX computes them in; typed keys as their data."""
    leaves = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(tree)]
    return [np.asarray(leaf, jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype)) for leaf in jax.device_get(leaves)]


def _from_arrays(leaves: Sequence[Any], like: Any) -> Any:
    """The pytree of `host_arrays`."""
    templates, structure = jax.tree.flatten(like)

    def leaf_of(array: Any, template: Any) -> Any:
        if not is_key(template):
            return array
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(template))

    return jax.tree.unflatten(structure, list(map(leaf_of, leaves, templates)))
