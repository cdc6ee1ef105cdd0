"""The parts of a step, which depend on where it runs: here where every device has the whole state.

What a layout does not name is not imported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jvarlen._common.pytree import copy_arrays, has_host_arrays, has_shapes, with_sharding
from jvarlen._common.types import Array, Extra, Params
from jvarlen.distributed.mesh import devices_of, replicate
from jvarlen.distributed.placement import Placement
from jvarlen.parallel.layers import LayeredModel, Model, StepLoss, model_of
from jvarlen.training.averages import EvalParams
from jvarlen.training.groups import GroupSumsOf, over_groups, step_of_sums
from jvarlen.training.step import StepFn, StepHalves
from jvarlen.training.step_sums import LossProgram, SumsOf
from jvarlen.training.train_state import Optimizer, TrainState, new_state
from jvarlen.training.trainable import Trainable, TrainedOf, select_trained

__all__ = ["StepProgram", "sharding_on", "whole_on"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepProgram:
    """The parts of a step on one device, or on data shards that all hold the whole state."""

    model: Model | StepLoss
    optimizer: Optimizer
    placement: Placement | None
    trainable: Trainable = None

    def init(self, params: Params, extra: Extra, seed: int | None) -> TrainState:
        """The state before the first step, placed; shapes with shardings, if the parameters are shapes."""

        def first(params: Params, extra: Extra) -> TrainState:
            return new_state(params, self.optimizer, extra=extra, seed=seed, trained_of=self._trained_of)

        if has_shapes(params):
            state = jax.eval_shape(first, params, extra)._replace(params=params)
            shardings = jax.tree.map(sharding_on, params)
            if jax.tree.leaves(shardings):
                from jvarlen.parallel.state_layout import place_opt_state

                state = state._replace(opt_state=place_opt_state(state, shardings))
            return jax.tree.map(self._shape_of, state)
        if self.placement is None:
            return first(*jax.tree.map(jnp.array, (params, extra)))
        params, extra = copy_arrays((params, extra))
        if has_host_arrays(params):  # placed leaf by leaf, before the optimizer makes whole trees of them
            params = jax.tree.map(lambda leaf: self._place(leaf) if isinstance(leaf, np.ndarray) else leaf, params)
        return jax.tree.map(self._place, first(params, extra))

    def step(self, *, norms: bool) -> tuple[StepFn, StepHalves]:
        """Accumulate, reduce and update: for a step of one group, and in parts, for one of several."""
        # Axes of a mesh that the layout does not name are the compiler's, which may shard the state over them.
        is_whole = self.placement is None or self.placement.mesh.size == self.placement.layout.data
        return step_of_sums(self.sums_of(self._trained_of), self.optimizer, norms=norms, is_whole=is_whole)

    def sums_of(self, trained_of: TrainedOf | None) -> GroupSumsOf:
        """Accumulate and reduce; None computes no gradients."""
        if not isinstance(self.model, StepLoss):
            return over_groups(self._sums_of_model(self._own_model, trained_of))
        from jvarlen.parallel.step_loss import sum_step_loss

        step_loss = self.model._replace(sums=self._own_model)
        return sum_step_loss(step_loss, self._sums_of_model, trained_of, self.crop)

    def _sums_of_model(
        self, model: Model, trained_of: TrainedOf | None, carry: Callable[[Model], Model] = lambda model: model
    ) -> SumsOf:
        """The sums of a step of a model, which `carry` changes on the axes of the layout."""
        model = carry(model)
        shards = None
        if self.placement is not None:
            from jvarlen.training.reduction import Shards, sum_over_shards

            shards = Shards(
                mesh=self.placement.mesh,
                axis_name=self.placement.data_axis,
                layout_axes=self.placement.axes.values(),
                reduce_dtype=self.placement.layout.reduce_dtype,
                grad_bucket_bytes=self.placement.layout.grad_bucket_bytes,
            )
        if isinstance(model, LayeredModel):
            from jvarlen.parallel.layer_loop import sum_by_layers

            remat = "none" if self.placement is None else self.placement.layout.remat_in_force
            return sum_by_layers(model, shards, remat=remat, trained_of=trained_of)
        loss = LossProgram(model, trained_of)
        return loss.sums_of if shards is None else sum_over_shards(loss, shards)

    @property
    def _own_model(self) -> Model:
        """The model whose functions take the arrays of a state."""
        return model_of(self.model)

    def average(self, average: EvalParams) -> Callable[[TrainState], Params]:
        """The trained parameters to evaluate, from a state."""
        return lambda state: average(state.opt_state, self._trained_of(state.params))

    def crop(self, params: Params) -> Params:
        """Whole parameters of a state without padding."""
        return params

    def _trained_of(self, params: Params) -> Params:
        return select_trained(params, self.trainable)

    def _shape_of(self, leaf: Array) -> jax.ShapeDtypeStruct:
        return with_sharding(sharding_on(leaf) or (None if self.placement is None else whole_on(self.placement)), leaf)

    def _place(self, leaf: Array) -> jax.Array:
        assert self.placement is not None
        sharding = sharding_on(leaf)
        is_there = sharding is not None and sharding.device_set == set(self.placement.mesh.devices.flat)
        if isinstance(leaf, np.ndarray):
            leaf = leaf[...].copy()  # devices of a CPU would share the memory
        return leaf if is_there else replicate(leaf, self.placement.mesh)


def whole_on(placement: Placement | None) -> jax.sharding.Sharding:
    """The sharding of what is whole on every device."""
    if placement is None:
        return jax.sharding.SingleDeviceSharding(devices_of(None)[0])
    return NamedSharding(placement.mesh, PartitionSpec())


def sharding_on(leaf: Array) -> NamedSharding | None:
    """The sharding over a mesh of an array or its shape, or None."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None
