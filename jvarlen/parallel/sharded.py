"""State and steps of layouts that shard state or rows.

Of a step's three parts, a ZeRO level replaces what it must: 1 the update, which runs on shards of the optimizer state,
and the reduction, of gradients to the same shards; 2 also accumulation, of shards of gradients; 3 also the loss, which
gathers its parameters layer by layer. Stages replace accumulation, and the reduction with it. The update is always that
of whole arrays, which the compiler splits, so any Optax optimizer gives what it gives on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError, check_choices
from jvarlen.distributed.layout import Layout, ScheduleName
from jvarlen.distributed.mesh import DATA_AXIS, Placement, axes_in, replicate
from jvarlen.parallel.context import CONTEXT_AXIS, context_model, context_positions, row_length
from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams, layered_loss_fn, num_layers_of, rematerialized
from jvarlen.parallel.pipeline import check_layers_divide, sum_scheduled
from jvarlen.parallel.schedules import check_chunks, make_schedule
from jvarlen.parallel.tensor import (
    TENSOR_AXIS,
    crop_vocabularies,
    merge_params,
    partition_specs,
    split_params,
    tensor_parallel_model,
)
from jvarlen.parallel.train import Accumulate
from jvarlen.parallel.zero import (
    Perturbed,
    crop,
    gathering_model,
    pad,
    padded,
    perturbed_loss_fn,
    shard_specs,
    staged_specs,
    state_specs,
    unpadded,
)
from jvarlen.training.losses import LossFn
from jvarlen.training.step import StepFn, metrics_of, step_of_sums
from jvarlen.training.step_sums import StepSums, microbatches_of, sum_step
from jvarlen.training.train_state import Metrics, TrainState, has_shapes, new_state, own_copy, with_sharding

__all__ = [
    "check_bucket", "check_layout", "check_model", "init_sharded", "make_sharded_eval_step", "make_sharded_step",
    "merge_tensor_params", "model_on_axes", "other_specs_of", "pad_params", "split_specs", "step_on_layout",
    "sums_on_shards",
]  # fmt: skip


def make_sharded_step(
    model: LayeredModel | LossFn,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    placement: Placement,
    *,
    norms: bool,
    accumulate: Accumulate | None,
) -> StepFn:
    """`make_train_step` on a layout that shards state or rows."""
    layout, mesh = placement.layout, placement.program_mesh
    check_model(model, layout)
    if accumulate is not None:
        check_choices(accumulate=(accumulate, Accumulate))
    if layout.stage == 1 and layout.zero < 3 and layout.remat_in_force == "full" and isinstance(model, LayeredModel):
        model = rematerialized(model)  # at ZeRO-3 the model that gathers does it
    sums_of, values_of = _sums_of(model, mesh, layout, accumulate), _sums_of(model, mesh, layout, with_grads=False)
    return step_on_layout(step_of_sums(sums_of, values_of, optimizer, norms=norms), model, mesh, layout)


def make_sharded_eval_step(model: LayeredModel | LossFn, placement: Placement) -> StepFn:
    """`make_eval_step` on a layout that shards state or rows. It gets no key, so that nothing is dropped out."""
    layout = placement.layout
    check_model(model, layout)
    sums_of = _sums_of(model, placement.program_mesh, layout, with_grads=False)

    def eval_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        return state, metrics_of(sums_of(state._replace(key=None), batch), batch)

    return eval_step


def init_sharded(
    params: Any,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    placement: Placement,
    model: LayeredModel | LossFn | None,
    *,
    extra: Any = None,
    seed: int | None = None,
) -> TrainState:
    """`TrainStep.init` on a layout that shards state. No device ever holds the whole optimizer state."""
    layout, mesh = placement.layout, placement.program_mesh
    check_layout(layout, params, model)
    is_abstract = has_shapes(params)
    params = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "shape") else np.asarray(leaf), params)
    other_specs = other_specs_of(params, model, layout)
    if (specs := split_specs(model, layout)) is not None:
        split = functools.partial(split_params, specs=specs, num_devices=layout.tensor)
        params = jax.eval_shape(split, params) if is_abstract else split(params)

    def init(params: Any) -> TrainState:
        return padded(new_state(_cropped(params, model, layout), optimizer), layout, other_specs)

    shapes = jax.eval_shape(init, params)._replace(params=params)
    shardings = _shardings(shapes, mesh, layout, other_specs)
    others = functools.partial(new_state, (), optax.identity(), extra=extra, seed=seed)
    if is_abstract:
        shapes = shapes._replace(**jax.eval_shape(others)._asdict() | {"params": params, "opt_state": shapes.opt_state})
        shardings = _shardings(shapes, mesh, layout, other_specs)
        return jax.tree.map(with_sharding, shardings, shapes)
    params = jax.tree.map(_place, params, shardings.params)
    opt_state = jax.jit(lambda params: init(params).opt_state, out_shardings=shardings.opt_state)(params)
    return TrainState(params, opt_state, *replicate(own_copy(others()[2:]), mesh))


def step_on_layout(train_step_of_sums: StepFn, model: LayeredModel | LossFn, mesh: Mesh, layout: Layout) -> StepFn:
    """A train step of states that lie as a layout says, from one whose optimizer gets whole arrays."""

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        state = state._replace(params=_cropped(state.params, model, layout))
        other_specs = other_specs_of(state.params, model, layout)
        shardings = _shardings(state, mesh, layout, other_specs)
        following, metrics = train_step_of_sums(unpadded(state, layout, other_specs), batch)
        following, params = padded(following, layout, other_specs), following.params
        if other_specs is not None:
            params = pad_params(params, layout, other_specs)
        if layout.zero:  # added on shards, then gathered in the type of the parameters: updates may be wider
            params = _on_shards(params, mesh, shard_specs(state.params, layout, other_specs=other_specs))
        return following._replace(
            params=_constrain(params, shardings.params),
            opt_state=_constrain(following.opt_state, shardings.opt_state),
            extra=_constrain(following.extra, shardings.extra),
            step=_constrain(following.step, shardings.step),
        ), metrics

    return train_step


def merge_tensor_params(params: Any, model: LayeredModel | LossFn, layout: Layout) -> Any:
    """Whole parameters of a state, as `init_sharded` got them."""
    specs = split_specs(model, layout)
    return params if specs is None else merge_params(params, specs, layout.tensor)


def check_layout(layout: Layout, params: Any, model: LayeredModel | LossFn | None) -> None:
    """Raises ValueError if a layout is not supported, or not for these parameters or this model (None: unknown)."""
    if model is None:
        _check_axes(layout)
        split_specs(model, layout)
    else:
        check_model(model, layout)
    if isinstance(model, LayeredModel):
        num_layers_of(params if model.stack is None else jax.eval_shape(model.stack, params))
    elif isinstance(params, LayeredParams):
        num_layers_of(params)
    elif layout.zero == 3:
        raise UserError(f"zero3 takes LayeredParams, not a {type(params).__name__}; zero2 takes any parameters")
    if layout.stage > 1:
        if not isinstance(params, LayeredParams):
            raise UserError(f"stage{layout.stage} takes LayeredParams, not a {type(params).__name__}")
        check_layers_divide(num_layers_of(params), layout.stage, layout.virtual)


def _check_axes(layout: Layout) -> None:
    check_chunks(layout.schedule, layout.virtual)
    without = {
        "sequence_parallel": (layout.sequence_parallel, "tensor"),
        f"context_from{layout.context_from}": (layout.context_from > 0, "context"),
        f"virtual{layout.virtual}": (layout.virtual > 1, "stage"),
    }
    for word, (is_there, axis) in without.items():
        if is_there and getattr(layout, axis) == 1:
            raise UserError(f"{word} of the layout {layout} needs {axis}N, with several devices")


def check_bucket(layout: Layout, bucket: tuple[int, ...], microbatches_per_step: int) -> None:
    """Raises ValueError if steps of a bucket cannot be taken on a layout. Of buckets of pairs, nothing is known."""
    if len(bucket) != 2:
        return
    length = bucket[1]
    is_spread = layout.context > 1 and length >= layout.context_from
    num_shards = layout.data if is_spread else layout.num_shards
    if microbatches_per_step % num_shards:
        raise UserError(
            f"{microbatches_per_step} microbatches a step do not spread over the {num_shards} shards that {layout} has "
            f"for rows of {length}"
        )
    if is_spread:
        length = context_positions(length, layout.context).shape[1]
    if layout.sequence_parallel and length % layout.tensor:
        raise UserError(f"sequence_parallel of {layout} takes a multiple of {layout.tensor} positions, not {length}")
    if layout.stage > 1:
        _check_schedule(layout.schedule, layout.stage, microbatches_per_step // num_shards, layout.virtual)


@functools.lru_cache(maxsize=4096)
def _check_schedule(name: ScheduleName, num_stages: int, num_microbatches: int, num_chunks: int) -> None:
    """Raises ValueError if there is no such schedule. Many layouts and buckets share one."""
    make_schedule(name, num_stages, num_microbatches, num_chunks)


def other_specs_of(params: Any, model: LayeredModel | LossFn | None, layout: Layout) -> Any:
    """How parameters lie along "stage" and "tensor"; None if both have one device."""
    tensor_specs = _tensor_specs(model, layout)
    if layout.stage == 1:
        return tensor_specs
    whole = jax.tree.map(lambda _: PartitionSpec(), params)
    return staged_specs(whole if tensor_specs is None else tensor_specs)


def _tensor_specs(model: LayeredModel | LossFn | None, layout: Layout) -> Any:
    """How parameters lie along "tensor"; None if that has one device."""
    specs = split_specs(model, layout)
    return None if specs is None else partition_specs(specs)


def split_specs(model: LayeredModel | LossFn | None, layout: Layout) -> LayeredParams | None:
    """How a model is split over "tensor"; None if that has one device; raises ValueError if it cannot be split."""
    if layout.tensor == 1:
        return None
    if not isinstance(model, LayeredModel) or model.specs is None or model.stack is not None:
        raise UserError(f"tensor{layout.tensor} takes a LayeredModel of LayeredParams, with specs")
    return model.specs


def check_model(model: LayeredModel | LossFn, layout: Layout) -> None:
    """Raises ValueError for a layout that is not supported, or does not take such a model."""
    _check_axes(layout)
    split_specs(model, layout)
    name = getattr(model, "__name__", type(model).__name__)
    if layout.zero == 3 and not isinstance(model, LayeredModel):
        raise UserError(f"zero3 takes a LayeredModel, and {name} is a loss function: zero2 takes any")
    if layout.context > 1 and not (isinstance(model, LayeredModel) and model.by_positions):
        raise UserError(
            f"context{layout.context} takes a LayeredModel with by_positions=True, whose functions take the "
            "positions of axes.positions and attend by attend_over_axis"
        )
    if layout.remat_in_force == "full" and not isinstance(model, LayeredModel) and layout.stage == 1:
        raise UserError("remat_full takes a LayeredModel, whose layers can be run again")
    if layout.stage > 1 and not isinstance(model, LayeredModel):
        raise UserError(f"stage{layout.stage} takes a LayeredModel, and {name} is a loss function")
    if layout.stage > 1 and isinstance(model, LayeredModel) and model.stack is not None:
        raise UserError(
            f"stage{layout.stage} takes LayeredParams, and the model has parameters of another form: stack them once, "
            "before step.init, and leave out LayeredModel.stack"
        )


def _sums_of(
    model: LayeredModel | LossFn,
    mesh: Mesh,
    layout: Layout,
    accumulate: Accumulate | None = None,
    *,
    with_grads: bool = True,
) -> Callable[[TrainState, Any], StepSums]:
    """The sums of a step over all shards, from parameters that lie as the layout says, to gradients in shards."""
    whole_model = model

    def sums_of(state: TrainState, batch: Any) -> StepSums:
        model, rows_along = model_on_axes(whole_model, layout, state.params, batch)
        options: dict[str, Any] = {"axis_name": layout.data_axes, "rows_along": rows_along}
        sum_of: Callable[..., Callable[[TrainState, Any], StepSums]]
        params, other_specs = state.params, other_specs_of(state.params, whole_model, layout)
        if other_specs is not None:
            state = state._replace(params=pad_params(params, layout, other_specs))
        specs_of = functools.partial(shard_specs, layout=layout, other_specs=other_specs)
        specs = specs_of(state.params) if layout.zero else other_specs
        if layout.stage > 1 and isinstance(model, LayeredModel):
            sum_of = functools.partial(
                sum_scheduled, model, schedule=layout.schedule, num_chunks=layout.virtual, remat=layout.remat_in_force
            )
            options["param_specs"] = other_specs
            if layout.zero == 3:
                specs = options["param_specs"] = specs_of(state.params, padded=False)
            if layout.zero >= 2 and accumulate == "shards" and with_grads:
                num_shards = layout.data if rows_along else layout.num_shards
                _refuse_shards(params, specs, layout, microbatches_of(batch) // num_shards)
        elif layout.zero == 3 and isinstance(model, LayeredModel):
            if model.stack is None or layout.tensor > 1:  # which takes no parameters that are to be stacked
                stacked = state.params
            else:
                stacked = jax.eval_shape(model.stack, state.params)
            in_shards, recomputes = specs_of(stacked, padded=False), layout.remat_in_force == "full"
            if accumulate == "whole" and with_grads:
                loss_fn, options["perturb"] = perturbed_loss_fn(model, in_shards, recomputes=recomputes), Perturbed
            else:
                loss_fn = layered_loss_fn(gathering_model(model, in_shards, recomputes=recomputes))
            specs = options["param_specs"] = specs_of(state.params, padded=False)
            sum_of = functools.partial(sum_step, loss_fn)
        else:
            options["param_specs"] = other_specs
            options["accumulates_shards"] = layout.zero == 2 and accumulate != "whole"
            sum_of = functools.partial(sum_step, layered_loss_fn(model) if isinstance(model, LayeredModel) else model)
        sums = sum_of(mesh=mesh, with_grads=with_grads, grad_specs=specs, **options)(state, batch)
        return sums_on_shards(sums, params, specs, mesh)

    return sums_of


def sums_on_shards(sums: StepSums, params: Any, specs: Any, mesh: Mesh) -> StepSums:
    """The sums, with gradients in the shapes of the parameters, where `specs` says (None: on every device)."""
    if sums.grads is None or specs is None:
        return sums
    grads = _constrain(sums.grads, _on(mesh, specs))
    return sums._replace(grads=jax.tree.map(lambda grad, param: crop(grad, param.shape), grads, params))


def model_on_axes(
    model: LayeredModel | LossFn, layout: Layout, params: Any, batch: Any
) -> tuple[LayeredModel | LossFn, str | None]:
    """A model whose functions run inside `shard_map` over a layout's axes, and the axis over which rows are spread.

    The layout binds `"tensor"`, and `"context"` for rows that are long enough; otherwise that axis is None. Parameters
    and the batch of a step are arrays or shapes of the whole.
    """
    if not isinstance(model, LayeredModel):
        return model, None
    rows_along = None
    if layout.context > 1:
        stacked = params if model.stack is None else jax.eval_shape(model.stack, params)
        seq_length = row_length(model, stacked.ends, batch)
        if seq_length >= layout.context_from:
            model, rows_along = context_model(model, seq_length), CONTEXT_AXIS
    if layout.tensor > 1:
        axes = Axes(tensor=TENSOR_AXIS, sequence_parallel=layout.sequence_parallel)
        model = tensor_parallel_model(model, axes)
    return model, rows_along


def _refuse_shards(params: Any, specs: Any, layout: Layout, of_shard: int) -> None:
    """Raises ValueError for ZeRO-2 and 3 that would communicate in every microbatch of a pipeline, with the bytes."""
    sharded = jax.tree.map(lambda leaf, spec: leaf.nbytes if DATA_AXIS in axes_in(spec) else 0, params, specs)
    num_bytes = sum(jax.tree.leaves(sharded))
    what = "gather parameters and reduce gradients" if layout.zero == 3 else "reduce gradients"
    raise UserError(
        f"zero{layout.zero} with stages and accumulate='shards' would {what} of {num_bytes:,} bytes in each of "
        f"{of_shard} microbatches: leave accumulate out, and this is done once a step"
    )


def _cropped(params: Any, model: LayeredModel | LossFn | None, layout: Layout) -> Any:
    """Parameters in the shapes that the optimizer sees."""
    specs = split_specs(model, layout)
    return params if specs is None else crop_vocabularies(params, specs)


def pad_params(params: Any, layout: Layout, other_specs: Any) -> Any:
    """The inverse of `_cropped`."""
    return jax.tree.map(lambda leaf, spec: pad(leaf, spec, layout.axis_sizes), params, other_specs)


def _shardings(state: TrainState, mesh: Mesh, layout: Layout, other_specs: Any) -> TrainState:
    return _on(mesh, state_specs(state, layout, other_specs))


def _on(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(functools.partial(NamedSharding, mesh), specs)


def _on_shards(params: Any, mesh: Mesh, specs: Any) -> Any:
    """Arrays that are computed in shards; those that these pad are cropped again."""

    def on_shards(leaf: jax.Array, spec: PartitionSpec) -> jax.Array:
        wide = jax.lax.with_sharding_constraint(pad(leaf, spec, mesh.shape), NamedSharding(mesh, spec))
        return crop(wide, leaf.shape)

    return jax.tree.map(on_shards, params, specs)


def _constrain(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def _place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """A copy of an array of which every process has the whole, on the devices."""
    if isinstance(leaf, jax.Array) and leaf.is_fully_addressable and not sharding.mesh.is_multi_process:
        return jax.device_put(leaf.copy(), sharding)
    array = np.asarray(leaf)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
