"""A dataset whose items know their bucket and the counts of their step, for the loops of others."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import numpy as np
from torch.utils.data import Dataset

from torch_ref.checks import known_keywords
from torch_ref.loading.batch import AnyBatch
from torch_ref.loading.collate import Collator, Placed
from torch_ref.loading.fields import FieldSpec, read_samples
from torch_ref.loading.loader import SampleSource
from torch_ref.loading.sampler import Indices, PlanBatchSampler, Repeated
from torch_ref.planning.buckets import Bucket, MultiLengthBucket

__all__ = ["PlannedDataset", "PlannedRow"]


class PlannedRow(NamedTuple):
    """An item of a `PlannedDataset`.

    Attributes:
        sample: what the dataset holds; for a packed row the list of its samples; for the one item of an empty
            microbatch, those of another row of the step, as an example of what samples are like.
        bucket: the shape of its microbatch.
        is_real: False for a padding row, whose loss weight must be 0.
        ids: the id of the sample, or the ids of the samples; None for the item of an empty microbatch.
        num_sequences: real samples of the whole step, over all replicas.
        num_tokens: real tokens of the whole step, as the plan counts them.
        num_microbatches: microbatches of the step that its sampler gives.
        windows: for each of its samples, which are whole, where what stays of it begins and ends, of pairs on each
            side; None where the plan keeps all beginnings.
    """

    sample: Any
    bucket: Bucket | MultiLengthBucket
    is_real: bool
    ids: int | list[int] | None
    num_sequences: int
    num_tokens: int
    num_microbatches: int
    windows: list[tuple[Any, Any]] | None = None


@known_keywords
class PlannedDataset(Dataset[PlannedRow]):
    """A map-style dataset whose items know their bucket, for the indices of a `PlanBatchSampler`.

    A microbatch without samples is one item that is not real. What items know comes with the indices, so the workers of
    a DataLoader, persistent ones too, follow the epoch of the sampler.

    Args:
        sampler: the sampler whose indices are read.
        dataset: sample i is `dataset[i]`, of any kind; if it has `__getitems__`, that reads a microbatch at once.
        fields: for `collate`, as for `load`.

    Raises:
        ValueError: when it is read by other indices than those of a `PlanBatchSampler`.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from torch_ref import make_plan
        >>> plan = make_plan([1, 2, 4], [(3, 2), (1, 4)], order="length")
        >>> sampler = PlanBatchSampler(plan)
        >>> planned = PlannedDataset(sampler, [[7], [7, 8], [1, 2, 3, 4]])
        >>> loader = DataLoader(planned, batch_sampler=sampler, collate_fn=planned.collate)
        >>> [batch.tokens.tolist() for batch in loader]
        [[[[7, 0], [7, 8], [0, 0]]], [[[1, 2, 3, 4]]]]
    """

    def __init__(
        self, sampler: PlanBatchSampler, dataset: SampleSource, *, fields: Mapping[str, FieldSpec] | None = None
    ) -> None:
        """Check the fields."""
        if not isinstance(sampler, PlanBatchSampler):
            raise ValueError(f"sampler must be the PlanBatchSampler that reads the dataset, got {type(sampler)}")
        self._sampler = sampler
        self._dataset = dataset
        self._collator = Collator(sampler.plan, dataset, fields)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler: accelerate calls this where it cannot reach the sampler.

        Args:
            epoch: as for `PlanBatchSampler.set_epoch`.

        Raises:
            ValueError: likewise.
        """
        self._sampler.set_epoch(epoch)

    def __getitem__(self, index: Any) -> NoReturn:
        """Refuse to be read one by one: the bucket is that of a microbatch."""
        raise ValueError(
            f"index {index!r} is none of a PlanBatchSampler: read the dataset with DataLoader(planned, "
            "batch_sampler=sampler, collate_fn=...), and let no trainer split batches (split_batches=False)"
        )

    def __getitems__(self, indices: Indices) -> list[PlannedRow]:
        """Return the rows of a microbatch; DataLoader calls this."""
        if not isinstance(indices, Indices):
            self.__getitem__(indices)
        listed = indices or [Repeated(indices.first)]
        ids = [each.index if isinstance(each, Repeated) else each for each in listed]
        read = read_samples(self._dataset, chain(*map(_ids_of, ids)))
        return [
            PlannedRow(
                [read[i] for i in of_row] if isinstance(of_row, list) else read[of_row],
                indices.bucket,
                not isinstance(index, Repeated),
                of_row if indices else None,
                *indices.counts,
                None if indices.windows is None else [indices.windows[i] for i in _ids_of(of_row)],
            )
            for index, of_row in zip(listed, ids, strict=True)
        ]

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self._sampler.plan.num_samples

    def collate(self, rows: Sequence[PlannedRow]) -> AnyBatch:
        """Pad or pack a microbatch to its bucket, padding rows included: a DataLoader's `collate_fn`.

        Args:
            rows: the items of one microbatch. Their samples are as for `load`.

        Returns:
            A batch as `load` makes it, with m = 1; its `num_sequences` counts the real samples of the whole step. Rows
            that are not real have weight 0. If this replica has more microbatches of the step, the batch holds their
            number as `num_microbatches`, and `train_step` and compiled buckets refuse it.

        Raises:
            ValueError: as `load` does.
        """
        bucket = rows[0].bucket
        held = [[] if row.ids is None else _ids_of(row.ids) for row in rows]
        ids = np.full((1, bucket.rows, max(1, *map(len, held))), -1)
        is_real = np.zeros((1, bucket.rows), dtype=np.bool_)
        samples: list[Any] = []
        of_sides = None if rows[0].windows is None else np.shape(rows[0].windows[0])  # [2] or [2, D]
        windows = None if of_sides is None else np.zeros((*ids.shape, *of_sides), dtype=np.int64)
        for place, (row, of_row) in enumerate(zip(rows, held, strict=True)):
            ids[0, place, : len(of_row)], is_real[0, place] = of_row, row.is_real
            if windows is not None and of_row:
                windows[0, place, : len(of_row)] = row.windows
            samples += row.sample if isinstance(row.ids, list) else [row.sample] * len(of_row)
        num_microbatches = rows[0].num_microbatches if rows[0].num_microbatches > 1 else None
        bounds = [] if windows is None else [windows[:, :, :, 0], windows[:, :, :, 1]]
        placed = Placed(ids, is_real, samples, *bounds)
        return self._collator.batch(bucket, placed, rows[0].num_sequences, num_microbatches=num_microbatches)


def _ids_of(row: int | list[int]) -> list[int]:
    """Return the ids of a row, of one sample or of several."""
    return row if isinstance(row, list) else [row]
