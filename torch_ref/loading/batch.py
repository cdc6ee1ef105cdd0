"""The batches that are loaded: tokens, pairs of them, or fields by name.

Letters: m microbatches, B rows of each, P samples of a row, T positions, S and U of source and target.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

__all__ = ["AnyBatch", "AnyStep", "Batch", "OneStep", "PairBatch", "StepBatch", "groups_of", "map_tensors", "values_of"]


class Batch(NamedTuple):
    """A replica's share of a step, or one microbatch of it (then without the leading m), whose samples are tokens.

    Attributes:
        tokens: int64[m, B, T], 0 where there is no token.
        lengths: int64[m, B], tokens of each row, 0 for a padding row unless it repeats a sample.
        weights: float32[m, B, T], of real tokens in the loss: those of their samples, or else 1; 0 elsewhere.
        num_sequences: real samples of the whole step, over all replicas; in a `StepBatch` those of the group.
        segment_ids: int64[m, B, T] in batches of packed rows: 1 on the first sample of a row, 2 on the next and so on,
            0 on padding. None where a row is a sample.
        positions: int64[m, B, T] likewise: the place of each token in its sample, 0 on padding.
        ids: int64[m, B], the sample of each row, or int64[m, B, P], the samples of each packed row, where entry p
            belongs to segment p + 1; P is `Plan.samples_per_row`. -1 for none, and for a repeated one.
        is_real: bool, as `ids`: False where that is -1.
        num_microbatches: how many microbatches of the step this replica has, if the batch holds one of several, as
            `PlannedDataset.collate` makes it. None if it holds all of them.
    """

    tokens: Tensor
    lengths: Tensor
    weights: Tensor
    num_sequences: float
    segment_ids: Tensor | None = None
    positions: Tensor | None = None
    ids: Tensor | None = None
    is_real: Tensor | None = None
    num_microbatches: int | None = None


class PairBatch(NamedTuple):
    """The same for samples that are pairs of tokens, (source, target).

    Attributes:
        source_tokens: int64[m, B, S], as `Batch.tokens`.
        target_tokens: int64[m, B, U].
        source_lengths: int64[m, B], as `Batch.lengths`.
        target_lengths: int64[m, B].
        weights: float32[m, B, U], of target tokens.
        num_sequences: real pairs of the whole step, over all replicas; in a `StepBatch` those of the group.
        source_segment_ids: int64[m, B, S] in batches of packed rows, as `Batch.segment_ids`.
        target_segment_ids: int64[m, B, U], with the same number as the source of the pair.
        source_positions: int64[m, B, S] likewise, as `Batch.positions`.
        target_positions: int64[m, B, U].
        ids: int64[m, B] or int64[m, B, P], as `Batch.ids`.
        is_real: bool, as `ids`.
        num_microbatches: as `Batch.num_microbatches`.
    """

    source_tokens: Tensor
    target_tokens: Tensor
    source_lengths: Tensor
    target_lengths: Tensor
    weights: Tensor
    num_sequences: float
    source_segment_ids: Tensor | None = None
    target_segment_ids: Tensor | None = None
    source_positions: Tensor | None = None
    target_positions: Tensor | None = None
    ids: Tensor | None = None
    is_real: Tensor | None = None
    num_microbatches: int | None = None


AnyBatch = Batch | PairBatch | dict[str, Tensor]


class StepBatch(NamedTuple):
    """A replica's share of a step of several groups, which have a shape each.

    Attributes:
        groups: a batch for each group, of one kind.
        num_sequences: real samples of the whole step, over all replicas.
    """

    groups: list[Any]
    num_sequences: float


AnyStep = AnyBatch | StepBatch
OneStep = TypeVar("OneStep", bound=AnyStep)


def groups_of(batch: AnyStep) -> list[Any]:
    """Return the batches of a step's groups."""
    return batch.groups if isinstance(batch, StepBatch) else [batch]


def values_of(batch: AnyStep) -> Mapping[str, Any]:
    """Return what a batch holds, by name."""
    return batch if isinstance(batch, dict) else batch._asdict()


def map_tensors(batch: OneStep, change: Callable[[Tensor], Tensor]) -> OneStep:
    """Return a batch of the same kind with its tensors changed."""
    if isinstance(batch, StepBatch):
        return batch._replace(groups=[map_tensors(group, change) for group in batch.groups])
    changed = {name: change(value) for name, value in values_of(batch).items() if isinstance(value, Tensor)}
    return cast(OneStep, changed if isinstance(batch, dict) else batch._replace(**cast(dict[str, Any], changed)))
