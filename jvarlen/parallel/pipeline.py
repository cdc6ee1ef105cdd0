"""A step of a model by layers in stages, as one program that runs the tables of a schedule.

In a tick each stage takes the branch of its own action, then all stages exchange results. A backward pass is an action
as well, and no derivative of the loop, so a stage holds only what the schedule says.
Letters: L layers, S stages, V chunks of a stage, M microbatches of a data shard, T ticks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Int32

from jvarlen._common.checks import UserError, check_choices
from jvarlen._common.jaxprs import primitives_in
from jvarlen.batches.shapes import BatchShapes
from jvarlen.distributed import layout
from jvarlen.distributed.mesh import DATA_AXIS, STAGE_AXIS, auto_axes, axes_in, check_shards_divide, num_shards_of
from jvarlen.parallel.layers import (
    LayeredModel,
    LayeredParams,
    axes_at,
    axes_of_ends,
    check_layer,
    check_layers_divide,
    num_layers_of,
    staged_specs,
)
from jvarlen.parallel.passes import Passes, floats_of, split_passes, with_floats
from jvarlen.parallel.schedules import BACKWARD, FORWARD, Schedule, check_schedule, make_schedule
from jvarlen.planning.buckets import AnyBucket, PairBucket
from jvarlen.training.reduction import bucket_each, count_once, reduce_sums, sharded_dims
from jvarlen.training.step_sums import (
    StepSums,
    microbatches_of,
    split_step,
    sum_microbatch,
)
from jvarlen.training.train_state import TrainState
from jvarlen.training.trainable import TrainedOf, merge_trained, select_trained, where_trained

__all__ = [
    "add_trees", "branches_of_ticks", "buffer_of", "read_slot", "sum_over_stages", "sum_scheduled", "wide_zeros",
    "write_slot", "zeros_of_shapes",
]  # fmt: skip


def sum_scheduled(
    model: LayeredModel,
    *,
    mesh: Mesh,
    schedule: layout.ScheduleName = "eager_1f1b",
    num_chunks: int = 1,
    remat: layout.Remat = "full",
    trained_of: TrainedOf | None = select_trained,  # None: no gradients
    param_specs: LayeredParams | None = None,
    grad_specs: LayeredParams | None = None,
    axis_name: str | tuple[str, ...] = DATA_AXIS,
    rows_along: str | None = None,
) -> Callable[[TrainState, Any], StepSums]:
    """The sums of a whole step of a model in stages: what `sum_step` gives for the unsplit model."""
    # Stage s has L / S consecutive layers. `embed` runs on the first stage only and `loss` on the last only; all stages
    # hold the ends. With V chunks, chunk c of stage s runs the L / (S · V) layers of part c · S + s. Parameters are
    # still stored as consecutive layers: once a step they move to their chunks' stages, and their gradients move back.
    # With `remat="full"` a stage keeps the inputs of forward passes, and backward passes, and weight gradients of their
    # own, recompute its layers. Otherwise it keeps what the backward pass of each layer takes from the forward pass.
    # What lies along the data axes is gathered once, before the loop; gradients are reduced to shards after it.
    mesh = auto_axes(mesh)
    batch_axes = tuple(name for name in axes_in(axis_name) if name != rows_along)
    num_shards, num_stages = num_shards_of(mesh, batch_axes), num_shards_of(mesh, STAGE_AXIS)
    check_schedule(schedule, num_stages, num_stages, num_chunks)  # what can be told by now
    check_choices(remat=(remat, layout.Remat))

    def sums_of(state: TrainState, batch: Any) -> StepSums:
        num_layers = num_layers_of(state.params)
        check_layers_divide(num_layers, num_stages, num_chunks)
        num_microbatches = microbatches_of(batch)
        check_shards_divide(num_microbatches, mesh, batch_axes)
        of_shard = num_microbatches // num_shards
        if trained_of is not None:
            plan = _plan_of(make_schedule(schedule, num_stages, of_shard, num_chunks), remat)
        else:  # the forward passes of GPipe, with one chunk a stage
            plan = _plan_of(make_schedule("gpipe", num_stages, of_shard), "none")
            rows = {name: row[: of_shard + num_stages - 1] for name, row in plan.rows.items()}
            plan = plan._replace(rows=rows, with_grads=False)

        def arrange(params: Any) -> LayeredParams:
            stacked = params if model.stack is None else model.stack(params)
            return stacked._replace(layers=_to_chunks(stacked.layers, num_stages, plan.num_chunks))

        trained = jax.tree.map(lambda _: None, state.params) if trained_of is None else trained_of(state.params)

        def sum_on_device(params: LayeredParams, all_given: Any) -> StepSums:
            of_model = {"model": model, "num_layers": num_layers, "trained": trained}
            device = _Device(ends=params.ends, chunks=params.layers, all_given=all_given, plan=plan, **of_model)
            if rows_along is not None and num_stages > 1:
                device.check_sends()
            return _run_ticks(device, num_stages)

        lie: dict[str, Any] = {"axis_name": axis_name, "rows_along": rows_along}
        lie |= {"param_specs": param_specs, "grad_specs": grad_specs}
        return sum_over_stages(sum_on_device, state, batch, arrange=arrange, mesh=mesh, trained_of=trained_of, **lie)

    return sums_of


def sum_over_stages(
    sum_on_device: Callable[[LayeredParams, Any], StepSums],
    state: TrainState,
    batch: Any,
    *,
    arrange: Callable[[Any], LayeredParams],
    mesh: Mesh,
    axis_name: str | tuple[str, ...],
    rows_along: str | None = None,
    trained_of: TrainedOf | None = select_trained,
    param_specs: LayeredParams | None = None,
    grad_specs: LayeredParams | None = None,
) -> StepSums:
    """The sums of a step, from those that each device computes of its stage and its microbatches."""
    # `arrange` makes what a stage computes with of whole parameters of the stage, and is linear. `sum_on_device` takes
    # that, and microbatches with their keys; its gradients are of what is trained of the same, in float32 at least, and
    # its sums of the loss are 0 on all but the last stage.

    def on_device(params: LayeredParams, microbatches_and_keys: Any) -> StepSums:
        whole = params
        if any({*axes_in(spec)} & {*axes_in(axis_name)} for spec in jax.tree.leaves(param_specs)):
            from jvarlen.parallel.zero import gather_shards

            whole = gather_shards(params, param_specs)
        sums = count_once(sum_on_device(arrange(whole), microbatches_and_keys), rows_along)
        if trained_of is None:
            return jax.lax.psum(sums, (*axes_in(axis_name), STAGE_AXIS))
        trained = trained_of(whole)

        def arrange_trained(trained: Any) -> Any:
            return where_trained(trained, arrange(merge_trained(trained, whole)))

        (grads,) = jax.vjp(arrange_trained, jax.tree.map(wide_zeros, trained))[1](sums.grads)
        dims = sharded_dims(grad_specs, grads, axis_name)
        sums = reduce_sums(sums._replace(grads=grads), axis_name, dims, *bucket_each(dims))
        # Gradients of layers are not summed over the stages, which have different ones.
        others, ends = jax.lax.psum((sums._replace(grads=None), sums.grads.ends), STAGE_AXIS)
        return others._replace(grads=sums.grads._replace(ends=ends))

    whole = jax.tree.map(lambda _: PartitionSpec(), state.params)
    params_lie = staged_specs(whole if param_specs is None else param_specs)
    grads_lie = params_lie if grad_specs is None else staged_specs(grad_specs)
    if trained_of is not None:
        grads_lie = where_trained(trained_of(state.params), grads_lie)
    on_devices = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(params_lie, PartitionSpec(tuple(name for name in axes_in(axis_name) if name != rows_along))),
        out_specs=StepSums._make([PartitionSpec()] * 5 + [None if trained_of is None else grads_lie]),
        axis_names=set(mesh.axis_names),
        # Unchecked, as in `sum_over_shards`; besides, devices take different branches.
        check_vma=False,
    )
    return on_devices(state.params, split_step(state, batch, takes_key=True))


class _Plan(NamedTuple):
    """A schedule for the program."""

    # int32[T, S] by name: those of `Tables`, with −1 in `kind` for actions that the program does not need; `part`, the
    # part of the model; slots that an action writes: `keeps_slot` what a forward pass keeps, `hands_slot` what a
    # backward pass hands on, `puts_slot` the output of the last part; and `output_slot`, from which that is read.
    rows: dict[str, np.ndarray]
    num_parts: int  # S · V
    num_chunks: int
    num_slots: tuple[int, ...]  # of each of `_Buffers`
    with_grads: bool
    splits_backward: bool  # weight gradients are actions of their own
    remat: layout.Remat


def _plan_of(schedule: Schedule, remat: layout.Remat) -> _Plan:
    tables = schedule.tables()
    rows = {name: value for name, value in vars(tables).items() if isinstance(value, np.ndarray)}
    kind, slot = tables.kind, tables.activation_slot
    rows["part"] = tables.chunk * schedule.num_stages + np.arange(schedule.num_stages)
    is_last = rows["part"] == (num_parts := schedule.num_stages * schedule.num_chunks) - 1
    rows["keeps_slot"] = np.where(kind == FORWARD, slot, -1)
    rows["hands_slot"] = np.where(kind == BACKWARD, slot, -1)
    last_slots, rows["output_slot"] = np.unique(np.where(is_last, slot, slot.max() + 1), return_inverse=True)
    rows["output_slot"] = np.where(is_last, rows["output_slot"].reshape(slot.shape), -1)
    rows["puts_slot"] = np.where(kind == FORWARD, rows["output_slot"], -1)
    if remat == "full":  # the backward pass of the last part computes all of its forward pass
        rows["kind"] = np.where((kind == FORWARD) & is_last, -1, kind)
    num_kept, num_outputs = tables.num_activations, len(last_slots) - (not is_last.all())
    num_slots = tables.num_inputs, num_kept, num_kept, num_outputs, tables.num_gradients
    return _Plan(rows, num_parts, schedule.num_chunks, num_slots, True, "W" in schedule.kinds, remat)


def branches_of_ticks(shapes: BatchShapes, bucket: AnyBucket) -> Int32[np.ndarray, "T S"] | None:
    """Which branch of the program of a train step each stage takes in each tick; None without stages."""
    if shapes.placement is None or (of := shapes.placement.layout).stage == 1:
        return None
    is_spread = isinstance(bucket, PairBucket) or bucket.length >= of.context_from
    num_microbatches = shapes.microbatches_per_step // (of.data * (1 if is_spread else of.context))
    schedule = make_schedule(of.schedule, of.stage, num_microbatches, of.virtual)
    return _plan_of(schedule, of.remat_in_force).rows["kind"] + 1


class _Buffers(NamedTuple):
    """What a stage holds, with a leading axis of slots; or one of each, which an action takes or returns."""

    inputs: Any  # that arrive; what an action returns is the input of the next stage
    kept: Any = ()  # by forward passes
    handed: Any = ()  # from backward passes to weight gradients
    outputs: Any = ()  # of the last part, for the loss
    gradients: Any = ()  # that arrive, of outputs; what an action returns is the gradient of its input


_Done = tuple[_Buffers, StepSums]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Device:
    """What one device computes: the actions of its stage."""

    model: LayeredModel
    ends: Any
    chunks: Any  # its layers, [V, L / (S · V), …]
    all_given: Any  # microbatches and their keys
    plan: _Plan
    num_layers: int
    trained: LayeredParams  # a tree like the parameters, None in place of those that have no gradient

    def given(self, index: Any) -> tuple[Any, Any]:
        """A microbatch and its key."""
        return jax.tree.map(lambda leaf: leaf[index], self.all_given)

    def embed(self, ends: Any, microbatch: Any, key: Any) -> Any:
        return jax.tree.map(jnp.asarray, self.model.embed(ends, microbatch, axes_of_ends(key, self.num_layers)))

    def trained_layers(self, layers: Any) -> Any:
        """Of one or more layers what has gradients."""
        return where_trained(self.trained.layers, layers)

    def run_trained(self, trained: Any, x: Any, own: Any, *given: Any) -> Any:
        return self.run_layer(merge_trained(trained, own), x, *given)

    def run_layer(self, own: Any, x: Any, microbatch: Any, key: Any, index: Any) -> Any:
        following = self.model.layer(own, x, microbatch, axes_at(key, index))
        check_layer(x, following)
        return following

    def example(self) -> tuple[Any, ...]:
        """The arguments of `run_layer`, or their shapes."""
        first = self.given(0)
        own = jax.tree.map(lambda leaf: leaf[0, 0], self.chunks)
        return own, jax.eval_shape(self.embed, self.ends, *first), *first, jnp.int32(0)

    def check_sends(self) -> None:
        """Raises ValueError for layers that would make all devices wait, in branches that only some take."""
        own, x, *others = self.example()
        traced = jax.make_jaxpr(lambda own, x: self.run_layer(own, x, *others))(own, x)
        if "ppermute" in primitives_in(traced.jaxpr):
            raise UserError(
                "layers in stages cannot send by ppermute, for which all devices wait: with stages, "
                "attend_over_axis takes implementation='gather'"
            )

    @functools.cached_property
    def passes(self) -> Passes:
        """Those of one layer, as a function of what is trained; the whole layer is with what all passes take."""
        own, x, *others = self.example()
        trained = self.trained_layers(own)
        return split_passes(self.run_trained, trained, x, own, *others, weights_apart=self.plan.splits_backward)

    def over_layers(
        self, call: Callable[..., Any], carry: Any, part: Any, *of_layers: Any, reverse: bool = False
    ) -> Any:
        """Scans `call(carry, index, *of_layer)` over the layers of a part of the model."""
        per_part = self.num_layers // self.plan.num_parts
        each = jnp.int32(part * per_part) + jnp.arange(per_part, dtype=jnp.int32), *of_layers
        return jax.lax.scan(lambda carry, of_layer: call(carry, *of_layer), carry, each, reverse=reverse)

    def run_layers(self, layers: Any, x: Any, given: tuple[Any, Any], part: Any) -> Any:
        """The output of a part of the model."""
        return self.over_layers(lambda x, i, own: (self.run_layer(own, x, *given, i), None), x, part, layers)[0]

    def run_forward(self, layers: Any, x: Any, given: tuple[Any, Any], part: Any) -> tuple[Any, Any]:
        """The output of a part, and the residuals of its layers."""

        def run(x: Any, i: Any, own: Any) -> tuple[Any, Any]:
            return self.passes.forward(self.trained_layers(own), x, own, *given, i)

        return self.over_layers(run, x, part, layers)

    def run_backward(self, layers: Any, kept: Any, of_y: Any, given: tuple[Any, Any], part: Any) -> tuple[Any, Any]:
        """The gradient of a part's input, and those of its layers, or what their weight gradients take."""

        def run(of_y: Any, i: Any, own: Any, residuals: Any) -> tuple[Any, Any]:
            return self.passes.backward(self.trained_layers(own), residuals, of_y, own, *given, i)

        return self.over_layers(run, of_y, part, layers, kept, reverse=True)

    def sum_loss(self, x: Any, microbatch: Any, key: Any) -> StepSums:
        """The sums of the loss; its gradients are those of the ends, and of the floats of x."""

        def trained_of(ends_and_floats: Any) -> Any:
            ends, floats = ends_and_floats
            return where_trained(self.trained.ends, ends), floats

        def loss_fn(ends_and_floats: Any, microbatch: Any) -> tuple[Any, ...]:
            ends, floats = ends_and_floats
            return self.model.loss(ends, with_floats(x, floats), microbatch, axes_of_ends(key, self.num_layers + 1))

        state = TrainState((self.ends, floats_of(x)), None)
        return sum_microbatch(loss_fn, state, microbatch, trained_of=trained_of if self.plan.with_grads else None)

    @functools.cached_property
    def nothing(self) -> _Done:
        """Zeros in the shapes of an action's results."""
        plan, first, layers = self.plan, self.given(0), _chunk_at(self.chunks, 0)
        x = zeros_of_shapes(jax.eval_shape(self.embed, self.ends, *first))
        y = jax.eval_shape(self.run_layers, layers, x, first, 0)
        sums = zeros_of_shapes(jax.eval_shape(self.sum_loss, y, *first))
        if not plan.with_grads:
            return _Buffers(x), sums
        sums = sums._replace(
            grads=LayeredParams(sums.grads[0], jax.tree.map(wide_zeros, self.trained_layers(self.chunks)))
        )
        if plan.remat == "full":
            return _Buffers(x, gradients=floats_of(x)), sums
        y, kept = zeros_of_shapes(jax.eval_shape(self.run_forward, layers, x, first, 0))
        handed: Any = ()
        if plan.splits_backward:
            handed = zeros_of_shapes(jax.eval_shape(self.run_backward, layers, kept, floats_of(y), first, 0)[1])
        return _Buffers(x, kept, handed, y, floats_of(x)), sums

    def idle(self, action: Mapping[str, Any], received: _Buffers, sums: StepSums) -> _Done:
        """No action: computing on whatever is there and dropping it could turn an infinite derivative into NaN."""
        return self.nothing[0], sums

    def forward(self, action: Mapping[str, Any], received: _Buffers, sums: StepSums) -> _Done:
        """The output of a part."""
        part, given, none = action["part"], self.given(action["microbatch"]), self.nothing[0]
        x, layers = self.input_of(part, received.inputs, given), _chunk_at(self.chunks, action["chunk"])
        if self.plan.with_grads and self.plan.remat != "full":
            y, kept = self.run_forward(layers, x, given, part)
            return none._replace(inputs=y, kept=kept, outputs=y), sums
        y = self.run_layers(layers, x, given, part)
        if not self.plan.with_grads:
            of_loss = functools.partial(self.sum_loss, y, *given)
            sums = jax.lax.cond(part == self.plan.num_parts - 1, lambda: add_trees(sums, of_loss()), lambda: sums)
        return none._replace(inputs=y), sums

    def input_of(self, part: Any, arrived: Any, given: tuple[Any, Any]) -> Any:
        return jax.lax.cond(part == 0, lambda: self.embed(self.ends, *given), lambda: arrived)

    def backward(
        self, action: Mapping[str, Any], received: _Buffers, sums: StepSums, *, is_weights: bool = False
    ) -> _Done:
        """The gradients of a part's input, and of its layers unless these are actions of their own: `is_weights`."""
        part, given, done = action["part"], self.given(action["microbatch"]), self.nothing[0]
        layers, recomputes = _chunk_at(self.chunks, action["chunk"]), self.plan.remat == "full"
        kept, y, rest = received.kept, received.outputs, received.handed
        if recomputes:
            y, kept = self.run_forward(layers, self.input_of(part, kept, given), given, part)
        others, (of_ends, totals) = sums._replace(grads=None), sums.grads or (None, None)

        def from_loss() -> tuple[StepSums, Any, Any]:
            of_one = self.sum_loss(y, *given)
            ends, floats = of_one.grads
            floats = jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), floats, floats_of(y))
            return add_trees(others, of_one._replace(grads=None)), add_trees(of_ends, ends), floats

        def through_embed(of_x: Any) -> Any:
            def embed(trained: Any) -> Any:
                return floats_of(self.embed(merge_trained(trained, self.ends), *given))

            _, pull = jax.vjp(embed, where_trained(self.trained.ends, self.ends))
            return add_trees(of_ends, pull(of_x)[0])

        if not is_weights or recomputes:
            is_last = part == self.plan.num_parts - 1
            found = jax.lax.cond(is_last, from_loss, lambda: (others, of_ends, received.gradients))
            of_x, rest = self.run_backward(layers, kept, found[2], given, part)
            if not is_weights:
                others, of_ends = found[:2]
                of_ends = jax.lax.cond(part == 0, through_embed, lambda _: of_ends, of_x)
                done = done._replace(gradients=of_x)
        if is_weights and (weights := self.passes.weights) is not None:

            def run(_: None, i: Any, own: Any, residuals: Any, handed: Any) -> tuple[None, Any]:
                return None, weights(self.trained_layers(own), residuals, handed, own, *given, i)

            rest = self.over_layers(run, None, part, layers, kept, rest)[1]
        if is_weights or not self.plan.splits_backward:
            totals = jax.tree.map(lambda total, grad: _add_at(total, grad, action["chunk"]), totals, rest)
        elif not recomputes:
            done = done._replace(handed=rest)
        return done, others._replace(grads=LayeredParams(of_ends, totals))


