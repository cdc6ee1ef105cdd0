"""Results of a function for every sample of a dataset, in planned shapes.

Letters: N samples, n samples of the plan (of split ones, chunks), M microbatches, B rows, P samples of a row, T
positions, R rows of a step that hold samples.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_choices, list_first
from jvarlen._common.interrupts import remembered_interrupts
from jvarlen._common.pytree import leaves_by_name
from jvarlen._common.terminal import progress_bar, show_line
from jvarlen.batches.batches import arrays_by_name
from jvarlen.batches.fields import LENGTH_NAMES
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.data.measure import measure_lengths
from jvarlen.data.samples import OnBadSample
from jvarlen.distributed.layout import MESH_AXES
from jvarlen.distributed.mesh import num_shards_of, replicate
from jvarlen.distributed.placement import LayoutLike, Placement, placement_of
from jvarlen.distributed.processes import is_interrupted_at
from jvarlen.loading.collate import CollateFn, is_own
from jvarlen.loading.fields import FieldAxes
from jvarlen.loading.loader import load
from jvarlen.loading.plan_source import PaddingRows
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.budget import Budget, takes_budget
from jvarlen.planning.lengths import PackedOverlong, as_array, check_lengths_for
from jvarlen.planning.packing import RowPacking
from jvarlen.planning.plan import Plan, make_plan

__all__ = ["predict"]

_DEFAULT_OPTIONS = CompileOptions()
_kept: weakref.WeakKeyDictionary[Any, dict[Hashable, _Programs]] = weakref.WeakKeyDictionary()


@takes_budget
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
    on_bad_sample: OnBadSample = "error",
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
        `{"topic": "row", "tags": "length"}`. None: as their shapes tell. The function is traced in a few more shapes,
        by which words are checked as well, unless it takes no others, or a `collate` of your own tells of none.
      packing: as for `make_plan`, without `"auto"`.
      overlong: as for `make_plan`. A sample that is dropped has the result None, a truncated one that of its beginning,
        and a split one those of its chunks together, if they are of positions.
      fields: as for `load`.
      collate: as for `load`.
      padding_rows: as for `load`.
      on_bad_sample: as for `measure_lengths` and `load`. With `"skip"`, a bad sample has the result None, however many
        there are, and the first ones are shown with their reasons. Not for a `collate` of your own.
      num_workers: as for `load`.
      options: as for `compile_buckets`.
      progress: whether to show progress bars.
      budget: further fields of a `Budget` as keywords, but `num_microbatches`: each of these devices has one.

    Returns:
      N results, pytrees of NumPy arrays as `apply_fn` returns them, without the axis of rows; an axis of positions is
      as long as the sample. They may share memory. Every process must call this, and gets all results. An empty dataset
      gives an empty list.

    Raises:
      ValueError: arguments that are not as described; samples that are listed, as `make_plan` and `load` do; results
        that have other axes, or follow the shape of a batch in another way, as every second position does: they would
        hold padding.
      KeyboardInterrupt: Ctrl-C or SIGTERM came, in any process; the step that was running is finished.

    Example:
      >>> samples = [[5], [1, 2, 3], [4, 4]]
      >>> def doubled(params, batch):
      ...     return params * batch.tokens
      >>> predict(doubled, np.int32(2), samples, max_tokens=8, progress=False)
      [array([10], dtype=int32), array([2, 4, 6], dtype=int32), array([8, 8], dtype=int32)]
    """
    check_choices(packing=(packing, RowPacking))
    placement = placement_of(layout)
    num_microbatches = 1 if placement is None else num_shards_of(placement.mesh, _row_axes(placement))
    limits = Budget(max_tokens=max_tokens, num_microbatches=num_microbatches, **budget)
    counts = [len(dataset)] if hasattr(dataset, "__len__") else []
    counts += [] if lengths is None else [as_array(lengths).size]
    if counts and not any(counts):
        return []
    if on_bad_sample == "skip" and collate is not None and not is_own(collate):
        raise UserError('on_bad_sample="skip" is for batches that the library collates: leave out collate=')
    with remembered_interrupts(), contextlib.ExitStack() as held:
        if lengths is None:
            lengths = measure_lengths(dataset, num_workers=num_workers, progress=progress, on_bad_sample=on_bad_sample)
        plan = make_plan(lengths, limits, order="dataset", packing=packing, overlong=overlong)
        checked = check_lengths_for(plan.buckets.shapes, lengths)
        batches = load(
            plan, dataset, layout=placement, lengths=checked, num_workers=num_workers, fields=fields, collate=collate,
            padding_rows=padding_rows, on_bad_sample=on_bad_sample, max_bad_fraction=1.0,
        )  # fmt: skip
        held.callback(batches.close)
        params = jax.tree.map(lambda leaf: _placed(leaf, placement), params)
        step = _make_step(apply_fn, placement)
        programs = _programs(apply_fn, params, batches.shapes, options)
        if not programs.traced or (axes is None and len(programs.traced) <= len(programs.traced[0].sizes)):
            programs.traced = _trace(step, params, batches.shapes, plan, limits, collate, axes)
        results = _Results(plan, checked, programs.traced, axes)
        if programs.compiled is None:
            programs.compiled = _compile(step, params, batches.shapes, options, progress)
        running: tuple[int, Any] | None = None  # the step before, which the device has computed by then
        bar = progress_bar(batches, desc="predict", unit="step", progress=progress, total=plan.num_steps)
        for number, batch in enumerate(bar):
            if is_interrupted_at(number):
                raise KeyboardInterrupt
            params, of_step = programs.compiled(params, batch)
            for leaf in jax.tree.leaves(of_step):
                leaf.copy_to_host_async()
            if running is not None:
                results.add(*running)
            running = number, of_step
        if running is not None:
            results.add(*running)
    if batches.skipped:
        listed = list_first((f"id {i}: {why}" for i, why in sorted({each[2:] for each in batches.skipped})), "; ")
        show_line(f"bad samples have the result None: {listed}", progress=progress)
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
    """A step for `compile_buckets`: the same parameters, and the ids of a batch, if it has them, with its results.

    Results are [M, B, …].
    """
    # Kept programs know the step, and would keep the function alive.
    apply = weakref.proxy(apply_fn) if isinstance(apply_fn, types.FunctionType) else apply_fn

    def of_shard(params: Any, batch: Any) -> Any:
        microbatch = jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, batch)
        found = (arrays_by_name(microbatch) or {}).get("ids"), apply(params, microbatch)
        return jax.tree.map(lambda leaf: leaf[None], found)

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


