"""A step of a model by layers in stages, as one program that runs the tables of a schedule.

In a tick each stage takes the branch of its action, then all stages exchange results. A backward pass is an action
as well, and no derivative of the loop, so a stage holds only what the schedule says. Actions run layer by layer.
Letters: L layers, S stages, V virtual stages of each, M microbatches of a data shard, T ticks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Int32

from jvarlen._common.checks import UserError
from jvarlen._common.jaxprs import primitives_in
from jvarlen._common.types import Array, Grads, Params, PyTree
from jvarlen.batches.shapes import BatchShapes
from jvarlen.distributed.grad_buckets import reduce_in_buckets
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import STAGE_AXIS, axes_in, num_shards_of
from jvarlen.parallel.device_layers import (
    DeviceLayers,
    Given,
    Part,
    add_at,
    buffer_of,
    put_at,
    read_at,
    when,
    wide_zeros,
    zeros_for,
)
from jvarlen.parallel.layers import LayeredModel, LayeredParams, num_layers_of, staged_specs
from jvarlen.parallel.passes import floats_of
from jvarlen.parallel.schedules import BACKWARD, FORWARD, WEIGHT, Schedule, Tables, make_schedule
from jvarlen.parallel.zero import gather_shards
from jvarlen.planning.buckets import AnyBucket, Bucket
from jvarlen.training.reduction import Shards, bucket_each, reduce_sums, sum_in_shards
from jvarlen.training.step_sums import StepSums, SumsOf, check_same_sums, first_of, microbatches_of
from jvarlen.training.train_state import TrainState
from jvarlen.training.trainable import TrainedOf, merge_trained, select_trained, where_trained

__all__ = ["branches_of_ticks", "keep_arrived", "sum_over_stages", "sum_scheduled"]


def sum_scheduled(
    model: LayeredModel,
    shards: Shards,
    layout: Layout,
    trained_of: TrainedOf | None = select_trained,  # None: no gradients
) -> SumsOf:
    """The sums of a whole step of a model in stages, equal to those of one device for the unsplit model."""
    # Stage s has L / S consecutive layers. `embed` runs on the first stage only and `loss` on the last only; all stages
    # hold the ends. With virtual stages, number v of stage s runs the L / (S · V) layers of part v · S + s. Where they
    # do not divide, arrays have room for equal parts, and the last parts skip what is not there.
    # Parameters are still stored as consecutive layers: once a step they move to the stages of their parts, and their
    # gradients move back. A stage keeps what `split_passes` says of each layer, such as its input where `remat` is
    # "full". What the data axes shard is gathered once, before the loop; gradients are reduced to shards after it.
    num_stages, num_virtual = num_shards_of(shards.mesh, STAGE_AXIS), layout.virtual
    with_grads = trained_of is not None

    def arrange(params: Params) -> LayeredParams:
        stacked = params if model.stack is None else model.stack(params)
        return stacked._replace(layers=_to_virtual_stages(stacked.layers, num_stages, num_virtual if with_grads else 1))

    def sum_on_device(params: LayeredParams, all_given: PyTree, before: StepSums | None) -> StepSums:
        name, virtual = (layout.schedule, num_virtual) if with_grads else ("gpipe", 1)
        made = make_schedule(name, num_stages, microbatches_of(all_given), virtual)
        tables, num_ticks = made.tables(), int(made.ticks.max()) + 1
        if not with_grads:  # the forward passes of GPipe, whose outputs the loss takes at once
            output_slot = np.minimum(tables.output_slot, 0)
            tables, num_ticks = dataclasses.replace(tables, output_slot=output_slot, num_outputs=1), num_ticks // 2
        whole = jax.tree.map(lambda _: PartitionSpec(), params)
        trained = jax.tree.map(lambda _: None, params) if trained_of is None else trained_of(params)
        device = _Stage(
            model=model,
            params=params,
            trained=trained,
            num_layers=model.num_layers or num_layers_of(params) * num_stages,
            first=first_of(all_given),
            remat=layout.remat_in_force,
            weights_apart="W" in made.kinds,
            param_specs=whole,
            grad_specs=where_trained(trained, whole),
            all_given=all_given,
            schedule=made,
            tables=tables,
            of_stage=_at_stage(made, tables),
            equal_over="tensor" if layout.tensor > 1 and not layout.sequence_parallel else None,
        )
        if num_stages > 1:
            device.check_sends()
        return _run_ticks(device, num_ticks, before)

    return sum_over_stages(sum_on_device, shards, arrange=arrange, trained_of=trained_of)


def sum_over_stages(
    sum_on_device: Callable[[LayeredParams, PyTree, StepSums | None], StepSums],
    shards: Shards,
    *,
    arrange: Callable[[Params], LayeredParams],
    trained_of: TrainedOf | None = select_trained,
) -> SumsOf:
    """The sums of a step, from those that each device computes of its stage and its microbatches."""
    # `arrange` makes what a stage computes with of whole parameters of the stage, and is linear. `sum_on_device` takes
    # that, microbatches with their keys, and sums before them; its gradients are of what is trained of the same, in
    # float32 at least, and its sums of the loss are 0 on all but the last stage. Between groups, gradients are arranged
    # where they are whole.

    def sum_shard(state: TrainState, given: PyTree, before: StepSums | None, is_whole: bool) -> StepSums:
        params = state.params
        whole = params if shards.param_specs is None else gather_shards(params, shards.param_specs)

        def run(before: StepSums | None) -> StepSums:
            return sum_on_device(arrange(whole), given, before)

        if not shards.accumulates_shards or trained_of is None:
            sums = shards.sum_once(run, before)
            return reduce(params, sums, whole) if is_whole else sums
        sums = reduce_to_shards(shards.sum_once(run, None), whole)
        if is_whole:
            return reduce_rest(sums)
        return sums if before is None else jax.tree.map(jnp.add, before, sums)

    def reduce_to_shards(sums: StepSums, whole: Params) -> StepSums:
        assert trained_of is not None
        trained = trained_of(whole)

        def arrange_trained(trained: Params) -> PyTree:
            return where_trained(trained, arrange(merge_trained(trained, whole)))

        (grads,) = jax.vjp(arrange_trained, jax.tree.map(wide_zeros, trained))[1](sums.grads)
        dims = shards.dims_of(grads)
        buckets = bucket_each(dims)[0]
        return sums._replace(grads=reduce_in_buckets(grads, buckets, shards.axis_name, dims, shards.reduce_dtype))

    def reduce_rest(sums: StepSums) -> StepSums:
        sums = reduce_sums(sums, shards)
        # Gradients of layers are not summed over the stages, which have different ones.
        others, ends = jax.lax.psum((sums._replace(grads=None), sums.grads.ends), STAGE_AXIS)
        return others._replace(grads=sums.grads._replace(ends=ends))

    def reduce(params: Params, sums: StepSums, whole: Params = None) -> StepSums:
        if trained_of is None:
            return jax.lax.psum(sums, (*axes_in(shards.axis_name), STAGE_AXIS))
        if shards.accumulates_shards:
            return reduce_rest(sums)
        return reduce_rest(reduce_to_shards(sums, params if whole is None else whole))

    return sum_in_shards(sum_shard, reduce, _on_stages(shards, with_grads=trained_of is not None))


def _on_stages(shards: Shards, *, with_grads: bool) -> Shards:
    """The same with layers along `"stage"`, and nothing left to the compiler."""
    params_lie, grads_lie = (
        LayeredParams(PartitionSpec(), PartitionSpec(STAGE_AXIS)) if specs is None else staged_specs(specs)
        for specs in (shards.param_specs, shards.grad_specs)
    )
    return dataclasses.replace(
        shards,
        layout_axes=shards.mesh.axis_names,
        param_specs=params_lie,
        grad_specs=grads_lie if with_grads else None,
    )


def branches_of_ticks(shapes: BatchShapes, bucket: AnyBucket) -> Int32[np.ndarray, "T S"] | None:
    """Which branch of the program of a train step each stage takes in each tick, 0 for none; None without stages."""
    if shapes.placement is None or (of := shapes.placement.layout).stage == 1:
        return None
    is_spread = not isinstance(bucket, Bucket) or bucket.length >= of.context_from
    num_microbatches = shapes.num_microbatches // (of.data * (1 if is_spread else of.context))
    return make_schedule(of.schedule, of.stage, num_microbatches, of.virtual).tables().kind + 1


def _at_stage(schedule: Schedule, tables: Tables) -> dict[str, jax.Array]:
    """int32[T] by name: the tables of this stage, and which part of the model each action is of."""
    stage, stages = jax.lax.axis_index(STAGE_AXIS), np.arange(schedule.num_stages)
    rows = {name: value for name, value in vars(tables).items() if isinstance(value, np.ndarray)}
    rows["part"] = tables.virtual * schedule.num_stages + stages
    return {name: jnp.asarray(np.ascontiguousarray(row.T), np.int32)[stage] for name, row in rows.items()}


class _Held(NamedTuple):
    """What arrived, the buffers, with a leading axis of slots, and the sums that a stage holds from tick to tick."""

    input: PyTree  # of the next forward pass
    kept: PyTree  # by forward passes, with a leading axis of slots times layers of a part
    handed: PyTree  # from backward passes to weight gradients
    outputs: PyTree  # of the last part, for the loss
    gradient: Grads  # of the output of the next backward pass
    sums: StepSums  # whose gradients are those of the ends
    totals: Grads  # of the gradients of layers


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Stage(DeviceLayers):
    """The actions of the stage of one device, whose layers are those of its virtual stages in turn."""

    all_given: PyTree  # microbatches and their keys
    schedule: Schedule
    tables: Tables
    of_stage: Mapping[str, jax.Array]  # of its stage
    equal_over: str | None  # the axis over whose devices activations between layers are equal

    @property
    def num_parts(self) -> int:
        return self.schedule.num_stages * self.schedule.num_virtual

    @property
    def per_part(self) -> int:
        """Layers that a part of the model has room for."""
        return num_layers_of(self.params) // self.schedule.num_virtual

    def action(self, t: Array) -> dict[str, jax.Array]:
        return {name: row[t] for name, row in self.of_stage.items()}

    def given(self, t: Array) -> Given:
        """The microbatch of a tick and its key."""
        return jax.tree.map(lambda leaf: leaf[self.of_stage["microbatch"][t]], self.all_given)

    def part(self, t: Array) -> Part:
        """The layers of a tick."""
        index, place, slot = (self.action(t)[name] * self.per_part for name in ("part", "virtual", "activation_slot"))
        is_even = self.num_parts * self.per_part == self.num_layers
        return Part(self.given(t), self.per_part, index, place, slot, None if is_even else self.num_layers - index)

    def check_sends(self) -> None:
        """Raises ValueError for layers that would make all devices wait, in branches that only some take."""
        own, *others = self.layer_arguments
        if "ppermute" in primitives_in(jax.make_jaxpr(self.run_layer)(own, self.x, *others).jaxpr):
            raise UserError("layers in stages cannot send by ppermute, for which all devices wait")

    def begin(self, before: StepSums | None) -> _Held:
        """Zeros, and the sums to begin with."""
        tables, (kept, handed) = self.tables, self.residual_shapes
        sums, totals = jax.eval_shape(lambda x: self.sum_loss(x, self.first)[0], self.x), self.sum_shapes
        if before is None:
            sums, totals = zeros_for((sums, totals))
        else:
            check_same_sums(before, sums._replace(grads=totals) if self.has_grads else sums)
            sums, totals = before, before.grads if self.has_grads else totals
        return _Held(
            input=zeros_for(self.x),
            kept=buffer_of(kept, tables.num_activations * self.per_part),
            handed=buffer_of(handed, tables.num_activations * self.per_part),
            outputs=buffer_of(self.x, tables.num_outputs),
            gradient=zeros_for(floats_of(self.x)) if self.has_grads else (),
            sums=sums._replace(grads=totals.ends) if self.has_grads else sums,
            totals=totals.layers,
        )

    def forward_part(self, t: Array, carry: PyTree) -> PyTree:
        """The output of a part, from its input; writes what its layers keep, and the output of the last part."""
        x, kept, outputs, sums = carry
        action = self.action(t)

        def embed(t: Array, _: PyTree) -> PyTree:
            return self.embed(self.params.ends, *self.given(t))

        x = when(action["part"] == 0, embed, t, x)
        x, kept, _ = self.forward(self.part(t), x, kept)
        outputs = _write_slot(outputs, action["output_slot"], x)
        if not self.has_grads:
            is_last = action["part"] == self.num_parts - 1
            _, sums = when(is_last, functools.partial(self.add_loss, outputs), t, ([], sums))
        return x, kept, outputs, sums

    def add_loss(self, outputs: PyTree, t: Array, carry: PyTree) -> PyTree:
        """The gradient of the last part's output, and the sums with those of the loss."""
        _, sums = carry
        of_one, of_ends, of_x = self.sum_loss(read_at(outputs, self.action(t)["output_slot"]), self.given(t))
        if self.has_grads:
            of_one = of_one._replace(grads=self.add_ends(sums.grads, of_ends))
        added = jax.tree.map(jnp.add, sums._replace(grads=None), of_one._replace(grads=None))
        return of_x, added._replace(grads=of_one.grads)

    def backward_part(self, kept: PyTree, outputs: PyTree, t: Array, carry: PyTree) -> PyTree:
        """The gradient of a part's input, from that of its output; adds those of layers, or writes what it hands on."""
        of_y, handed, sums, totals = carry
        action = self.action(t)

        def through_embed(t: Array, sums: StepSums) -> StepSums:
            given = self.given(t)
            return sums._replace(grads=self.backward_embed(self.forward_embed(given)[1], of_x, given, sums.grads))

        is_last = action["part"] == self.num_parts - 1
        of_y, sums = when(is_last, functools.partial(self.add_loss, outputs), t, (of_y, sums))
        of_x, rest, _ = self.backward(self.part(t), kept, of_y, handed if self.weights_apart else totals)
        sums = when(action["part"] == 0, through_embed, t, sums)
        return of_x, *((rest, sums, totals) if self.weights_apart else (handed, sums, rest))


