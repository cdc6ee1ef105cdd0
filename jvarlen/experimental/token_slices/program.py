"""Token slices: a step of a model in stages through which rows go a slice of positions at a time.

As in `parallel.pipeline`, the step is one program that runs the tables of a schedule, and a backward pass recomputes
its stage. A layer's attention in a slice uses the keys and values of earlier slices, which each stage keeps. Backward
passes go from the last slice of a row to the first. Each adds to the gradients of the keys and values of earlier
slices, which these use in their own backward passes. All lengths are static, so each slice has its own branches.

Letters: L layers, S stages, M microbatches of a data shard, K slices of a row, T positions of a row, P those kept of
earlier slices, B rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import STAGE_AXIS, num_shards_of
from jvarlen.experimental.token_slices.cuts import Slices, slices_of
from jvarlen.experimental.token_slices.models import SlicedAxes
from jvarlen.experimental.token_slices.parts import read_part, resize, write_part
from jvarlen.experimental.token_slices.ticks import TickPlan, plan_ticks
from jvarlen.parallel.context import row_length
from jvarlen.parallel.device_layers import add_trees, buffer_of, read_at, wide_zeros, zeros_for
from jvarlen.parallel.layers import (
    Axes,
    LayeredModel,
    LayeredParams,
    axes_of,
    check_layer,
    num_layers_of,
)
from jvarlen.parallel.passes import floats_of, split_passes, with_floats
from jvarlen.parallel.pipeline import keep_arrived, sum_over_stages, sum_scheduled
from jvarlen.training.reduction import Shards
from jvarlen.training.step_sums import LossProgram, StepSums, SumsOf, microbatches_of
from jvarlen.training.train_state import TrainState
from jvarlen.training.trainable import TrainedOf, merge_trained, select_trained, where_trained

__all__ = ["check_by_positions", "sum_sliced"]


def sum_sliced(
    model: LayeredModel, shards: Shards, *, slices: Slices, trained_of: TrainedOf | None = select_trained
) -> SumsOf:
    """The sums of a whole step of a model in stages, to which rows come in slices: what `sum_scheduled` gives.

    The order is that of `token_slices`. A stage keeps the inputs of all microbatches, and what its layers take of
    earlier slices, such as keys and values. It keeps gradients due to the latter for one microbatch. Everything else is
    recomputed, for one slice at a time. Without gradients, rows are whole.
    """
    check_by_positions(model)
    if trained_of is None:
        return sum_scheduled(model, shards, Layout(), None)
    num_stages = num_shards_of(shards.mesh, STAGE_AXIS)

    def sum_on_device(params: LayeredParams, microbatches_and_keys: Any, before: StepSums | None) -> StepSums:
        lengths = slices_of(slices, row_length(model, params.ends, microbatches_and_keys[0]))
        device = _Device(
            model=model,
            params=params,
            microbatches_and_keys=microbatches_and_keys,
            plan=plan_ticks(num_stages, microbatches_of(microbatches_and_keys), lengths),
            num_layers=num_layers_of(params) * num_stages,
            trained=trained_of(params),
        )
        sums = _run_ticks(device)
        return sums if before is None else jax.tree.map(jnp.add, before, sums)

    return sum_over_stages(
        sum_on_device,
        shards,
        arrange=lambda params: params if model.stack is None else model.stack(params),
        trained_of=trained_of,
    )


def check_by_positions(model: Any) -> None:
    """Raises ValueError for a model that does not work by positions."""
    if not isinstance(model, LayeredModel) or not model.by_positions:
        raise UserError(
            "slices take a LayeredModel that works by positions and says so by by_positions=True: its attention is "
            "causal, by attend_over_slices"
        )


class _Received(NamedTuple):
    """What an action reads.

    Attributes:
      x: its input, [B, longest slice, …].
      gradient: of its output, floats of the same shapes.
      earlier: what layers took of earlier slices, [L / S, B, P, …].
      due: the sum of gradients of the latter, floats.
    """

    x: Any
    gradient: Any
    earlier: Any
    due: Any


class _Done(NamedTuple):
    """What an action returns.

    Attributes:
      x: its output.
      gradient: of its input.
      taken: what its layers took for later slices, [L / S, B, longest slice but the last, …].
      due: as received, and changed.
      sums: of the step.
    """

    x: Any
    gradient: Any
    taken: Any
    due: Any
    sums: StepSums


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Device:
    """What one device computes: the actions of its stage.

    Attributes:
      model: of all layers.
      params: the ends, and the layers of this stage, [L / S, …].
      microbatches_and_keys: of its data shard.
      plan: what to do.
      num_layers: L.
      trained: like the parameters, None in place of those that have no gradient.
    """

    model: LayeredModel
    params: LayeredParams
    microbatches_and_keys: Any
    plan: TickPlan
    num_layers: int
    trained: LayeredParams

    def microbatch_at(self, index: Any) -> tuple[Any, Any]:
        """A microbatch and its key."""
        return jax.tree.map(lambda leaf: leaf[index], self.microbatches_and_keys)

    def on_slice(self, k: int, axes: Axes, earlier: Callable[[Any], Any] | None = None) -> SlicedAxes:
        positions = np.arange(*self.plan.edges[k : k + 2], dtype=np.int32)
        return SlicedAxes.of(axes._replace(positions=positions), earlier or _refuse)

    def embed(self, ends: Any, k: int, microbatch: Any, key: Any) -> Any:
        axes = self.on_slice(k, axes_of(key, self.num_layers))
        x = jax.tree.map(jnp.asarray, self.model.embed(ends, microbatch, axes))
        self.check_positions(k, "embed returned", x)
        return x

    def run_layer(
        self, k: int, own: tuple[Any, list[Any]], x: Any, earlier: Any, index: Any, microbatch: Any, key: Any
    ) -> tuple[Any, Any]:
        """The output of a layer for slice k, and what it takes of it for later ones.

        `own` has its parameters, and the floats of `earlier`: what it took of earlier slices, None in the first one.
        """
        layer_params, floats = own
        given = None if earlier is None else with_floats(earlier, floats)
        taken: list[Any] = []

        def exchange(arrays: Any) -> Any:
            self.check_positions(k, "a layer gave earlier_of", arrays)
            taken.append(arrays)
            if given is None:
                return jax.tree.map(lambda leaf: leaf[:, :0], arrays)
            check_same(taken, given[: len(taken)])
            return given[len(taken) - 1]

        def check_same(taken: Any, given: Any) -> None:
            if leaves_by_name(taken).keys() != leaves_by_name(given).keys():
                raise UserError("a layer must give earlier_of the same arrays in each slice, in the same calls")

        following = self.model.layer(
            layer_params, x, microbatch, self.on_slice(k, axes_of(key, index, index), exchange)
        )
        check_layer(x, following)
        if given is not None:
            check_same(taken, given)
        return following, taken

    def run_layers(self, k: int, x: Any, earlier: Any, microbatch: Any, key: Any) -> tuple[Any, Any]:
        """The output of a stage, and what its layers took for later slices."""

        def run(x: Any, of_layer: Any) -> tuple[Any, Any]:
            own, earlier, index = of_layer
            return self.run_layer(k, own, x, earlier, index, microbatch, key)

        return jax.lax.scan(run, x, self.of_layers(earlier))

    def of_layers(self, earlier: Any) -> tuple[tuple[Any, list[Any]], Any, jax.Array]:
        """What `run_layer` takes, for all layers of this stage."""
        num_own = self.num_layers // self.plan.num_stages
        indices = jax.lax.axis_index(STAGE_AXIS) * num_own + jnp.arange(num_own, dtype=np.int32)
        return (self.params.layers, floats_of(earlier)), earlier, indices

    def check_positions(self, k: int, what: str, arrays: Any) -> None:
        num_positions = self.plan.edges[k + 1] - self.plan.edges[k]
        wrong = [
            f"{name} {describe(leaf)}".strip()
            for name, leaf in leaves_by_name(arrays).items()
            if leaf.shape[1:2] != (num_positions,)
        ]
        if wrong:
            raise UserError(
                f"{what} {', '.join(wrong)} for {num_positions} of {self.plan.edges[-1]} positions: arrays of a model "
                "that works by positions are [B, S, …] for the S of axes.positions"
            )

    def sum_loss(self, x: Any, k: int, microbatch: Any, key: Any) -> StepSums:
        """The sums of the loss of a slice; its gradients are those of the ends, and of the floats of x."""
        axes = axes_of(key, self.num_layers + 1)

        def loss_fn(ends_and_floats: Any, microbatch: Any) -> tuple[Any, ...]:
            ends, floats = ends_and_floats
            return self.model.loss(ends, with_floats(x, floats), microbatch, self.on_slice(k, axes))

        def trained_of(ends_and_floats: Any) -> Any:
            return self.trained.ends, ends_and_floats[1]

        state = TrainState((self.params.ends, floats_of(x)), None)
        sums = LossProgram(loss_fn, trained_of).sum_microbatch(state, microbatch)
        # It counts the tokens of whole rows.
        return sums if k == 0 else sums._replace(num_tokens=jax.tree.map(jnp.zeros_like, sums.num_tokens))

    @functools.cached_property
    def nothing(self) -> _Done:
        """Zeros in the shapes of an action's results."""
        plan, first = self.plan, self.microbatch_at(0)
        x = zeros_for(jax.eval_shape(lambda: self.embed(self.params.ends, 0, *first)))
        y, taken = jax.eval_shape(lambda: self.run_layers(0, x, None, *first))
        sums = zeros_for(jax.eval_shape(lambda y: self.sum_loss(y, 0, *first), y))
        sums = sums._replace(grads=LayeredParams(sums.grads[0], jax.tree.map(wide_zeros, self.trained.layers)))
        x = resize(x, plan.longest, axis=1)
        taken = resize(zeros_for(taken), plan.longest_earlier, axis=2)
        due = [wide_zeros(leaf) for leaf in resize(floats_of(taken), plan.edges[-2], axis=2)]
        return _Done(x, floats_of(x), taken, due, sums)

    def idle(self, action: Mapping[str, Any], received: _Received, sums: StepSums) -> _Done:
        """No action."""
        return self.nothing._replace(due=received.due, sums=sums)

    def input_of(self, k: int, received: _Received, microbatch_and_key: Any) -> Any:
        length = self.plan.edges[k + 1] - self.plan.edges[k]
        return jax.lax.cond(
            jax.lax.axis_index(STAGE_AXIS) == 0,
            lambda: self.embed(self.params.ends, k, *microbatch_and_key),
            lambda: resize(received.x, length, axis=1),
        )

    def earlier_of(self, k: int, received: _Received) -> Any:
        return None if k == 0 else resize(received.earlier, self.plan.edges[k], axis=2)

    def forward(self, action: Mapping[str, Any], received: _Received, sums: StepSums, *, k: int) -> _Done:
        """The output of a stage for slice k."""
        microbatch_and_key = self.microbatch_at(action["microbatch"])
        x = self.input_of(k, received, microbatch_and_key)
        y, taken = self.run_layers(k, x, self.earlier_of(k, received), *microbatch_and_key)
        done = self.idle(action, received, sums)._replace(x=resize(y, self.plan.longest, axis=1))
        if k == self.plan.num_slices - 1:
            return done
        return done._replace(taken=resize(taken, self.plan.longest_earlier, axis=2))

    def backward(self, action: Mapping[str, Any], received: _Received, sums: StepSums, *, k: int) -> _Done:
        """The gradient of a stage's input for slice k, gradients due to earlier slices, and the sums."""
        microbatch_and_key = self.microbatch_at(action["microbatch"])
        start, end = self.plan.edges[k : k + 2]
        stage, is_last_slice = jax.lax.axis_index(STAGE_AXIS), k == self.plan.num_slices - 1
        x = self.input_of(k, received, microbatch_and_key)
        of_layers = self.of_layers(self.earlier_of(k, received))
        own, earlier, index = jax.tree.map(lambda leaf: leaf[0], of_layers)

        def trained_of(own: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
            return where_trained(self.trained.layers, own[0]), own[1]

        def run_layer(trained: Any, x: Any, own: Any, *others: Any) -> Any:
            return self.run_layer(k, merge_trained(trained, own), x, *others)

        passes = split_passes(run_layer, trained_of(own), x, own, earlier, index, *microbatch_and_key)

        def run_forward(x: Any, of_layer: Any) -> tuple[Any, Any]:
            own = of_layer[0]
            (y, _), residuals = passes.forward(trained_of(own), x, *of_layer, *microbatch_and_key)
            return y, residuals

        def run_backward(of_y: Any, of_layer: Any) -> tuple[Any, Any]:
            (own, *others), residuals, of_taken = of_layer
            of_y = [*of_y, *of_taken]
            return passes.backward(trained_of(own), residuals, of_y, own, *others, *microbatch_and_key)

        y, residuals = jax.lax.scan(run_forward, x, of_layers)
        others, (of_ends, totals) = sums._replace(grads=None), sums.grads

        def from_loss() -> tuple[StepSums, Any, Any]:
            of_one = self.sum_loss(y, k, *microbatch_and_key)
            ends, floats = of_one.grads
            floats = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), floats, floats_of(y))
            return add_trees(others, of_one._replace(grads=None)), add_trees(of_ends, ends), floats

        def from_next() -> tuple[StepSums, Any, Any]:
            return others, of_ends, resize(received.gradient, end - start, axis=1)

        others, of_ends, of_y = jax.lax.cond(stage == self.plan.num_stages - 1, from_loss, from_next)
        due = received.due
        if is_last_slice:  # the first of a microbatch
            due = jax.tree.map(jnp.zeros_like, due)
        # Nothing is due to the last one, which `due` does not hold.
        of_taken = [
            resize(total[:, :, start:end], end - start, axis=2).astype(leaf.dtype)
            for total, leaf in zip(due, floats_of(self.nothing.taken), strict=True)
        ]
        of_x, (of_own, of_earlier) = jax.lax.scan(run_backward, of_y, (of_layers, residuals, of_taken), reverse=True)

        of_ends = jax.lax.cond(
            stage == 0, lambda: add_trees(of_ends, self.embed_gradient(of_x, k, *microbatch_and_key)), lambda: of_ends
        )
        due = _add_due(due, of_earlier, start)
        grads = LayeredParams(of_ends, add_trees(totals, of_own))
        of_x = resize(of_x, self.plan.longest, axis=1)
        return self.nothing._replace(gradient=of_x, due=due, sums=others._replace(grads=grads))

    def embed_gradient(self, of_x: Any, k: int, microbatch: Any, key: Any) -> Any:
        """The gradient of the trained ends through `embed`, from that of its output."""

        def embed(trained: Any) -> Any:
            return floats_of(self.embed(merge_trained(trained, self.params.ends), k, microbatch, key))

        _, pull = jax.vjp(embed, self.trained.ends)
        return pull(of_x)[0]

    @property
    def branches(self) -> list[Callable[..., _Done]]:
        """In the order of `branch` in the plan."""
        each = range(self.plan.num_slices)
        forward, backward = ([functools.partial(run, k=k) for k in each] for run in (self.forward, self.backward))
        return [self.idle, *forward, *backward]


