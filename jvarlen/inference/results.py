"""The results of every sample: which axes of results follow the batch, and where each row's results belong.

Letters: N samples, n samples of the plan (of split ones, chunks), M microbatches, B rows, P samples of a row, R rows of
a step that hold samples.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import leaves_by_name
from jvarlen._common.types import Array, Params, PyTree, Shapes
from jvarlen.batches.fields import LENGTH_NAMES
from jvarlen.batches.shapes import BatchShapes, BatchSpec
from jvarlen.loading.collate import CollateFn, is_builtin
from jvarlen.planning.buckets import AnyBucket, bucket_of
from jvarlen.planning.plan import Plan

__all__ = ["Results", "TracedResults", "trace_results"]


class TracedResults(NamedTuple):
    """The shapes of results for batches of one shape."""

    bucket: AnyBucket
    sizes: dict[str, int]  # that axes may follow: "rows", lengths by name, and "row", samples per packed row
    results: Shapes

    def expected(self, shape: tuple[int, ...], word: str) -> tuple[int, ...]:
        """The shape of a result whose axes follow this word, from its shape in another bucket."""
        leading = [self.sizes[name] for name in ("rows", word) if name in self.sizes]
        return (*shape[:1], *leading, *shape[1 + len(leading) :])

    def __str__(self) -> str:
        return f"{self.bucket}" + (f" of {self.sizes['row']} samples a row" if "row" in self.sizes else "")


def trace_results(
    step: Callable[[Params, PyTree], tuple[Params, tuple[Array | None, PyTree]]],
    params: Params,
    shapes: BatchShapes,
    plan: Plan,
    length_multiple: int,
    collate: CollateFn | None,
    axes: PyTree,
) -> list[TracedResults]:
    """Traces the results in the longest bucket, and in buckets that differ from it in one size.

    If axes are given, sizes are left out for which the function accepts no other value. Where batches come from a
    collate function of the user, only the sizes of planned buckets are tried: another bucket, if there is one.
    """
    of_library = collate is None or is_builtin(collate)
    names, plan_spec = LENGTH_NAMES[len(plan.buckets.shapes[-1].lengths) - 1], cast("BatchSpec", shapes.batch_spec)

    def traced(bucket: AnyBucket, samples_per_row: int) -> TracedResults:
        batches = shapes
        sizes = {"rows": bucket.rows, **dict(zip(names, bucket.lengths, strict=True))}
        if plan.is_packed:
            sizes["row"] = samples_per_row
            if of_library:
                spec = functools.partial(plan_spec, samples_per_row=samples_per_row)
                batches = dataclasses.replace(shapes, batch_spec=spec)
        return TracedResults(bucket, sizes, jax.eval_shape(step, params, batches.spec(bucket))[1][1])

    longest = traced(plan.buckets.shapes[-1], plan.samples_per_row[-1])
    if not of_library:
        if axes is None and len(plan.buckets.shapes) == 1:
            raise UserError(
                f"all batches are {longest}, and only your collate function knows others, which would show the axes of "
                "results: give axes="
            )
        return [longest, *map(traced, plan.buckets.shapes[-2:-1], plan.samples_per_row[-2:-1])]
    found = [longest]
    for name, size in longest.sizes.items():
        others = [2 * size or 1]
        if name in names:  # the half first: tables of positions may end
            half = size // 2 // length_multiple * length_multiple
            others = [half, *others] if half > 1 else others
        for other in others:
            rows, *lengths = ({**longest.sizes, name: other}[each] for each in ("rows", *names))
            bucket = bucket_of(rows, *lengths)
            try:
                found.append(traced(bucket, other if name == "row" else plan.samples_per_row[-1]))
                break
            except Exception as error:
                failed = error
        else:
            if axes is None:
                failed.add_note(f"while finding the axes of results by their shapes in {bucket}: axes= says them")
                raise failed
    return found


def _words_of(traced: Sequence[TracedResults], axes: PyTree, known: Sequence[str], split: str) -> list[str]:
    """The word of each result; raises ValueError for those that follow the shape of a batch in another way."""
    results, lengths = leaves_by_name(traced[0].results), LENGTH_NAMES[len(traced[0].bucket.lengths) - 1]
    if not results:
        raise UserError("the function returns no array, which would be the result of a sample")
    given: Sequence[str | None] = [None] * len(results)
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
        found.append(fitting[0] if fitting else word or lengths[0])
        if not fitting:
            shown = ", ".join(f"{[*shape[1:]]} in {each}" for shape, each in zip(shapes, traced, strict=True))
            of_axes = "" if word is None else f" of axes {word!r}"
            problems.append(f"the result{name and f' {name}'}{of_axes} is {shown}")
    if wrong := [repr(word) for word in found if word not in known]:
        any_names = ", whatever fields= call the lengths" * (len(lengths) > 1)
        raise UserError(f"axes are of {', '.join(map(repr, known))}{any_names}, not {list_first(wrong)}{split}")
    if problems:
        raise UserError(
            f"results have other axes than samples: {list_first(problems, '; ')}. Beside the first axis, of rows, only "
            f"a second one as long as the batch (axes {' or '.join(map(repr, lengths))}) may follow its shape, and is "
            "cut to each sample; others would hold padding. Return that length, or a fixed size"
        )
    return found


class _Axis:
    """The places of an axis's entries: one for each sample, or one for each of its positions."""

    def __init__(self, plan: Plan, planned: Int64[np.ndarray, " n"], sizes: Int64[np.ndarray, " N"]):
        self._planned = planned
        self.offsets = np.append(0, np.cumsum(sizes))  # int64[N+1]: the entries before each sample, in its order
        self._begins = self.offsets[plan.sample_ids]
        if plan.is_split:
            self._begins += plan.chunk_starts

    def of_rows(
        self, samples: Int64[np.ndarray, " n"], row_of: Int64[np.ndarray, " n"], num_rows: int
    ) -> tuple[Int64[np.ndarray, " R"], Int64[np.ndarray, " entries"]]:
        """How many entries each row has, and their places among the entries of all samples.

        Samples are by their places in the plan, in the order of their rows.
        """
        planned = self._planned[samples]
        before = np.cumsum(planned) - planned
        places = np.repeat(self._begins[samples] - before, planned) + np.arange(planned.sum())
        return np.bincount(row_of, planned, num_rows).astype(np.int64), places