class _Traced(NamedTuple):
    """The shapes of results for batches of one shape."""

    bucket: AnyBucket
    sizes: dict[str, int]  # that axes of results may follow: "rows", lengths by name, of packed rows samples as "row"
    results: Any  # pytree of jax.ShapeDtypeStruct

    def expected(self, shape: tuple[int, ...], word: str) -> tuple[int, ...]:
        """The shape of a result of this word, which has the shape elsewhere."""
        own = [self.sizes[name] for name in ("rows", word) if name in self.sizes]
        return (*shape[:1], *own, *shape[1 + len(own) :])

    def __str__(self) -> str:
        return f"{self.bucket}" + (f" of {self.sizes['row']} samples a row" if "row" in self.sizes else "")


def _trace(
    step: Callable[[Any, Any], Any],
    params: Any,
    shapes: BatchShapes,
    plan: Plan,
    limits: Budget,
    collate: CollateFn | None,
    axes: Any,
) -> list[_Traced]:
    """The results in the longest bucket, and where each of its sizes is another.

    If axes are given, sizes are left out for which the function accepts no other value. Where batches come from a
    collate function of the user, only the sizes of planned buckets are tried: another bucket, if there is one.
    """
    of_library = collate is None or is_own(collate)
    names, of_plan = LENGTH_NAMES[len(plan.buckets.shapes[-1].lengths) - 1], cast("Any", shapes.batch_spec)

    def traced(bucket: AnyBucket, samples_per_row: int) -> _Traced:
        batches = shapes
        sizes = {"rows": bucket.rows, **dict(zip(names, bucket.lengths, strict=True))}
        if plan.is_packed:
            sizes["row"] = samples_per_row
            if of_library:
                spec: Any = functools.partial(of_plan, samples_per_row=samples_per_row)
                batches = dataclasses.replace(shapes, batch_spec=spec)
        return _Traced(bucket, sizes, jax.eval_shape(step, params, batches.spec(bucket))[1][1])

    longest = traced(plan.buckets.shapes[-1], plan.samples_per_row[-1])
    if not of_library:
        if axes is None and len(plan.buckets.shapes) == 1:
            raise UserError(
                f"all batches are {longest}, and only your collate function knows others, by which axes of results "
                "could be told: axes= says them"
            )
        return [longest, *map(traced, plan.buckets.shapes[-2:-1], plan.samples_per_row[-2:-1])]
    found = [longest]
    for name, size in longest.sizes.items():
        others = [2 * size or 1]
        if name in names:  # the half first: tables of positions may end
            half = size // 2 // limits.length_multiple * limits.length_multiple
            others = [half, *others] if half > 1 else others
        for other in others:
            rows, *lengths = ({**longest.sizes, name: other}[each] for each in ("rows", *names))
            bucket = type(longest.bucket)(rows, *lengths)
            try:
                found.append(traced(bucket, other if name == "row" else plan.samples_per_row[-1]))
                break
            except Exception as error:
                failed = error
        else:
            if axes is None:
                failed.add_note(f"while the axes of results were told by their shapes in {bucket}: axes= says them")
                raise failed
    return found