def _run_ticks(device: _Device) -> StepSums:
    """The sums of one device, over what its stage computes: those of the loss are 0 on all but the last stage."""
    plan, nothing = device.plan, device.nothing
    stage = jax.lax.axis_index(STAGE_AXIS)
    to_next = [(s, s + 1) for s in range(plan.num_stages - 1)]
    to_previous = [(target, source) for source, target in to_next]

    def tick(carry: Any, row: dict[str, jax.Array]) -> tuple[Any, None]:
        x, gradient, kept, earlier, due, sums = carry
        action = {name: values[stage] for name, values in row.items()}
        start = action["start"]
        kept = write_part(kept, action["input_at"], start, x, axis=1)
        # Read here: buffers that branches read are copied in every tick.
        received = _Received(
            read_part(kept, action["microbatch"], start, plan.longest, axis=1),
            gradient,
            read_at(earlier, action["microbatch"]),
            due,
        )
        done = jax.lax.switch(action["branch"], device.branches, action, received, sums)
        earlier = write_part(earlier, action["earlier_at"], start, done.taken, axis=2)
        # A transfer is a rendezvous of all stages: both are at the end of the tick, after all actions.
        if to_next:
            x = keep_arrived(action["arriving_input"], jax.lax.ppermute(done.x, STAGE_AXIS, to_next), x)
            arrived = jax.lax.ppermute(done.gradient, STAGE_AXIS, to_previous)
            gradient = keep_arrived(action["arriving_gradient"], arrived, gradient)
        return (x, gradient, kept, earlier, done.due, done.sums), None

    # A slice is written as long as the longest one; the next one overwrites the excess.
    starts = np.array(plan.edges[:-1])
    num_kept = int(starts.max()) + plan.longest
    num_earlier = int(starts[:-1].max(initial=0)) + plan.longest_earlier
    buffers = (
        nothing.x,
        nothing.gradient,
        buffer_of(resize(nothing.x, num_kept, axis=1), plan.num_microbatches),
        buffer_of(resize(nothing.taken, num_earlier, axis=2), plan.num_microbatches),
        nothing.due,
    )
    rows = {name: jnp.asarray(row) for name, row in plan.rows.items()}
    (*_, sums), _ = jax.lax.scan(tick, (*buffers, nothing.sums), rows)
    return sums


def _add_due(due: list[jax.Array], of_earlier: list[jax.Array], start: int) -> list[jax.Array]:
    """Adds gradients of the first `start` positions; there are none for the first slice."""
    if start == 0:
        return due
    # As `at[…].add` this would be a scatter, and one over whole rows crashes XLA's compiler in JAX 0.11.
    return [
        jax.lax.dynamic_update_slice_in_dim(total, total[:, :, :start] + leaf.astype(total.dtype), 0, axis=2)
        for total, leaf in zip(due, of_earlier, strict=True)
    ]


def _refuse(_: Any) -> Any:
    raise UserError("embed and loss look at no earlier slices: only layers may attend to other positions")
