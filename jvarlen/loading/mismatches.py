"""Samples that have other lengths than were planned, and how they are adjusted.

Letters: n samples of a step or group, m of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen.data.samples import Sample, WeightedTokens, describe_fields
from jvarlen.loading.collate import CollateFields, CollateFn
from jvarlen.loading.reading import BadSample
from jvarlen.planning.steps import StepRows

if TYPE_CHECKING:
    from jvarlen.planning.streams import StreamBatches

__all__ = ["Mismatch", "check_stream_lengths", "compare_lengths", "cut_sample", "move_windows"]

_SIZED = {np.ndarray, WeightedTokens, bytes, str}  # their `len` counts tokens


class Mismatch(NamedTuple):
    """A sample whose length is not the planned one."""

    place: int  # among the samples of its step
    lengths: list[int] | None  # None where they are unknown
    reason: str


def compare_lengths(
    planned: Int64[np.ndarray, "n sides"],
    samples: Sequence[Sample | BadSample],
    cut_to: Int64[np.ndarray, " sides"] | None,
    fields: CollateFields | None,
) -> list[Mismatch]:
    """The samples whose lengths differ from the planned ones; with `cut_to`, longer plans need only these lengths."""

    def are_as_planned(
        lengths: Int64[np.ndarray, "m sides"], planned: Int64[np.ndarray, "m sides"]
    ) -> Bool[np.ndarray, " m"]:
        is_as_planned = lengths == planned
        if cut_to is not None:
            is_as_planned |= (planned > cut_to) & (lengths >= cut_to)
        return is_as_planned.all(axis=1)

    to_compare = [place for place, sample in enumerate(samples) if not isinstance(sample, BadSample)]
    if planned.shape[1] == 1 and {*map(type, samples)} <= _SIZED:
        found = np.fromiter(map(len, samples), np.int64, len(samples))[:, None]
        to_compare = np.flatnonzero(~are_as_planned(found, planned)).tolist()
    mismatches = []
    for place in to_compare:
        try:
            lengths = _lengths_of(samples[place], planned.shape[1], fields)
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                mismatches.append(Mismatch(place, None, str(error)))
            elif fields is None:
                kind = describe_fields(samples[place]) or type(samples[place]).__name__
                mismatches.append(Mismatch(place, None, f"no tokens alone, but {kind}"))
            continue  # collating rejects fields
        if not are_as_planned(np.array([lengths]), planned[place : place + 1]).all():
            found_text, planned_text = (" and ".join(map(str, each)) for each in (lengths, planned[place].tolist()))
            reason = f"{found_text} tokens, planned {planned_text} tokens" if any(lengths) else "no token"
            mismatches.append(Mismatch(place, lengths, reason))
    return mismatches


def check_stream_lengths(
    stream: StreamBatches,
    ids: Int64[np.ndarray, " n"],
    lengths: Int64[np.ndarray, "n sides"],
    samples: Sequence[Sample | BadSample],
    collate: CollateFn,
) -> None:
    """Raises ValueError that lists samples of a step which have not the whole lengths that the stream was given."""
    cut_to = np.array(stream.buckets.shapes[-1].lengths) if stream.overlong == "truncate" else None
    fields = collate if isinstance(collate, CollateFields) else None
    if mismatches := compare_lengths(lengths, samples, cut_to, fields):
        listed = list_first((f"id {ids[each.place]}: {each.reason}" for each in mismatches), "; ")
        raise UserError(f"samples have other lengths than the stream, whose lengths are not of this dataset: {listed}")


def _lengths_of(sample: Sample, num_lengths: int, fields: CollateFields | None) -> list[int]:
    """The lengths of a sample; raises ValueError where `len` would count its fields."""
    if fields is not None:
        return fields.lengths_of(sample)
    sides = [sample] if num_lengths == 1 else [sample[side] for side in range(num_lengths)]
    if kind := next(filter(None, map(describe_fields, sides)), None):
        raise UserError(f"no tokens alone, but {kind}")
    return [*map(len, sides)]


def cut_sample(
    sample: Sample, lengths: list[int], most: list[int], fields: CollateFields | None, *, keeps_end: bool
) -> Sample:
    """The sample, or both sides of a pair, of these lengths, cut where longer; other fields of a pair stay."""
    begins = [max(length - limit, 0) * keeps_end for length, limit in zip(lengths, most, strict=True)]
    parts = [slice(begin, begin + limit) for begin, limit in zip(begins, most, strict=True)]
    if fields is not None:
        return fields.cut(sample, parts)
    if len(parts) == 1:
        return sample[parts[0]]
    return (*(sample[side][part] for side, part in enumerate(parts)), *sample[2:])


def move_windows(
    rows: StepRows, lengths: Int64[np.ndarray, "n sides"], longest: Int64[np.ndarray, " sides"]
) -> StepRows:
    """Rows of samples of these lengths, whose windows begin earlier where they would end after their sample."""
    if rows.starts is None or rows.stops is None:
        return rows
    is_sample, starts, stops = rows.ids >= 0, rows.starts.copy(), rows.stops.copy()
    last = np.maximum(lengths - longest, 0).reshape(starts[is_sample].shape)
    starts[is_sample] = np.minimum(starts[is_sample], last)
    stops[is_sample] -= rows.starts[is_sample] - starts[is_sample]
    return rows._replace(starts=starts, stops=stops)