@dataclasses.dataclass
class _Programs:
    """What is kept of a function, for batches of the same shapes."""

    traced: Sequence[_Traced] = ()
    compiled: CompiledBuckets | None = None


def _programs(apply_fn: Any, params: Any, shapes: BatchShapes, options: CompileOptions) -> _Programs:
    """The programs of an earlier call, or none yet; as for `jax.jit`, settings of JAX tell them apart."""
    kept = _kept.setdefault(apply_fn, {}) if isinstance(apply_fn, types.FunctionType) else {}
    specs = shapes.specs
    arrays, structure = jax.tree.flatten((jax.eval_shape(lambda params: params, params), list(specs.values())))
    lie = () if shapes.placement is None else tuple(leaf.sharding for leaf in jax.tree.leaves(params))
    settings = [getattr(jax.config, f"jax_{name}") for name in ("enable_x64", "default_matmul_precision")]
    key = (*specs, *arrays, structure, lie, shapes.placement, options, *settings)
    return kept.setdefault(key, _Programs())


def _compile(
    step: Callable[[Any, Any], Any], params: Any, shapes: BatchShapes, options: CompileOptions, progress: bool
) -> CompiledBuckets:
    """The programs of all buckets."""
    specs = shapes.specs
    own = BatchShapes(  # without the dataset
        tuple(specs),
        num_microbatches=shapes.num_microbatches,
        layout=shapes.placement,
        batch_spec=lambda bucket, _: specs[bucket],
    )
    return compile_buckets(step, params, own, options=options, progress=progress)


