"""Results of a function for every sample of a dataset, in planned shapes.

Letters: N samples, n samples of the plan (of split ones, chunks), M microbatches, B rows, P samples of a row, T
positions, R rows of a step that hold samples.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.interrupts import remembered_interrupts
from jvarlen._common.progress import progress_bar
from jvarlen._common.pytree import leaves_by_name
from jvarlen.batches.fields import LENGTH_NAMES
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.data.measure import measure_lengths
from jvarlen.distributed.layout import MESH_AXES
from jvarlen.distributed.mesh import LayoutLike, Placement, num_shards_of, placement_of, replicate
from jvarlen.distributed.processes import is_interrupted_at
from jvarlen.loading.collate import CollateFn
from jvarlen.loading.fields import FieldAxes
from jvarlen.loading.loader import load
from jvarlen.loading.plan_source import PaddingRows
from jvarlen.planning.budget import Budget
from jvarlen.planning.lengths import PackedOverlong, check_lengths_for
from jvarlen.planning.packing import RowPacking
from jvarlen.planning.plan import Plan, make_plan

__all__ = ["predict"]

_DEFAULT_OPTIONS = CompileOptions()
_kept: weakref.WeakKeyDictionary[Any, dict[Hashable, CompiledBuckets]] = weakref.WeakKeyDictionary()


def predict(
    apply_fn: Callable[[Any, Any], Any],
    params: Any,
    dataset: Any,
    *,
    max_tokens: int,
    lengths: npt.ArrayLike | None = None,
    layout: LayoutLike = None,
    axes: Any = None,
    packing: RowPacking = "padded",
    overlong: PackedOverlong = "error",
    fields: FieldAxes | None = None,
    collate: CollateFn | None = None,
    padding_rows: PaddingRows = "zeros",
    num_workers: int = 0,
    options: CompileOptions = _DEFAULT_OPTIONS,
    progress: bool = True,
    **budget: Any,
) -> list[Any]:
    """What a function gives for every sample, in the order of the dataset.

    Samples are planned, loaded and computed in a few static shapes, all compiled before the first step. Programs of a
    plain function are kept as long as it lives: a later call with it, with equal shapes and options, compiles nothing,
    and as with `jax.jit` it has the values that the function closed over when it was traced.

    Args:
      apply_fn: `apply_fn(params, microbatch)` gives an array or a pytree of arrays, each with the axes [rows, …] or
        [rows, positions, …]. The microbatch is that of a loss. Of packed rows, which hold several samples, results of
        samples have the axes [rows, samples of a row, …], as `microbatch.ids`, of which entry p is that of segment p +
        1.
      params: pytree of arrays. What does not lie on the layout's mesh is replicated over it. What does keeps its
        sharding: shards, as of ZeRO-3 and of stages, are gathered in every step, and other axes are left to the
        compiler.
      dataset: as for `load`.
      max_tokens: budget of a microbatch in tokens, padding included.
      lengths: integers[N] or [N, 2], the lengths of the samples; None: measured by `len`.
      layout: where to run, as for `make_train_step`. Devices along "data", "stage" and "context" compute rows of their
        own, with all layers.
      axes: which axis of each result follows its rows: `"row"` for none, for one result a sample; `"length"` for
        positions, or of two lengths `"source"` or `"target"`. One word for all results, or a pytree of words such as
        `{"topic": "row", "tags": "length"}`. None: positions where the second axis of a result changes with the
        lengths of a bucket, for which the function is traced twice more, and `"row"` elsewhere.
      packing: as for `make_plan`, without `"auto"`.
      overlong: as for `make_plan`. A sample that is dropped has the result None, a truncated one that of its beginning,
        and a split one those of its chunks together, if they are of positions.
      fields: as for `load`.
      collate: as for `load`.
      padding_rows: as for `load`.
      num_workers: as for `load`.
      options: as for `compile_buckets`.
      progress: whether to show progress bars.
      budget: further fields of a `Budget` as keywords, but `microbatches_per_step`: each of these devices has one.

    Returns:
      N results, pytrees of NumPy arrays as `apply_fn` returns them, without the axis of rows; an axis of positions is
      as long as the sample. They may share memory. Of several processes, all must call this, and each gets all.

    Raises:
      ValueError: arguments that are not as described; samples that are listed, as `make_plan` and `load` do; results
        that have other axes, or differ between shapes.
      KeyboardInterrupt: Ctrl-C or SIGTERM came, in any process; the step that was running is finished.

    Example:
      >>> samples = [[5], [1, 2, 3], [4, 4]]
      >>> def doubled(params, batch):
      ...     return params * batch.tokens
      >>> predict(doubled, np.int32(2), samples, max_tokens=8, progress=False)
      [array([10], dtype=int32), array([2, 4, 6], dtype=int32), array([8, 8], dtype=int32)]
    """
    placement = placement_of(layout)
    num_microbatches = 1 if placement is None else num_shards_of(placement.mesh, _row_axes(placement))
    limits = Budget(max_tokens=max_tokens, microbatches_per_step=num_microbatches, **budget)
    with remembered_interrupts(), contextlib.ExitStack() as held:
        if lengths is None:
            lengths = measure_lengths(dataset, num_workers=num_workers, progress=progress)
        plan = make_plan(lengths, limits, order="dataset", packing=packing, overlong=overlong)
        checked = check_lengths_for(plan.buckets, lengths)
        loading: dict[str, Any] = {"fields": fields, "collate": collate, "padding_rows": padding_rows}
        batches = load(plan, dataset, layout=placement, lengths=checked, num_workers=num_workers, **loading)
        held.callback(batches.close)
        params = jax.tree.map(lambda leaf: _placed(leaf, placement), params)
        step = _make_step(apply_fn, placement)
        if axes is None:
            axes = _told_by_shapes(step, params, batches.shapes, plan, limits.length_multiple)
        compiled = _compile(step, apply_fn, params, batches.shapes, options, progress)
        results = _Results(plan, checked, axes)
        running: tuple[int, Any] | None = None  # the step before, which the device has computed by then
        bar = progress_bar(batches, desc="predict", unit="step", progress=progress, total=plan.num_steps)
        for number, batch in enumerate(bar):
            if is_interrupted_at(number):
                raise KeyboardInterrupt
            params, of_step = compiled(params, batch)
            for leaf in jax.tree.leaves(of_step):
                leaf.copy_to_host_async()
            if running is not None:
                results.add(*running)
            running = number, of_step
        if running is not None:
            results.add(*running)
    return results.by_sample()


def _placed(leaf: Any, placement: Placement | None) -> Any:
    """An array of the parameters where a step takes it."""
    if placement is None:
        return jax.device_put(leaf)
    sharding = getattr(leaf, "sharding", None)
    is_there = isinstance(sharding, NamedSharding) and sharding.device_set == {*placement.mesh.devices.flat}
    return leaf if is_there else replicate(leaf, placement.mesh)


def _row_axes(placement: Placement) -> tuple[str, ...]:
    """The axes of the mesh whose devices compute rows of their own: all but "tensor"."""
    return tuple(placement.axes[name] for name in MESH_AXES[:-1] if name in placement.axes)


def _make_step(apply_fn: Callable[[Any, Any], Any], placement: Placement | None) -> Callable[[Any, Any], Any]:
    """A step for `compile_buckets`: the same parameters, and results [M, B, …]."""
    # Kept programs know the step, and would keep the function alive.
    apply = weakref.proxy(apply_fn) if isinstance(apply_fn, types.FunctionType) else apply_fn

    def of_shard(params: Any, batch: Any) -> Any:
        microbatch = jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, batch)
        return jax.tree.map(lambda leaf: leaf[None], apply(params, microbatch))

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        if placement is None:
            return params, of_shard(params, batch)
        mesh, of_rows = placement.mesh, PartitionSpec(_row_axes(placement))
        shards = jax.shard_map(
            of_shard,
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


def _told_by_shapes(
    step: Callable[[Any, Any], Any], params: Any, shapes: BatchShapes, plan: Plan, multiple: int
) -> Any:
    """The word of each result, by its shapes in two buckets: which length its second axis follows, or `"row"`."""
    bucket, names = shapes.buckets[-1], LENGTH_NAMES[len(shapes.buckets[-1].lengths) - 1]
    lengths = np.array(bucket.lengths)
    change = multiple * np.arange(1, 1 + len(lengths))  # of two lengths, not the same of both
    # A longer packed row is longer than the most samples of a row.
    made = np.where((lengths > change) & (not plan.is_packed), lengths - change, lengths + change)
    # Of a collate function of one's own only planned batches are known.
    planned = [] if len(names) == 2 or plan.is_packed else [each for each in shapes.buckets if each != bucket]
    other = [*planned, type(bucket)(bucket.rows, *made.tolist())][0]
    try:
        (_, results), (_, of_other) = (jax.eval_shape(step, params, shapes.spec(each)) for each in (bucket, other))
    except Exception as error:
        error.add_note(f"while the axes of results were told by their shapes in {bucket} and {other}: axes= says them")
        raise
    word_of = dict(zip(zip(bucket.lengths, other.lengths, strict=True), names, strict=True))
    return jax.tree.map(lambda leaf, like: word_of.get((*leaf.shape[2:3], *like.shape[2:3]), "row"), results, of_other)


def _compile(
    step: Callable[[Any, Any], Any],
    apply_fn: Callable[[Any, Any], Any],
    params: Any,
    shapes: BatchShapes,
    options: CompileOptions,
    progress: bool,
) -> CompiledBuckets:
    """The programs of all buckets, or those of an earlier call; as for `jax.jit`, settings of JAX tell them apart."""
    kept = _kept.setdefault(apply_fn, {}) if isinstance(apply_fn, types.FunctionType) else {}
    specs = shapes.specs
    arrays, structure = jax.tree.flatten((jax.eval_shape(lambda params: params, params), list(specs.values())))
    lie = () if shapes.placement is None else tuple(leaf.sharding for leaf in jax.tree.leaves(params))
    settings = [getattr(jax.config, f"jax_{name}") for name in ("enable_x64", "default_matmul_precision")]
    key = (*specs, *arrays, structure, lie, shapes.placement, options, *settings)
    if key not in kept:
        own = BatchShapes(  # without the dataset
            tuple(specs),
            microbatches_per_step=shapes.microbatches_per_step,
            layout=shapes.placement,
            batch_spec=lambda bucket, _: specs[bucket],
        )
        kept[key] = compile_buckets(step, params, own, options=options, progress=progress)
    return kept[key]


class _Axis:
    """Where what an axis of results holds belongs: of each sample one entry, or as many as it has positions."""

    def __init__(self, plan: Plan, planned: Int64[np.ndarray, " n"], sizes: Int64[np.ndarray, " N"]):
        self._plan = plan
        self._planned = planned
        self.offsets = np.append(0, np.cumsum(sizes))  # int64[N+1]: the entries before each sample, in its order
        self._begins = self.offsets[plan.sample_ids]
        if plan.piece_starts is not None:
            self._begins += plan.piece_starts

    def of_step(self, step: int) -> tuple[Int64[np.ndarray, " R"], Int64[np.ndarray, " entries"]]:
        """How many entries each row of a step has, and their places among those of all samples."""
        plan = self._plan
        start, stop = plan.step_offsets[step : step + 2]
        planned = self._planned[start:stop]
        before = np.cumsum(planned) - planned
        places = np.repeat(self._begins[start:stop] - before, planned) + np.arange(planned.sum())
        if plan.row_offsets is None:
            return planned, places
        first, last = np.searchsorted(plan.row_offsets, [start, stop])
        return np.add.reduceat(planned, plan.row_offsets[first:last] - start), places


class _Results:
    """The results of all samples, as steps give them."""

    def __init__(self, plan: Plan, lengths: Int64[np.ndarray, " N *sides"], axes: Any):
        self._plan, self._axes = plan, axes
        self._num_samples = num_samples = len(lengths)
        self._words: list[str] = []
        self._arrays: list[np.ndarray] = []  # of each result: entries of one sample after the other
        self._structure: Any = None
        self._of_word: dict[str, _Axis] = {}
        if plan.piece_starts is None:
            ones = np.ones(num_samples, np.int64)
            self._of_word["row"] = _Axis(plan, ones[: plan.num_samples], ones)
        planned = plan.planned_lengths(lengths)
        of_sides = planned.reshape(len(planned), -1).T
        for word, of_side in zip(LENGTH_NAMES[len(of_sides) - 1], of_sides, strict=True):
            sizes = np.zeros(num_samples, np.int64)
            np.add.at(sizes, plan.sample_ids, of_side)
            self._of_word[word] = _Axis(plan, of_side, sizes)

    def add(self, step: int, results: Any) -> None:
        """Takes the results of a step, [M, B, …], once they are on the host."""
        plan = self._plan
        of_bucket = int(plan.step_bucket[step])
        bucket = plan.buckets[of_bucket]
        sizes = dict(zip(LENGTH_NAMES[len(bucket.lengths) - 1], bucket.lengths, strict=True))
        if self._structure is None:
            self._structure = jax.tree.structure(results)
            self._words = self._words_of(results)
        places = {word: self._of_word[word].of_step(step) for word in {*self._words}}
        values = map(np.asarray, jax.tree.leaves(results))
        for i, (word, array) in enumerate(zip(self._words, values, strict=True)):
            size = sizes.get(word, plan.samples_per_row[of_bucket])  # of samples, 1 where nothing is packed
            leading = (plan.microbatches_per_step, bucket.rows, *([size] if word in sizes or plan.is_packed else []))
            of_entry = array.shape[len(leading) :]
            if i == len(self._arrays):
                self._arrays.append(np.empty((self._of_word[word].offsets[-1], *of_entry), array.dtype))
            if array.shape != (*leading, *self._arrays[i].shape[1:]):
                name = [*leaves_by_name(results)][i]
                raise UserError(
                    f"the result {name} of axes {word!r} is {list(array.shape[1:])} in {bucket}, and not "
                    f"{[*leading[1:], *self._arrays[i].shape[1:]]}, by its bucket and by earlier ones"
                )
            counts, at = places[word]
            rows = array.swapaxes(0, 1).reshape(-1, size, *of_entry)  # in the plan's order
            self._arrays[i][at] = rows[: len(counts)][np.arange(rows.shape[1]) < counts[:, None]]

    def _words_of(self, results: Any) -> list[str]:
        """The word of each result, of a prefix of their tree."""
        try:
            words = jax.tree.map(lambda word, each: jax.tree.map(lambda _: word, each), self._axes, results)
        except ValueError as error:
            raise UserError(f"axes= must be a word, or words in the tree of the results: {error}") from error
        found = jax.tree.leaves(words)
        if wrong := [repr(word) for word in found if word not in self._of_word]:
            split = ": no sample has one result where the plan splits them" * (self._plan.piece_starts is not None)
            raise UserError(f"axes are of {', '.join(map(repr, self._of_word))}, not {list_first(wrong)}{split}")
        return found

    def by_sample(self) -> list[Any]:
        """The result of each sample."""
        columns = []
        for word, array in zip(self._words, self._arrays, strict=True):
            offsets = self._of_word[word].offsets.tolist()
            columns.append([*array] if word == "row" else [array[i:k] for i, k in itertools.pairwise(offsets)])
        if jax.tree_util.treedef_is_leaf(self._structure):
            (found,) = columns
        else:
            found = [self._structure.unflatten(leaves) for leaves in zip(*columns, strict=True)]
        if self._plan.num_dropped:
            for i in np.flatnonzero(np.bincount(self._plan.sample_ids, minlength=self._num_samples) == 0).tolist():
                found[i] = None
        return found