def _run_ticks(device: _Device, num_stages: int) -> StepSums:
    """The sums of one device, over what its stage computes: those of the loss are 0 on all but the last stage."""
    plan, (none, no_sums) = device.plan, device.nothing
    stage = jax.lax.axis_index(STAGE_AXIS)
    to_next = [(s, (s + 1) % num_stages) for s in range(num_stages if plan.num_chunks > 1 else num_stages - 1)]
    to_previous = [(target, source) for source, target in to_next]
    recomputes = plan.with_grads and plan.remat == "full"
    branches: list[Callable[..., _Done]] = [device.idle, device.forward]  # by kind of action, from −1 on
    if plan.with_grads:
        branches.append(device.backward)
    if plan.splits_backward:
        branches.append(functools.partial(device.backward, is_weights=True))

    def tick(carry: tuple[_Buffers, StepSums], row: dict[str, jax.Array]) -> tuple[tuple[_Buffers, StepSums], None]:
        held, sums = carry
        action = {name: values[stage] for name, values in row.items()}
        # Read here: buffers that branches read are copied in every tick.
        x = read_slot(held.inputs, action["input_slot"])
        if recomputes:
            held = held._replace(kept=write_slot(held.kept, action["keeps_slot"], x))
        reads = ("activation_slot", "activation_slot", "output_slot", "gradient_slot")
        received = _Buffers(x, *(read_slot(held[1 + i], action[name]) for i, name in enumerate(reads)))
        done, sums = jax.lax.switch(action["kind"] + 1, branches, action, received, sums)
        held = held._replace(
            kept=held.kept if recomputes else write_slot(held.kept, action["keeps_slot"], done.kept),
            handed=write_slot(held.handed, action["hands_slot"], done.handed),
            outputs=write_slot(held.outputs, action["puts_slot"], done.outputs),
        )
        # A transfer is a rendezvous of all stages: both are at the end of the tick, after all actions.
        if to_next:
            x = jax.lax.ppermute(done.inputs, STAGE_AXIS, to_next)
            of_y = jax.lax.ppermute(done.gradients, STAGE_AXIS, to_previous)
            held = held._replace(
                inputs=write_slot(held.inputs, action["arriving_input_slot"], x),
                gradients=write_slot(held.gradients, action["arriving_gradient_slot"], of_y),
            )
        return (held, sums), None

    of_one = none._replace(kept=none.inputs) if recomputes else none
    held = _Buffers._make(map(buffer_of, of_one, plan.num_slots))
    (_, sums), _ = jax.lax.scan(tick, (held, no_sums), {name: jnp.asarray(row) for name, row in plan.rows.items()})
    return sums