def _words_of(traced: Sequence[_Traced], axes: Any, known: Sequence[str], split: str) -> list[str]:
    """The word of each result; raises ValueError for those that follow the shape of a batch in another way."""
    results, lengths = leaves_by_name(traced[0].results), LENGTH_NAMES[len(traced[0].bucket.lengths) - 1]
    if not results:
        raise UserError("the function returns no array, which would be the result of a sample")
    given: Sequence[Any] = [None] * len(results)
    if axes is not None:
        try:
            words = jax.tree.map(lambda word, each: jax.tree.map(lambda _: word, each), axes, traced[0].results)
        except ValueError as error:
            raise UserError(f"axes= must be a word, or words in the tree of the results: {error}") from error
        given = jax.tree.leaves(words)
    found, problems = [], []
    of_results = zip(*([leaf.shape for leaf in jax.tree.leaves(each.results)] for each in traced), strict=True)
    for name, word, shapes in zip(results, given, of_results, strict=True):
        fitting = [
            choice
            for choice in ([*lengths, "row"] if word is None else [word])
            if all(shape == each.expected(shapes[0], choice) for shape, each in zip(shapes, traced, strict=True))
        ]
        found.append(fitting[0] if fitting else word)
        if not fitting:
            shown = ", ".join(f"{[*shape[1:]]} in {each}" for shape, each in zip(shapes, traced, strict=True))
            of_axes = "" if word is None else f" of axes {word!r}"
            problems.append(f"the result{name and f' {name}'}{of_axes} is {shown}")
    if wrong := [repr(word) for word in found if word is not None and word not in known]:
        raise UserError(f"axes are of {', '.join(map(repr, known))}, not {list_first(wrong)}{split}")
    if problems:
        raise UserError(
            f"results have other axes than samples: {list_first(problems, '; ')}. Beside the first axis, of rows, only "
            f"a second one as long as the batch (axes {' or '.join(map(repr, lengths))}) may follow its shape, and is "
            "cut to each sample; others would hold padding. Return that length, or a fixed size"
        )
    return found


class _Axis:
    """Where what an axis of results holds belongs: of each sample one entry, or as many as it has positions."""

    def __init__(self, plan: Plan, planned: Int64[np.ndarray, " n"], sizes: Int64[np.ndarray, " N"]):
        self._planned = planned
        self.offsets = np.append(0, np.cumsum(sizes))  # int64[N+1]: the entries before each sample, in its order
        self._begins = self.offsets[plan.sample_ids]
        if plan.chunk_starts is not None:
            self._begins += plan.chunk_starts

    def of_rows(
        self, samples: Int64[np.ndarray, " n"], row_of: Int64[np.ndarray, " n"], num_rows: int
    ) -> tuple[Int64[np.ndarray, " R"], Int64[np.ndarray, " entries"]]:
        """How many entries each row has, and their places among those of all samples.

        Samples are by their places in the plan, in the order of their rows.
        """
        planned = self._planned[samples]
        before = np.cumsum(planned) - planned
        places = np.repeat(self._begins[samples] - before, planned) + np.arange(planned.sum())
        return np.bincount(row_of, planned, num_rows).astype(np.int64), places


