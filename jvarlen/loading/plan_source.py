"""Reads the steps of a plan, compares the samples with the plan, and collates them.

It runs wherever samples are read: in a thread or in a worker process. Letters: N samples of the dataset, n of a step, m
microbatches of a process, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_choices, list_first
from jvarlen._common.worker_errors import portable_error
from jvarlen.batches.shapes import BatchSpec
from jvarlen.loading.collate import StepSamples, pad_to_bucket
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import DataSource, check_lengths, check_pair_lengths
from jvarlen.planning.steps import ReadPlan

__all__ = ["CollateFn", "OnMismatch", "PlanSource", "ReadStep", "StepSource", "read_sample", "spec_of_steps"]

CollateFn = Callable[[StepSamples], Any]
OnMismatch = Literal["error", "adjust"]


class ReadStep(NamedTuple):
    """A step that was read.

    Attributes:
      step: its number in the plan.
      batch: what the collate function made of it.
      num_samples: samples that this process read for it.
      num_adjusted: how many of them were cut or are shorter than planned.
      ids: int64[n], the samples in the order in which they were read.
    """

    step: int
    batch: Any
    num_samples: int
    num_adjusted: int
    ids: Int64[np.ndarray, " n"]


class PlanSource:
    """Random access to the collated steps of a plan, or to this process's part of them.

    Args:
      plan: the plan of one epoch.
      dataset: random access by sample id.
      collate: makes the arrays of one step from its `StepSamples`.
      microbatches: int64[m], the microbatches to read; None reads all that the plan has.
      lengths: as in `load`.
      on_mismatch: as in `load`.

    Raises:
      ValueError: the dataset is smaller than the plan, or has another number of samples than `lengths`.
    """

    def __init__(
        self,
        plan: ReadPlan,
        dataset: DataSource,
        collate: CollateFn = pad_to_bucket,
        microbatches: Int64[np.ndarray, " m"] | None = None,
        *,
        lengths: npt.ArrayLike | None = None,
        on_mismatch: OnMismatch = "error",
    ):
        if plan.largest_id >= len(dataset):
            raise UserError(f"the plan holds sample {plan.largest_id}, the dataset only {len(dataset)} samples")
        check_choices(on_mismatch=(on_mismatch, OnMismatch))
        if lengths is None and on_mismatch == "adjust":
            raise UserError('on_mismatch="adjust" needs the lengths that the plan was made for')
        plan.own_rows(0, microbatches)  # raises ValueError now where a plan holds others
        self._plan = plan
        self._dataset = dataset
        self._collate = collate
        self._microbatches = microbatches
        self._adjusts = on_mismatch == "adjust"
        self._lengths = None
        if lengths is not None:
            self._lengths = _planned_lengths(plan, lengths)
            if len(self._lengths) != len(dataset):
                raise UserError(f"lengths are of {len(self._lengths)} samples, the dataset holds {len(dataset)}")

    def __len__(self) -> int:
        return self._plan.num_steps

    def __getitem__(self, step: int) -> Any:
        return self.read(step).batch

    def read(self, step: int) -> ReadStep:
        """Reads and collates a step; an error says which one it was.

        Raises:
          ValueError: samples of other lengths than planned, or samples that the collate function rejects.
          Exception: any error of the dataset, with the sample's id as a note.
        """
        try:
            return self._read(step)
        except Exception as error:
            error.add_note(f"while reading step {step}")
            raise

    def _read(self, step: int) -> ReadStep:
        plan = self._plan
        ids_MxB, starts, num_tokens = plan.own_rows(step, self._microbatches)
        read_ids: list[int] = []
        samples = [self._read_microbatch(ids_B[ids_B >= 0].tolist(), read_ids) for ids_B in ids_MxB]
        ids = np.array(read_ids, np.int64)
        num_adjusted = 0
        if self._lengths is not None:
            num_adjusted = self._compare(ids, samples)
            num_tokens = None  # every sample was compared, and some may be shorter by choice
        step_samples = StepSamples(
            bucket=plan.buckets[plan.step_bucket[step]],
            ids=ids_MxB,
            samples=samples,
            num_tokens=num_tokens,
            truncate=plan.overlong == "truncate",
            num_sequences=int(plan.num_sequences[step]),
            starts=starts,
        )
        return ReadStep(step, self._collate(step_samples), len(ids), num_adjusted, ids)

    def _read_microbatch(self, ids: list[int], read_ids: list[int]) -> list[Any]:
        """The samples of a microbatch; `read_ids` takes the id of each as soon as it was read."""
        samples = []
        for i in ids:
            samples.append(read_sample(self._dataset, i))
            read_ids.append(i)
        return samples

    def _compare(self, ids: Int64[np.ndarray, " n"], samples: list[list[Any]]) -> int:
        """Compares lengths with those planned; returns how many samples differ, which are cut in place if longer."""
        assert self._lengths is not None
        planned = self._lengths[ids]
        flat = [sample for microbatch in samples for sample in microbatch]
        found = _lengths_of(flat, ids, planned.ndim == 2)
        kept = found
        if self._plan.overlong == "truncate":  # the rest is cut by the plan's own rule, which collating follows
            kept = np.minimum(found, _longest(self._plan))
        differs = kept != planned if planned.ndim == 1 else (kept != planned).any(axis=1)
        if not differs.any():
            return 0
        if not self._adjusts:
            listed = (
                f"id {i}: {_format_length(length)}, planned {_format_length(expected)}"
                for i, length, expected in zip(
                    ids[differs].tolist(), found[differs].tolist(), planned[differs].tolist(), strict=True
                )
            )
            raise UserError(
                f"samples have other lengths than planned: {list_first(listed, '; ')}; the dataset has changed, or "
                'is not the one whose lengths were planned. Plan again, or load with on_mismatch="adjust"'
            )
        for place in np.flatnonzero(differs).tolist():
            flat[place] = _cut(flat[place], planned[place].tolist())
        in_order = iter(flat)
        for microbatch in samples:
            microbatch[:] = [next(in_order) for _ in microbatch]
        return int(differs.sum())

    def __repr__(self) -> str:
        return f"PlanSource({self._plan.digest[:12]}, {len(self)} steps)"


class StepSource:
    """The steps of a `PlanSource` as Grain takes them, each a `ReadStep`.

    Args:
      source: what reads them.
      in_worker: whether that happens in worker processes, whose errors do not all pickle.
    """

    def __init__(self, source: PlanSource, *, in_worker: bool):
        self._source = source
        self._in_worker = in_worker

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, step: int) -> ReadStep:
        if not self._in_worker:
            return self._source.read(step)
        try:
            return self._source.read(step)
        except Exception as error:
            raise portable_error(error) from None

    def __repr__(self) -> str:
        return repr(self._source)


def spec_of_steps(datasets: Mapping[ReadPlan, DataSource], collate: CollateFn) -> BatchSpec:
    """The shapes of what a collate function makes: those of the first step of a bucket in these plans, which is read.

    Args:
      datasets: the samples of each plan.
      collate: makes the arrays.
    """

    def batch_spec(bucket: AnyBucket, microbatches_per_step: int) -> Any:
        for plan, dataset in datasets.items():
            index = plan.buckets.index(bucket) if bucket in plan.buckets else -1
            for step in np.flatnonzero(plan.step_bucket == index)[:1].tolist():
                batch = PlanSource(plan, dataset, collate)[step]
                return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), _dtype(leaf)), batch)
        raise UserError(f"no step of the bucket {bucket} is planned, to tell the shapes of its batch: give batch_spec")

    return batch_spec


def _dtype(leaf: Any) -> Any:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)


def read_sample(dataset: Any, sample_id: int) -> Any:
    """A sample of the dataset; an error says which one it was."""
    try:
        return dataset[sample_id]
    except (StopIteration, SystemExit) as error:  # would end the iteration, or the worker, without a word
        raise RuntimeError(f"the dataset raised {error!r} for sample {sample_id}") from error
    except Exception as error:
        error.add_note(f"while reading sample {sample_id}")
        raise


def _planned_lengths(plan: ReadPlan, lengths: npt.ArrayLike) -> Int64[np.ndarray, " N *sides"]:
    """Checked lengths, cut where the plan cuts."""
    checked = check_pair_lengths(lengths) if len(plan.buckets[0].lengths) == 2 else check_lengths(lengths)
    return np.minimum(checked, _longest(plan)) if plan.overlong == "truncate" else checked


def _longest(plan: ReadPlan) -> Int64[np.ndarray, " *sides"]:
    """The length of the longest bucket, or of pairs the longest of each side."""
    lengths = np.max([bucket.lengths for bucket in plan.buckets], axis=0)
    return lengths if len(lengths) == 2 else np.asarray(lengths[0])


def _lengths_of(samples: list[Any], ids: Int64[np.ndarray, " n"], is_pairs: bool) -> Int64[np.ndarray, " n *sides"]:
    try:
        if is_pairs:
            return np.array([(len(pair[0]), len(pair[1])) for pair in samples], np.int64).reshape(-1, 2)
        return np.fromiter(map(len, samples), np.int64, len(samples))
    except TypeError as error:
        without = [f"id {i}" for i, sample in zip(ids.tolist(), samples, strict=True) if not hasattr(sample, "__len__")]
        raise UserError(
            "lengths are compared with `len()` of a sample, which these do not have; load without lengths: "
            f"{list_first(without)}"
        ) from error


def _cut(sample: Any, length: int | list[int]) -> Any:
    """The sample, or both sides of a pair, cut where longer."""
    if isinstance(length, int):
        return sample[:length]
    return tuple(side[:most] for side, most in zip(sample, length, strict=True))


def _format_length(length: int | list[int]) -> str:
    return f"{length} tokens" if isinstance(length, int) else f"{length[0]} and {length[1]} tokens"