def _to_chunks(layers: Any, num_stages: int, num_chunks: int) -> Any:
    """Consecutive layers of this stage, [L / S, …], to the layers of its chunks, [V, L / (S · V), …]."""
    # In each turn every stage sends one part and receives one. Part p lies on stage p // V, and belongs to stage p % S.
    layers = jax.tree.map(lambda leaf: leaf.reshape(num_chunks, leaf.shape[0] // num_chunks, *leaf.shape[1:]), layers)
    if num_chunks == 1 or num_stages == 1:
        return layers
    stage = jax.lax.axis_index(STAGE_AXIS)
    source = np.arange(num_stages)
    chunks = jax.tree.map(jnp.zeros_like, layers)
    for turn in range(num_chunks):
        # Stages of one group have different targets for the same slot; the groups differ in the slot.
        group = source // (num_stages // math.gcd(num_stages, num_chunks))
        slot = (turn + group) % num_chunks
        part = source * num_chunks + slot
        target = part % num_stages
        chunk_of_target = np.empty_like(source)
        chunk_of_target[target] = part // num_stages
        sent = _chunk_at(layers, jnp.asarray(slot)[stage])
        pairs = list(zip(source.tolist(), target.tolist(), strict=True))
        arrived = sent if (source == target).all() else jax.lax.ppermute(sent, STAGE_AXIS, pairs)
        stored = functools.partial(_add_at, index=jnp.asarray(chunk_of_target)[stage])
        chunks = jax.tree.map(stored, chunks, arrived)
    return chunks


def _chunk_at(chunks: Any, index: Any) -> Any:
    """The layers of one chunk."""
    return jax.tree.map(lambda leaf: leaf[0] if leaf.shape[0] == 1 else leaf[index], chunks)


def _add_at(total: jax.Array, value: jax.Array, index: Any) -> jax.Array:
    value = value.astype(total.dtype)
    if total.shape[0] == 1:
        return total + value[np.newaxis]
    added = jax.lax.dynamic_index_in_dim(total, index, keepdims=False) + value
    return jax.lax.dynamic_update_index_in_dim(total, added, index, 0)


def buffer_of(value: Any, num_slots: int) -> Any:
    """Zeros in the shapes of a value, in as many slots, at least one."""
    return jax.tree.map(lambda leaf: jnp.zeros((max(1, num_slots), *leaf.shape), leaf.dtype), value)


def read_slot(buffer: Any, slot: Any) -> Any:
    """What is in a slot; anything for slot −1."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, slot, keepdims=False), buffer)


def write_slot(buffer: Any, slot: Any, value: Any) -> Any:
    """The buffer with a value in a slot; for slot −1 as it was."""
    kept = jax.tree.map(lambda own, before: jnp.where(slot >= 0, own, before), value, read_slot(buffer, slot))
    return jax.tree.map(lambda leaf, own: jax.lax.dynamic_update_index_in_dim(leaf, own, slot, 0), buffer, kept)


def add_trees(sums: Any, more: Any) -> Any:
    """The sums and more, in the types of the sums."""
    return jax.tree.map(lambda total, value: total + value.astype(total.dtype), sums, more)


def zeros_of_shapes(shapes: Any) -> Any:
    """Zeros of these shapes and dtypes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def wide_zeros(leaf: jax.Array) -> jax.Array:
    """Zeros in the shape of an array, in float32 at least."""
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