class _Results:
    """The results of all samples, as steps give them."""

    def __init__(self, plan: Plan, lengths: Int64[np.ndarray, " N *sides"], traced: Sequence[_Traced], axes: Any):
        self._plan = plan
        self._num_samples = num_samples = len(lengths)
        self._arrays: list[np.ndarray] = []  # of each result: entries of one sample after the other
        self._structure: Any = jax.tree.structure(traced[0].results)
        self._of_word: dict[str, _Axis] = {}
        if plan.chunk_starts is None:
            ones = np.ones(num_samples, np.int64)
            self._of_word["row"] = _Axis(plan, ones[: plan.num_samples], ones)
        planned = plan.planned_lengths(lengths)
        of_sides = planned.reshape(len(planned), -1).T
        for word, of_side in zip(LENGTH_NAMES[len(of_sides) - 1], of_sides, strict=True):
            sizes = np.zeros(num_samples, np.int64)
            np.add.at(sizes, plan.sample_ids, of_side)
            self._of_word[word] = _Axis(plan, of_side, sizes)
        split = ": no sample has one result where the plan splits them" * (plan.chunk_starts is not None)
        self._words = _words_of(traced, axes, [*self._of_word], split)
        self._are_without = np.bincount(plan.sample_ids, minlength=num_samples) == 0  # dropped or, later, bad

    def add(self, step: int, of_step: tuple[Any, Any]) -> None:
        """Takes the ids of a step and its results, [M, B, …], once they are on the host."""
        ids, results = of_step
        plan = self._plan
        of_bucket = int(plan.step_bucket[step])
        bucket = plan.buckets.shapes[of_bucket]
        sizes = dict(zip(LENGTH_NAMES[len(bucket.lengths) - 1], bucket.lengths, strict=True))
        numbers = self._laid_out(step, ids)
        row_of, _ = np.nonzero(numbers >= 0)
        places = {
            word: self._of_word[word].of_rows(numbers[numbers >= 0], row_of, len(numbers)) for word in {*self._words}
        }
        values = map(np.asarray, jax.tree.leaves(results))
        for i, (word, array) in enumerate(zip(self._words, values, strict=True)):
            size = sizes.get(word, plan.samples_per_row[of_bucket])  # of samples, 1 where nothing is packed
            leading = (plan.num_microbatches, bucket.rows, *([size] if word in sizes or plan.is_packed else []))
            of_entry = array.shape[len(leading) :]
            if i == len(self._arrays):
                self._arrays.append(np.empty((self._of_word[word].offsets[-1], *of_entry), array.dtype))
            if array.shape != (*leading, *self._arrays[i].shape[1:]):
                name = [*leaves_by_name(results)][i]
                raise UserError(
                    f"the result{name and f' {name}'} of axes {word!r} is {list(array.shape[1:])} in {bucket}, and not "
                    f"{[*leading[1:], *self._arrays[i].shape[1:]]}, by its bucket and by earlier ones"
                )
            counts, at = places[word]
            rows = array.swapaxes(0, 1).reshape(-1, size, *of_entry)  # in the plan's order
            self._arrays[i][at] = rows[np.arange(rows.shape[1]) < counts[:, None]]

    def _laid_out(self, step: int, ids: Any) -> Int64[np.ndarray, "rows P"]:
        """The places in the plan of the samples of each row, in the plan's order, −1 where there is none.

        Without its bad samples, the later ones of a microbatch have moved up.
        """
        start, stop = self._plan.step_offsets[step : step + 2]
        planned_MxBxP = self._plan.rows(step)
        planned_MxBxP = planned_MxBxP.reshape(*planned_MxBxP.shape[:2], -1)
        numbers_BxMxP = np.full_like(planned_MxBxP.swapaxes(0, 1), -1)
        numbers_BxMxP[planned_MxBxP.swapaxes(0, 1) >= 0] = np.arange(start, stop)
        if ids is not None and np.count_nonzero((ids := np.asarray(ids)) >= 0) < stop - start:
            planned, numbers_BxMxP = numbers_BxMxP, np.full((ids.shape[1], ids.shape[0], ids[0, 0].size), -1)
            for m, ids_BxP in enumerate(ids.reshape(*ids.shape[:2], -1)):
                left = planned[:, m][planned[:, m] >= 0]
                kept = _subsequence(self._plan.sample_ids[left].tolist(), ids_BxP[ids_BxP >= 0].tolist())
                numbers_BxMxP[:, m][ids_BxP >= 0] = left[kept]
                self._are_without[self._plan.sample_ids[np.delete(left, kept)]] = True
        return numbers_BxMxP.reshape(-1, numbers_BxMxP.shape[2])

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
        for i in np.flatnonzero(self._are_without).tolist():
            found[i] = None
        return found


def _subsequence(whole: list[int], part: list[int]) -> list[int]:
    """Where the values of a part are in the whole, in the same order."""
    places, place = [], -1
    for value in part:
        place = whole.index(value, place + 1)
        places.append(place)
    return places
