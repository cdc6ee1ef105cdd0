"""Reads the steps of a plan, compares the samples with the plan, and collates them.

It runs wherever samples are read: in a thread or in a worker process. Letters: N samples of the dataset, n of a step, m
microbatches of a process, S steps.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_choices, list_first
from jvarlen.batches.shapes import BatchSpec
from jvarlen.loading.collate import OWN_COLLATE, CollateFn, StepSamples, count_without_target, pad_to_bucket
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import DataSource, check_lengths, check_pair_lengths
from jvarlen.planning.samples import WeightedTokens, fields_of
from jvarlen.planning.steps import ReadPlan

__all__ = ["IdsDigest", "OnMismatch", "PlanSource", "ReadStep", "planned_ids_digest", "read_sample", "spec_of_steps"]

OnMismatch = Literal["error", "adjust"]


class ReadStep(NamedTuple):
    """A step that was read."""

    step: int
    batch: Any
    num_samples: int
    num_adjusted: int  # samples that were cut or are shorter than planned
    ids: Int64[np.ndarray, " n"]  # in the order in which they were read
    ids_digest: str | None = None  # of all steps so far
    num_without_target: int = 0  # samples without a token that has weight, if the library collates them


class PlanSource:
    """Random access to the collated steps of a plan, or to this process's part of them."""

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
        longest = np.max([bucket.lengths for bucket in plan.buckets], axis=0)
        self._longest = longest if len(longest) == 2 else longest[0]  # of pairs, of each side
        self._lengths = None
        if lengths is not None:
            checked = check_pair_lengths(lengths) if len(longest) == 2 else check_lengths(lengths)
            if len(checked) != len(dataset):
                raise UserError(f"lengths are of {len(checked)} samples, the dataset holds {len(dataset)}")
            self._lengths = np.minimum(checked, self._longest) if plan.overlong == "truncate" else checked

    def __len__(self) -> int:
        return self._plan.num_steps

    def __getitem__(self, step: int) -> Any:
        return self.read(step).batch

    def read(self, step: int) -> ReadStep:
        """Reads and collates a step; an error says which one it was."""
        try:
            return self._read(step)
        except Exception as error:
            error.add_note(f"while reading step {step}")
            raise

    def _read(self, step: int) -> ReadStep:
        plan = self._plan
        ids_MxB, starts, num_tokens = plan.own_rows(step, self._microbatches)
        read_ids: list[int] = []  # each as soon as it was read
        samples: list[list[Any]] = []
        for ids_B in ids_MxB:
            samples.append([])
            for i in ids_B[ids_B >= 0].tolist():
                samples[-1].append(read_sample(self._dataset, i))
                read_ids.append(i)
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
        batch = self._collate(step_samples)
        num_without_target = count_without_target(step_samples) if self._collate in OWN_COLLATE else 0
        return ReadStep(step, batch, len(ids), num_adjusted, ids, num_without_target=num_without_target)

    def _compare(self, ids: Int64[np.ndarray, " n"], samples: list[list[Any]]) -> int:
        """Compares lengths with those planned; returns how many samples differ, which are cut in place if longer."""
        assert self._lengths is not None
        planned = self._lengths[ids]
        found = _lengths_of([sample for microbatch in samples for sample in microbatch], ids, planned.ndim == 2)
        # The rest is cut by the plan's own rule, which collating follows.
        kept = np.minimum(found, self._longest) if self._plan.overlong == "truncate" else found
        differs = kept != planned if planned.ndim == 1 else (kept != planned).any(axis=1)
        if differs.any() and not self._adjusts:
            others = zip(ids[differs].tolist(), found[differs].tolist(), planned[differs].tolist(), strict=True)
            listed = (
                f"id {i}: {_format_length(length)}, planned {_format_length(expected)}"
                for i, length, expected in others
            )
            raise UserError(
                f"samples have other lengths than planned: {list_first(listed, '; ')}; the dataset has changed, or "
                'is not the one whose lengths were planned. Plan again, or load with on_mismatch="adjust"'
            )
        compared = zip(differs.tolist(), ids.tolist(), planned.tolist(), strict=True)
        for microbatch in samples:
            for place, (is_other, i, length) in enumerate(itertools.islice(compared, len(microbatch))):
                if is_other:
                    microbatch[place] = _cut(i, microbatch[place], length)
        return int(differs.sum())