def _run_ticks(device: _Stage, num_ticks: int, before: StepSums | None) -> StepSums:
    """Sums with what the stage of one device computes: those of the loss are 0 on all but the last stage."""
    num_stages, with_grads = device.schedule.num_stages, device.has_grads
    num_sending = num_stages if device.schedule.num_virtual > 1 else num_stages - 1
    to_next = [(stage, (stage + 1) % num_stages) for stage in range(num_sending)]
    to_previous = [(target, source) for source, target in to_next]

    def scope(name: str, kind: int) -> str:
        return f"{name}{kind + 1 if with_grads else ''}"

    def tick(held: _Held, t: Array) -> tuple[_Held, None]:
        x, kept, handed, outputs, of_y, sums, totals = held
        action = device.action(t)

        def act(t: Array, kind: int, run: Callable[[Array, PyTree], PyTree], carry: PyTree) -> tuple[Array, PyTree]:
            return _when(action["kind"] == kind, run, t, carry, scope("branch", kind))

        def send(t: Array, kind: int, name: str, pairs: list[tuple[int, int]], value: PyTree) -> tuple[Array, PyTree]:
            """What arrives, where something does, or else the value; in ticks in which a stage has results to send."""

            def run(t: Array, value: PyTree) -> PyTree:
                return keep_arrived(device.action(t)[name], _exchange(value, pairs, device.equal_over), value)

            has_results = jnp.asarray((device.tables.kind == kind).any(axis=1))
            return _when(has_results[t], run, t, value, scope("sends", kind)) if pairs else (t, value)

        # What a stage has no action for may be anything: it goes where it came from, or where nothing reads it.
        t, (x, kept, outputs, sums) = act(t, FORWARD, device.forward_part, (x, kept, outputs, sums))
        if with_grads:
            run = functools.partial(device.backward_part, kept, outputs)
            t, (of_y, handed, sums, totals) = act(t, BACKWARD, run, (of_y, handed, sums, totals))
        if "W" in device.schedule.kinds:
            t, totals = act(t, WEIGHT, lambda t, totals: device.weights(device.part(t), kept, handed, totals), totals)
        # A transfer is a rendezvous of all stages: both follow from t at the end of the tick, after all actions.
        t, x = send(t, FORWARD, "arriving_input", to_next, x)
        if with_grads:
            t, of_y = send(t, BACKWARD, "arriving_gradient", to_previous, of_y)
        return _Held(x, kept, handed, outputs, of_y, sums, totals), None

    held, _ = jax.lax.scan(tick, device.begin(before), np.arange(num_ticks, dtype=np.int32))
    return held.sums._replace(grads=LayeredParams(held.sums.grads, held.totals)) if with_grads else held.sums