class Results:
    """The results of all samples, as steps give them."""

    def __init__(
        self, plan: Plan, lengths: Int64[np.ndarray, " N *sides"], traced: Sequence[TracedResults], axes: PyTree
    ):
        self._plan = plan
        self._num_samples = num_samples = len(lengths)
        self._arrays: list[np.ndarray] = []  # of each result: entries of one sample after the other
        self._structure = jax.tree.structure(traced[0].results)
        self._of_word: dict[str, _Axis] = {}
        if not plan.is_split:
            ones = np.ones(num_samples, np.int64)
            self._of_word["row"] = _Axis(plan, ones[: plan.num_samples], ones)
        planned = plan.planned_lengths(lengths)
        by_side = planned.reshape(len(planned), -1).T
        for word, side in zip(LENGTH_NAMES[len(by_side) - 1], by_side, strict=True):
            sizes = np.zeros(num_samples, np.int64)
            np.add.at(sizes, plan.sample_ids, side)
            self._of_word[word] = _Axis(plan, side, sizes)
        split = ": no sample has one result where the plan splits them" * plan.is_split
        self._words = _words_of(traced, axes, [*self._of_word], split)
        self._are_without = np.bincount(plan.sample_ids, minlength=num_samples) == 0  # dropped or, later, bad

    def add(self, step: int, found: tuple[Array | None, PyTree]) -> None:
        """Takes the ids of a step and its results, [M, B, …], once they are on the host."""
        ids, results = found
        plan = self._plan
        bucket_index = int(plan.step_bucket[step])
        bucket = plan.buckets.shapes[bucket_index]
        sizes = dict(zip(LENGTH_NAMES[len(bucket.lengths) - 1], bucket.lengths, strict=True))
        numbers = self._places_in_plan(step, ids)
        row_of, _ = np.nonzero(numbers >= 0)
        places = {
            word: self._of_word[word].of_rows(numbers[numbers >= 0], row_of, len(numbers)) for word in {*self._words}
        }
        values = map(np.asarray, jax.tree.leaves(results))
        for i, (word, array) in enumerate(zip(self._words, values, strict=True)):
            size = sizes.get(word, plan.samples_per_row[bucket_index])  # of samples, 1 where nothing is packed
            leading = (plan.num_microbatches, bucket.rows, *([size] if word in sizes or plan.is_packed else []))
            entry_shape = array.shape[len(leading) :]
            if i == len(self._arrays):
                self._arrays.append(np.empty((self._of_word[word].offsets[-1], *entry_shape), array.dtype))
            if array.shape != (*leading, *self._arrays[i].shape[1:]):
                name = [*leaves_by_name(results)][i]
                raise UserError(
                    f"the result{name and f' {name}'} of axes {word!r} is {list(array.shape[1:])} in {bucket}, and not "
                    f"{[*leading[1:], *self._arrays[i].shape[1:]]}, by its bucket and by earlier ones"
                )
            counts, at = places[word]
            rows = array.swapaxes(0, 1).reshape(-1, size, *entry_shape)  # in the plan's order
            self._arrays[i][at] = rows[np.arange(rows.shape[1]) < counts[:, None]]

    def _places_in_plan(self, step: int, ids: Array | None) -> Int64[np.ndarray, "rows P"]:
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

    def by_sample(self) -> list[PyTree]:
        """The result of each sample."""
        columns = []
        for word, array in zip(self._words, self._arrays, strict=True):
            offsets = self._of_word[word].offsets.tolist()
            columns.append([*array] if word == "row" else [array[i:k] for i, k in itertools.pairwise(offsets)])
        if jax.tree_util.treedef_is_leaf(self._structure):
            (found,) = columns
        else:
            found = [jax.tree.unflatten(self._structure, leaves) for leaves in zip(*columns, strict=True)]
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