def spec_of_steps(datasets: Mapping[ReadPlan, DataSource], collate: CollateFn) -> BatchSpec:
    """The shapes of what a collate function makes of the first step of a bucket in these plans, which is read."""

    def batch_spec(bucket: AnyBucket, microbatches_per_step: int) -> Any:
        def spec(leaf: Any) -> jax.ShapeDtypeStruct:
            shape, dtype = np.shape(leaf), leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
            # A plan may hold a part of the microbatches.
            return jax.ShapeDtypeStruct((microbatches_per_step, *shape[1:]) if shape else (), dtype)

        for plan, dataset in datasets.items():
            index = plan.buckets.index(bucket) if bucket in plan.buckets else -1
            for step in np.flatnonzero(plan.step_bucket == index)[:1].tolist():
                return jax.tree.map(spec, PlanSource(plan, dataset, collate)[step])
        raise UserError(f"no step of the bucket {bucket} is planned, to tell the shapes of its batch: give batch_spec")

    return batch_spec


class IdsDigest:
    """SHA-256 over the steps added so far: the number of each step, its number of samples and their ids, as int64."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256(b"jvarlen-ids-1\0")

    def add(self, step: int, ids: Int64[np.ndarray, " n"]) -> None:
        """Adds a step, whose samples were read in this order."""
        self._sha.update(np.array([step, len(ids)], "<i8").tobytes())
        self._sha.update(ids.astype("<i8", copy=False).tobytes())

    def hexdigest(self) -> str:
        """The digest as 64 hex digits; more steps can be added afterwards."""
        return self._sha.hexdigest()


def planned_ids_digest(
    plan: ReadPlan, microbatches: Int64[np.ndarray, " m"] | None = None, *, start_step: int = 0
) -> str:
    """The hash of the planned rows, which `Loader.ids_digest` must equal at the end of an epoch.

    Args:
      plan: the plan of the epoch.
      microbatches: int64[m], the microbatches of this process, as of a `Placement`; None: all that the plan has.
      start_step: the step at which loading began.

    Returns:
      64 hex digits. Processes of one training have different digests, because each reads its own rows.

    Example:
      >>> from jvarlen.planning.plan import make_plan
      >>> plan = make_plan([3, 1, 4], [(2, 4)], order="length")
      >>> planned_ids_digest(plan) == planned_ids_digest(plan, start_step=1)
      False
    """
    digest = IdsDigest()
    for step in range(start_step, plan.num_steps):
        ids_MxB = plan.own_rows(step, microbatches).ids
        digest.add(step, ids_MxB[ids_MxB >= 0])
    return digest.hexdigest()


def read_sample(dataset: Any, sample_id: int) -> Any:
    """A sample of the dataset; an error says which one it was."""
    try:
        return dataset[sample_id]
    except (StopIteration, SystemExit) as error:  # would end the iteration, or the worker, without a word
        raise RuntimeError(f"the dataset raised {error!r} for sample {sample_id}") from error
    except Exception as error:
        error.add_note(f"while reading sample {sample_id}")
        raise


def _lengths_of(samples: list[Any], ids: Int64[np.ndarray, " n"], is_pairs: bool) -> Int64[np.ndarray, " n *sides"]:
    """The lengths of samples, or of both sides of pairs; raises ValueError that lists those that do not tell theirs."""
    if not is_pairs and {*map(type, samples)} <= {np.ndarray, WeightedTokens, bytes, str}:
        return np.fromiter(map(len, samples), np.int64, len(samples))
    lengths, unknown = [], []
    for i, sample in zip(ids.tolist(), samples, strict=True):
        try:
            sides = (sample[0], sample[1]) if is_pairs else (sample,)
            fields = next(filter(None, map(fields_of, sides)), None)
            lengths.append([*map(len, sides)])
        except (LookupError, TypeError):
            fields = fields_of(sample) or type(sample).__name__
        if fields:
            unknown.append(f"id {i}: {fields}")
    if unknown:
        raise UserError(
            "lengths are compared with `len()` of a sample, which does not count the tokens of these: "
            f"{list_first(unknown, '; ')}; load without lengths, or let the dataset return tokens alone"
        )
    return np.array(lengths, np.int64).reshape((-1, 2) if is_pairs else -1)


def _cut(i: int, sample: Any, length: int | list[int]) -> Any:
    """The sample, or both sides of a pair, cut where longer; other fields of a pair stay."""
    try:
        if isinstance(length, int):
            return sample[:length]
        return (*(sample[side][:most] for side, most in enumerate(length)), *sample[2:])
    except TypeError as error:
        raise UserError(f"a {type(sample).__name__} cannot be cut to its planned length: id {i}") from error


def _format_length(length: int | list[int]) -> str:
    return f"{length} tokens" if isinstance(length, int) else f"{length[0]} and {length[1]} tokens"