def _when(
    is_taken: jax.Array, run: Callable[[Array, PyTree], PyTree], t: Array, carry: PyTree, scope: str
) -> tuple[Array, PyTree]:
    """The tick t, from which follows what is computed afterwards, and the result of `when`."""

    def turn(t: Array, carry: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
        return carry[0] + 1, run(t, carry[1])

    end, carry = when(is_taken, turn, t, (t, carry), scope)
    return end - is_taken.astype(t.dtype), carry


def _exchange(value: PyTree, pairs: list[tuple[int, int]], equal_over: str | None) -> PyTree:
    """What arrives from another stage. Devices with equal values each send a part."""
    # Stages are often on several hosts, and the devices that gather the parts on one, whose links are faster.
    size = 1 if equal_over is None else jax.lax.axis_size(equal_over)

    def of_leaf(leaf: jax.Array) -> jax.Array:
        if size == 1 or leaf.size % size:
            return jax.lax.ppermute(leaf, STAGE_AXIS, pairs)
        part = read_at(leaf.reshape(size, -1), jax.lax.axis_index(equal_over))
        arrived = jax.lax.ppermute(part, STAGE_AXIS, pairs)
        return jax.lax.all_gather(arrived, equal_over).reshape(leaf.shape)

    return jax.tree.map(of_leaf, value)


def _to_virtual_stages(layers: Params, num_stages: int, num_virtual: int) -> PyTree:
    """Consecutive layers of this stage, [L / S, …], to the layers of its virtual stages, one after the other."""
    # In each turn every stage sends one part and receives one. Part p is on stage p // V, and belongs to stage p % S.
    if num_virtual == 1 or num_stages == 1:
        return layers
    parts = jax.tree.map(lambda leaf: leaf.reshape(num_virtual, leaf.shape[0] // num_virtual, *leaf.shape[1:]), layers)
    stage = jax.lax.axis_index(STAGE_AXIS)
    source = np.arange(num_stages)
    arranged = jax.tree.map(jnp.zeros_like, parts)
    for turn in range(num_virtual):
        # Stages of one group have different targets for the same slot; the groups differ in the slot.
        group = source // (num_stages // math.gcd(num_stages, num_virtual))
        slot = (turn + group) % num_virtual
        part = source * num_virtual + slot
        target = part % num_stages
        virtual_of_target = np.empty_like(source)
        virtual_of_target[target] = part // num_stages
        sent = read_at(parts, jnp.asarray(slot)[stage])
        pairs = list(zip(source.tolist(), target.tolist(), strict=True))
        arrived = sent if (source == target).all() else jax.lax.ppermute(sent, STAGE_AXIS, pairs)
        # Added to the zeros: a compiled program that overwrites them holds more at a time.
        arranged = add_at(arranged, arrived, jnp.asarray(virtual_of_target)[stage])
    return jax.tree.map(lambda leaf, part: part.reshape(leaf.shape), layers, arranged)


def keep_arrived(microbatch: Array, arrived: PyTree, value: PyTree) -> PyTree:
    """What arrives, where it is of a microbatch, or else the value."""
    return jax.tree.map(lambda new, own: jnp.where(microbatch >= 0, new, own), arrived, value)


def _write_slot(buffer: PyTree, slot: Array, value: PyTree) -> PyTree:
    """The buffer with a value in a slot; for slot −1 as it was."""
    kept = jax.tree.map(lambda own, before: jnp.where(slot >= 0, own, before), value, read_at(buffer, slot))
    return put_at(buffer, kept, slot)
