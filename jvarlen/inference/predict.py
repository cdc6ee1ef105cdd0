"""Results of a function for every sample, in planned shapes. Letters: N samples, M microbatches, B rows."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias, Unpack

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from jvarlen._common.checks import UserError, check_choices, list_first
from jvarlen._common.interrupts import remembered_interrupts
from jvarlen._common.pytree import program_key
from jvarlen._common.terminal import progress_bar, show_line
from jvarlen._common.types import Array, Batch, Microbatch, Params, PyTree
from jvarlen.batches.batches import arrays_by_name
from jvarlen.batches.fields import FieldAxes
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.data.measure import measure_lengths
from jvarlen.data.samples import AnyDataset, OnBadSample
from jvarlen.distributed.layout import MESH_AXES
from jvarlen.distributed.mesh import num_shards_of, replicate
from jvarlen.distributed.placement import LayoutLike, Placement, placement_of
from jvarlen.distributed.processes import is_interrupted_at
from jvarlen.inference.results import Results, TracedResults, trace_results
from jvarlen.loading.collate import CollateFn, is_builtin
from jvarlen.loading.loader import load
from jvarlen.loading.plan_source import PaddingRows
from jvarlen.planning.buckets import AnyBucket, Buckets, resolve_buckets
from jvarlen.planning.budget import Budget, PlanBudgetFields, takes_budget
from jvarlen.planning.lengths import PackedOverlong, as_array, check_sample_lengths
from jvarlen.planning.make_plan import make_plan
from jvarlen.planning.plan import Plan
from jvarlen.planning.rules import RowPacking, SamplesPerRow

__all__ = ["predict"]

ApplyFn: TypeAlias = Callable[[Params, Microbatch], PyTree]
_StepResults: TypeAlias = tuple[Array | None, PyTree]  # the ids of a batch, if it has them, and the results
_Step: TypeAlias = Callable[[Params, Batch], tuple[Params, _StepResults]]

_ALL = 2**62  # tokens, of all samples in one step
_DEFAULT_OPTIONS = CompileOptions()
# The programs of each plain function, as long as it lives, as `jax.jit` keeps them.
_kept: weakref.WeakKeyDictionary[types.FunctionType, dict[Hashable, _Programs]] = weakref.WeakKeyDictionary()


@takes_budget
def predict(
    apply_fn: ApplyFn,
    params: Params,
    dataset: AnyDataset,
    *,
    buckets: Buckets[AnyBucket] | Sequence[tuple[int, ...]] | None = None,
    samples_per_row: SamplesPerRow | None = None,
    lengths: npt.ArrayLike | None = None,
    layout: LayoutLike = None,
    axes: PyTree = None,
    packing: RowPacking = "padded",
    overlong: PackedOverlong = "error",
    fields: FieldAxes | None = None,
    collate: CollateFn | None = None,
    padding_rows: PaddingRows = "zeros",
    on_bad_sample: OnBadSample = "error",
    num_workers: int = 0,
    options: CompileOptions = _DEFAULT_OPTIONS,
    progress: bool = True,
    **budget: Unpack[PlanBudgetFields],
) -> list[PyTree]:
    """The results of a function for every sample, in the order of the dataset.

    Samples are planned, loaded and computed in a few static shapes, all compiled before the first step. Programs of a
    plain function are kept as long as it lives: a later call with it, with equal shapes and options, compiles nothing,
    and as with `jax.jit` it has the values that the function closed over when it was traced. Shapes are equal for the
    same lengths, in any order, and for any lengths where `buckets` gives them.

    Args:
      apply_fn: `apply_fn(params, microbatch)` gives an array or a pytree of arrays, each with the axes [rows, …] or
        [rows, positions, …]. The microbatch is that of a loss. For packed rows, results of samples have the axes [rows,
        samples of a row, …], as `microbatch.ids`, whose entry p is the sample of segment p + 1.
      params: pytree of arrays, such as a `TrainState`, as it lies on its layout. Arrays elsewhere than on the layout's
        mesh are replicated over it. Those on it keep their sharding: shards, as of ZeRO-3 and of stages, are gathered
        in every step, and other axes are left to the compiler.
      dataset: as for `load`.
      buckets: `Buckets`, whose M does not count, or (rows, length) pairs, as `make_plan` takes them with
        `tokens_per_step`: the shapes of microbatches. All are compiled, also those that no sample needs; with your
        `collate`, each needs a sample. None: they are chosen from the lengths by a budget, of which `max_tokens` must
        be given.
      samples_per_row: as for `make_plan`; None: as many as fit, so that shapes of packed rows follow from the lengths
        even in given buckets.
      lengths: integers[N] or [N, 2], the lengths of the samples; None: measured by `len`.
      layout: where to run, as for `make_train_step`. Devices along "data", "stage" and "context" compute different
        rows, each with all layers.
      axes: which axis of each result follows its rows: `"row"` for none, with one result a sample; `"length"` for
        positions, or with two lengths `"source"` or `"target"`. One word for all results, or a pytree of words such as
        `{"topic": "row", "tags": "length"}`. None: found from their shapes. The function is traced in a few more
        shapes, which also check given words, unless it accepts no others or your `collate` makes no others.
      packing: as for `make_plan`, without `"auto"`.
      overlong: as for `make_plan`. A dropped sample has the result None, a truncated one the result of what stays of
        it, and a split one the results of its chunks together, if they are of positions.
      fields: as for `load`.
      collate: as for `load`.
      padding_rows: as for `load`.
      on_bad_sample: as for `measure_lengths` and `load`. With `"skip"`, a bad sample has the result None, however many
        there are, and the first ones are shown with their reasons. It does not go with `collate`.
      num_workers: as for `load`.
      options: as for `compile_buckets`.
      progress: whether to show progress bars.
      budget: the fields of a `Budget` as keywords, to choose the buckets, except `num_microbatches`: each of these
        devices has one. With given buckets only `size`.

    Returns:
      N results, pytrees of NumPy arrays as `apply_fn` returns them, without the axis of rows; an axis of positions is
      as long as the sample. They may share memory. Every process must call this, and gets all results. An empty dataset
      gives an empty list.

    Raises:
      ValueError: arguments that are not as described; samples that are listed, as `make_plan` and `load` do, such as
        those that fit no given bucket; results
        that have other axes, or follow the shape of a batch in another way, as every second position does: they would
        hold padding.
      KeyboardInterrupt: Ctrl-C or SIGTERM came, in any process; the step that was running is finished.

    Example:
      >>> samples = [[5], [1, 2, 3], [4, 4]]
      >>> def double(params, batch):
      ...     return params * batch.tokens
      >>> predict(double, 2, samples, max_tokens=8, progress=False)
      [array([10], dtype=int32), array([2, 4, 6], dtype=int32), array([8, 8], dtype=int32)]
    """
    check_choices(packing=(packing, RowPacking))
    placement = placement_of(layout)
    num_microbatches = 1 if placement is None else num_shards_of(placement.mesh, _row_axes(placement))
    if "num_microbatches" in budget:
        raise UserError("predict takes no num_microbatches: each device that computes rows has one microbatch")
    bucketing = resolve_buckets(buckets, {**budget, "num_microbatches": num_microbatches})
    counts = [len(dataset)] if hasattr(dataset, "__len__") else []
    counts += [] if lengths is None else [as_array(lengths).size]
    if counts and not any(counts):
        return []
    if on_bad_sample == "skip" and collate is not None and not is_builtin(collate):
        raise UserError('on_bad_sample="skip" is for batches that the library collates: leave out collate=')
    with remembered_interrupts(), contextlib.ExitStack() as held:
        if lengths is None:
            lengths = measure_lengths(dataset, num_workers=num_workers, progress=progress, on_bad_sample=on_bad_sample)
        plan = _plan(lengths, bucketing, packing, overlong, samples_per_row)
        checked = check_sample_lengths(lengths)
        batches = load(
            plan, dataset, layout=placement, lengths=checked, num_workers=num_workers, fields=fields, collate=collate,
            padding_rows=padding_rows, on_bad_sample=on_bad_sample, max_bad_fraction=1.0,
        )  # fmt: skip
        held.callback(batches.close)
        params = jax.tree.map(lambda leaf: _place_leaf(leaf, placement), params)
        step = _make_step(apply_fn, placement)
        multiple = 1 if isinstance(bucketing, Buckets) else int(np.max(bucketing.length_multiple))
        programs = _programs(apply_fn, params, batches.shapes, options)
        if not programs.traced or (axes is None and len(programs.traced) <= len(programs.traced[0].sizes)):
            programs.traced = trace_results(step, params, batches.shapes, plan, multiple, collate, axes)
        results = Results(plan, checked, programs.traced, axes)
        if programs.compiled is None:
            shapes = batches.shapes.without_dataset()
            programs.compiled = compile_buckets(step, params, shapes, options=options, progress=progress)
        bar = progress_bar(batches, desc="predict", unit="step", progress=progress, total=plan.num_steps)
        _run_steps(programs.compiled, params, bar, results)
    if batches.skipped:
        listed = list_first((f"id {i}: {why}" for i, why in sorted({each[2:] for each in batches.skipped})), "; ")
        show_line(f"bad samples have the result None: {listed}", progress=progress)
    return results.by_sample()


def _plan(
    lengths: npt.ArrayLike,
    bucketing: Buckets[AnyBucket] | Budget,
    packing: RowPacking,
    overlong: PackedOverlong,
    samples_per_row: SamplesPerRow | None,
) -> Plan:
    """A plan of all samples; in given buckets, its steps are the groups of a single step, with the least padding."""
    if as_array(lengths).shape[1:] > (2,):
        raise UserError("predict takes samples of one or two lengths")
    plan = make_plan(
        lengths,
        bucketing,
        order="dataset",
        packing=packing,
        overlong=overlong,
        samples_per_row=samples_per_row,
        tokens_per_step=_ALL if isinstance(bucketing, Buckets) else None,
    )
    return dataclasses.replace(plan, step_groups=np.arange(plan.num_groups + 1))


def _run_steps(compiled: CompiledBuckets, params: Params, batches: Iterable[Batch], results: Results) -> None:
    """Computes all steps, and takes the results of each while the next one runs."""
    running: tuple[int, _StepResults] | None = None
    for number, batch in enumerate(batches):
        if is_interrupted_at(number):
            raise KeyboardInterrupt
        params, found = compiled(params, batch)
        for leaf in jax.tree.leaves(found):
            leaf.copy_to_host_async()
        if running is not None:
            results.add(*running)
        running = number, found
    if running is not None:
        results.add(*running)


def _place_leaf(leaf: Array, placement: Placement | None) -> Array:
    """Places an array of the parameters for a step."""
    sharding = getattr(leaf, "sharding", None)
    if placement is None:
        if sharding is not None and len(sharding.device_set) > 1:
            raise UserError(f"the parameters lie on {len(sharding.device_set)} devices: give the layout= of their step")
        return jax.device_put(leaf)
    is_there = isinstance(sharding, NamedSharding) and sharding.device_set == {*placement.mesh.devices.flat}
    return leaf if is_there else replicate(leaf, placement.mesh)


def _row_axes(placement: Placement) -> tuple[str, ...]:
    """The mesh axes whose devices compute different rows: all but "tensor"."""
    return tuple(placement.axes[name] for name in MESH_AXES[:-1] if name in placement.axes)


def _make_step(apply_fn: ApplyFn, placement: Placement | None) -> _Step:
    """A step for `compile_buckets`: the same parameters, and the ids of a batch, if it has them, with its results.

    Results are [M, B, …].
    """
    # Kept programs know the step, and would keep the function alive.
    apply = weakref.proxy(apply_fn) if isinstance(apply_fn, types.FunctionType) else apply_fn

    def run_shard(params: Params, batch: Batch) -> _StepResults:
        microbatch = jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, batch)
        found = (arrays_by_name(microbatch) or {}).get("ids"), apply(params, microbatch)
        return jax.tree.map(lambda leaf: leaf[None], found)

    def step(params: Params, batch: Batch) -> tuple[Params, _StepResults]:
        if placement is None:
            return params, run_shard(params, batch)
        mesh, of_rows = placement.mesh, PartitionSpec(_row_axes(placement))
        shards = jax.shard_map(
            run_shard,
            mesh=mesh,
            in_specs=(PartitionSpec(), jax.tree.map(lambda leaf: of_rows if leaf.ndim else PartitionSpec(), batch)),
            out_specs=of_rows,
            # Kernels such as cuDNN's cannot be compiled beside an axis of the compiler, even of one device.
            axis_names={*_row_axes(placement), *(name for name, size in mesh.shape.items() if size == 1)},
            check_vma=False,
        )
        results = shards(params, batch)
        if mesh.is_multi_process:  # so that each process has all
            results = jax.lax.with_sharding_constraint(results, NamedSharding(mesh, PartitionSpec()))
        return params, results

    step.__name__ = getattr(apply_fn, "__name__", "predict")
    return step


@dataclasses.dataclass
class _Programs:
    """The programs of a function for batches of certain shapes."""

    traced: Sequence[TracedResults] = ()
    compiled: CompiledBuckets | None = None


def _programs(apply_fn: ApplyFn, params: Params, shapes: BatchShapes, options: CompileOptions) -> _Programs:
    """The programs of an earlier call, if any, with the same settings of JAX."""
    kept = _kept.setdefault(apply_fn, {}) if isinstance(apply_fn, types.FunctionType) else {}
    specs = shapes.specs
    key = (*specs, *program_key((params, [*specs.values()])), shapes.placement, options)
    return kept.setdefault(key, _Programs())
