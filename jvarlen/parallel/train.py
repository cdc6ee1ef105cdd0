"""The train step.

A step is three functions: accumulate, reduce, update. On one device, and where a layout spreads microbatches alone,
they are those of `training`; `sharded_step` replaces what other layouts must.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jvarlen._common.checks import UserError
from jvarlen._common.keywords import check_keywords
from jvarlen._common.pytree import check_arrays, with_sharding
from jvarlen._common.types import Batch, Extra, Params, PyTree
from jvarlen.distributed.placement import LayoutLike, Placement, placement_of
from jvarlen.parallel.layers import (
    LayeredModel,
    Model,
    StepLoss,
    model_of,
    needs_key,
    num_layers_of,
    trainable_of,
    trained_in,
    unstack_own,
)
from jvarlen.parallel.step_program import StepProgram, sharding_on, whole_on
from jvarlen.training.averages import EvalParams, average_in_types, keeps_average, without_average
from jvarlen.training.groups import check_sums, groups_of, step_over_groups, sum_groups
from jvarlen.training.step import StepFn, StepHalves
from jvarlen.training.train_state import Metrics, Optimizer, TrainState, check_state, has_keys
from jvarlen.training.trainable import (
    Trainable,
    merge_trained,
    refuse_adapters,
    refuse_float16,
    select_trained,
    where_trained,
)

if TYPE_CHECKING:
    from jvarlen.parallel.portable import PortableForm

__all__ = ["TrainStep", "make_train_step", "program_of"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainStep:
    """A train step, a plain function `step(state, batch) -> (state, Metrics)`, and the states that it takes.

    `make_train_step` makes it, and `compile_buckets` compiles it.
    """

    __name__ = "train_step"

    function: StepFn
    """What a call does with a step of one group."""
    halves: StepHalves
    """What a call does with a step of several groups."""
    model: Model | StepLoss
    """A loss function, or a model by layers, or a loss of the whole step."""
    optimizer: Optimizer
    """Any Optax optimizer."""
    placement: Placement | None
    """Where a step runs; None means one device."""
    trainable: Trainable = None
    """Names of the trained parameters, as patterns; None means all floats."""
    eval_params: EvalParams | None = None
    """A function to the parameters to evaluate; None means the trained ones, or their average if one is kept."""

    def __call__(self, state: Any, batch: Batch) -> tuple[Any, Metrics]:
        """The state after a step, and its metrics."""
        check_state(state)
        return step_over_groups(self.function, self.halves, state, batch)

    def accumulate(self, state: TrainState, batch: Batch, sums: PyTree = None) -> PyTree:
        """Adds the sums of a group of microbatches to those of the groups before, without an update.

        A step of several groups is one call for each, and `update`. The groups may have different shapes. They are
        numbered in the order of the calls, and with them the keys of their microbatches. To be compiled, with
        `donate_argnums=2`: sums then stand once in the memory of a device. `jax.jit` compiles a program for each shape
        of a group, and a further one for each that comes first in a step, unless its sums begin as the zeros of
        `jax.tree.map(jnp.zeros_like, sums)`.

        Args:
          state: before the step; it stays as it is.
          batch: as for a step. A scalar field `num_sequences` or `num_tokens` counts its own; the step gets the totals.
          sums: of the groups before; None for the first group.

        Returns:
          The sums, a pytree whose arrays have the same shapes and shardings for all groups.

        Raises:
          ValueError: a loss of the whole step (`StepLoss`), which takes the groups twice: call the step with a
            `StepBatch`; a group that adds other arrays than those before; and as a step.

        Example:
          >>> step = make_train_step(lambda params, x: (jnp.sum(params * x), jnp.float32(x.size)), optax.sgd(0.1))
          >>> state = step.init(jnp.float32(1))
          >>> sums = step.accumulate(state, jnp.ones((2, 3)))
          >>> state, metrics = step.update(state, step.accumulate(state, jnp.ones((1, 2)), sums))
          >>> float(metrics.weight_sum)
          8.0
        """
        check_state(state)
        if isinstance(self.model, StepLoss):
            raise UserError(
                "a StepLoss is of all groups of a step, which it takes twice: call step(state, StepBatch(groups, …)) "
                "in place of accumulate and update"
            )
        if sums is not None:
            check_sums(sums)
        for group in groups_of(batch):
            sums = self.halves.accumulate(state, group, self.halves.zeros(state, group, 0) if sums is None else sums)
        return sums

    def update(self, state: TrainState, sums: PyTree) -> tuple[TrainState, Metrics]:
        """The state after a step, and its metrics, from the sums of all its groups.

        Args:
          state: before the step, as `accumulate` got it.
          sums: of `accumulate` for the last group.

        Returns:
          As a step: what all microbatches in one group would give.

        Raises:
          ValueError: sums that are not those of `accumulate`; and as a step.
        """
        check_state(state)
        check_sums(sums)
        return self.halves.update(state, sums)

    def init(self, params: Params, *, extra: Extra = None, seed: int | None = None) -> TrainState:
        """The state before the first step, where the step takes it.

        Args:
          params: pytree of arrays, or of `jax.ShapeDtypeStruct`; what a model by layers or its `stack` takes. They are
            copied, so that steps that donate their state leave them alone. Each of several processes passes the same
            whole arrays. From NumPy arrays, such as those of `from_hugging_face`, it reads only the slices that are on
            the devices of this process. Where the layout spreads microbatches alone, arrays on its devices keep their
            shardings.
          extra: pytree of arrays that are not parameters, for a loss that takes `extra`.
          seed: for a loss that takes `key`; it determines all keys.

        Returns:
          `TrainState`; of shapes with their shardings, if the parameters are shapes. ZeRO shards an array along its
          first dimension that N, the number of data shards, divides. Where N divides none, parameters are whole, and
          arrays of the optimizer are padded with zeros, which it never sees. Arrays with fewer than 1,024 elements are
          whole. The parameters of a model by layers are `LayeredParams` on all layouts but `dataN` alone; with
          `tensorN` zeros extend vocabularies, and with `stageN` each stage has consecutive layers.

        Raises:
          ValueError: parameters that are not arrays, or not those of the model, or not by layers with stages; layers
            that do not divide into stages; trained parameters in float16; adapters beside other parameters, where
            neither the model nor `trainable` says which of them are trained.

        Example:
          >>> step = make_train_step(lambda params, x: (jnp.sum(params * x), jnp.float32(x.size)), optax.sgd(0.1))
          >>> state = step.init(jnp.ones(2), seed=0)
          >>> state.params.tolist(), int(state.step)
          ([1.0, 1.0], 0)
        """
        check_arrays(params)
        check_arrays(extra, "extra")
        if self.trainable is None:
            refuse_adapters(params)
        refuse_float16(self._trained_of(params))
        model = model_of(self.model)
        if seed is None and needs_key(self.model):
            raise UserError("this model has dropout, which needs random keys: give init a seed, init(params, seed=0)")
        if isinstance(model, LayeredModel):
            num_layers_of(params if model.stack is None else jax.eval_shape(model.stack, params))
            if extra is not None and not isinstance(self.model, StepLoss):
                raise UserError(
                    "a model by layers takes no extra: its functions have no place for it, and return no next value"
                )
            if has_keys(extra):
                raise UserError(
                    "a model by layers takes no random keys in extra, which its layers would share: init(…, seed=0) "
                    "gives each call axes.key"
                )
        return self._program.init(params, extra, seed)

    def for_evaluation(self, state: TrainState) -> TrainState:
        """The state with the parameters to evaluate in place of the trained ones, sharded as these are.

        Every evaluation takes its result. It is the same state where the optimizer keeps no average. The averages of
        `ema_of_params` and schedule-free are left out of the result, and evaluation steps refuse states with one.

        Args:
          state: of `init` or of a step. It stays as it is: a device holds the trained parameters twice.

        Returns:
          A state for evaluation steps and for `gather_params`; training goes on with the other one.

        Raises:
          ValueError: `eval_params` returns other arrays than the trained parameters; they are listed.
        """
        if self.eval_params is None and not keeps_average(state.opt_state):
            return state
        trained = trained_in(state.opt_state, self._trained_of)(state.params)
        lie = jax.tree.map(lambda leaf: leaf.sharding, state)
        average = jax.jit(self._average, in_shardings=(lie,), out_shardings=where_trained(trained, lie.params))
        params = merge_trained(average(state), state.params)
        return state._replace(params=params, opt_state=without_average(state.opt_state))

    def portable_form(self, state: TrainState, params: Params) -> PortableForm | None:
        """How states become those of one device, for `open_checkpoints(form=)`, so that any other layout restores them.

        Args:
          state: of `init` or of a step.
          params: pytree of arrays or shapes, the parameters on one device: what `model.stack` takes, or else what
            `init` got.

        Returns:
          What `open_checkpoints` takes. Its `shapes`, a `TrainState`, are those of one device, without padding. None
          where the state has that form already, on one device and on `dataN` alone.

        Raises:
          ValueError: the state is not of these parameters and this step; or `stack` does more than stack arrays. Arrays
            are listed.

        Example:
          >>> step = make_train_step(lambda params, x: (jnp.sum(params * x), jnp.float32(x.size)), optax.sgd(0.1))
          >>> params = jnp.ones(3)
          >>> step.portable_form(step.init(params), params) is None
          True
        """
        if self.placement is None or self.placement.layout.is_data_parallel:
            return None
        from jvarlen.parallel.portable import portable_form

        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)), params)
        return portable_form(
            state,
            model_of(self.model),
            self.optimizer,
            placement=self.placement,
            params=params,
            made=self._program.init(params, None, None),
            trainable=self.trainable,
        )

    def reduce_error(self, state: TrainState, batch: Batch) -> float:
        """How far the gradients of a step are from those of the layout with `reduce_dtype="float32"`.

        It is the norm of the difference, divided by that of the gradients sent in float32. The state stays as it is.
        """
        if self.placement is None:
            return 0.0
        layout = dataclasses.replace(self.placement.layout, reduce_dtype="float32")
        wide = dataclasses.replace(self, placement=dataclasses.replace(self.placement, layout=layout))

        def error(state: TrainState, batch: Batch) -> jax.Array:
            programs = (step._program.sums_of(self._trained_of) for step in (self, wide))
            found, expected = (sum_groups(sums_of, state, batch)[0].grads for sums_of in programs)
            return optax.tree.norm(jax.tree.map(jnp.subtract, found, expected)) / optax.tree.norm(expected)

        return float(jax.jit(error)(state, batch))

    def gather_params(self, state: TrainState) -> PyTree:
        """The whole parameters of a state, as `init` got them, on any layout.

        All processes must call it; each gets all. A device holds one whole array at a time.

        Args:
          state: of `init` or of a step; `for_evaluation(state)` for the average that an optimizer keeps.

        Returns:
          A pytree of NumPy arrays, which later steps do not change.
        """

        def gather(leaf: jax.Array) -> np.ndarray:
            if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
                leaf = jax.jit(lambda leaf: leaf, out_shardings=whole_on(self.placement))(leaf)
            return np.array(leaf)

        params = self._program.crop(jax.tree.map(gather, state.params))
        return unstack_own(params, state.opt_state)

    def state_shardings(self, params: Params) -> TrainState:
        """The shardings of the state of some parameters: a `TrainState`.

        Args:
          params: as for `init`.

        Returns:
          `TrainState` of `jax.sharding.Sharding`; `extra`, `key` and `step` are whole everywhere.
        """
        check_arrays(params)
        shapes = jax.tree.map(lambda leaf: with_sharding(sharding_on(leaf), leaf), params)
        return jax.tree.map(lambda leaf: leaf.sharding or whole_on(self.placement), self.init(shapes))

    @functools.cached_property
    def _program(self) -> StepProgram:
        return program_of(self.model, self.optimizer, self.placement, self.trainable)

    @functools.cached_property
    def _average(self) -> Callable[[TrainState], Params]:
        return self._program.average(average_in_types(self.eval_params))

    def _trained_of(self, params: Params) -> Params:
        return select_trained(params, self.trainable)


def program_of(
    model: Model | StepLoss, optimizer: Optimizer, placement: Placement | None, trainable: Trainable = None
) -> StepProgram:
    """The parts of a step on a placement; None means one device."""
    if placement is None or placement.layout.is_data_parallel:
        return StepProgram(model=model, optimizer=optimizer, placement=placement, trainable=trainable)
    from jvarlen.parallel.sharded_step import ShardedProgram

    return ShardedProgram(model=model, optimizer=optimizer, placement=placement, trainable=trainable)


@check_keywords
def make_train_step(
    model: Model | StepLoss,
    optimizer: Optimizer,
    *,
    layout: LayoutLike = None,
    trainable: Trainable = None,
    eval_params: EvalParams | None = None,
    norms: bool = False,
) -> TrainStep:
    """A train step with exact normalisation and accumulation over microbatches, with the same result on any layout.

    The simplest loss is `loss_fn(params, microbatch) -> (loss_sum, weight_sum)`. It may have further parameters, by
    these names, and return more:

    - `key`: a typed key, another one for every microbatch, the same on any number of devices:
      `fold_in(fold_in(state.key, state.step), i)` for microbatch i of the step. `init(…, seed=)` sets it.
    - `extra`: `state.extra`, arrays that are not parameters, with their values before the step. The loss returns the
      next values last. Floats and complex numbers change by the mean of the microbatches' changes, weighted by their
      `weight_sum`. Integers change by the sum of the changes, and a bool changes if any microbatch changes it;
      microbatches without weight do not count. A typed key in `extra`, such as that of `nnx.Rngs`, stays as it is, and
      microbatch i gets `fold_in(fold_in(it, state.step), i)` in its place. Old-style keys, arrays of uint32, are
      refused.
    - It may return `(loss_sum, weight_sum, sums)` with a dict of real arrays, summed over the step into `Metrics.sums`.

    The gradient is that of Σ loss alone, divided by Σ weight; weights are never differentiated. Without any weight it
    is 0, and the optimizer takes its step all the same: AdamW decays the parameters, momentum moves them on.

    Args:
      model: a function of the parameters and a microbatch, the batch without its leading axis. Its two sums are scalars
        over the rows that it gets; the step adds those of other shards. Or a `LayeredModel`, which layouts with
        `stageN`, `tensorN` or `contextN` take, and of which `zero3` gathers one layer at a time: of a function all
        parameters. Or a `StepLoss` of either, for a loss that is not a sum over microbatches.
      optimizer: any Optax optimizer, such as `with_float32_master` for parameters in bfloat16. It gets whole arrays,
        which the compiler splits: global norms are those of the whole model. Its update gets the extra arguments that
        it names, or all if it accepts any: `batch_size=batch.num_sequences` and `num_tokens`, both of the whole step;
        `value`, the loss of the step.
      layout: where a step runs: a `Layout`, its text, a `Placement` or a mesh (data parallelism); None is one device.
        Axes of a mesh that the layout does not name are left to the compiler: parameters may be sharded over them.
      trainable: the names of the parameters that are trained, or patterns of them as for `fnmatch`, such as
        `"layers.*.attention.*"`; one that matches is enough. A name is the path in the tree that `init` takes, joined
        by dots: `layers.0.mlp.up.kernel`. Others stay the same bit for bit, without gradient, optimizer state or part
        in norms. Optimizers see the tree with None in their place. None means what the model says, in its field
        `trainable` or in an attribute of that name of the function, as models with adapters do, or else all floats;
        `"*"` means all floats in any case.
      eval_params: `eval_params(opt_state, params) -> params`, the parameters to evaluate, such as an average that the
        optimizer keeps; of the whole optimizer's state and of trained parameters, on any layout as on one device.
        `TrainStep.for_evaluation` calls it. None means the trained ones, or the average of
        `jvarlen.training.ema_of_params` or of `optax.contrib.schedule_free`, where one is a part of the optimizer.
      norms: whether the metrics include the global norms of gradient and updates.

    Returns:
      `TrainStep`, whose `init` makes the first state. The batch is any pytree whose leaves, except scalars, have
      leading axis M. A scalar field `num_sequences` (attribute or key of a dict) counts the step's real samples. A
      field `num_tokens`, a scalar or a count for each microbatch, counts its tokens; batches of `jvarlen` need none.
      Or a `StepBatch` of several such batches, the groups of the step, which may have different shapes: the result is
      that of all their microbatches in their order, with one reduction and one update.

    Raises:
      ValueError: a layout that the devices do not make, or that is not for such a model. When it is traced: shards that
        do not divide M; microbatches or layers that a schedule cannot take; a loss that takes a key or `extra` that the
        state does not hold, returns another form, or reduces its sums over the mesh itself.

    References:
      Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models". Xu et al. 2020,
      "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training".
    """
    placement = placement_of(layout)
    if placement is not None:
        from jvarlen.parallel.layout_checks import check_model

        check_model(model_of(model), placement.layout)
    trainable = trainable_of(model, trainable)
    program = program_of(model, optimizer, placement, trainable)
    function, halves = program.step(norms=norms)
    return TrainStep(
        function=function,
        halves=halves,
        model=model,
        optimizer=optimizer,
        placement=placement,
        trainable=trainable,
        eval_params=eval_params,
    )
