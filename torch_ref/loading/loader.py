"""Loads the batches of one replica, step by step, with torch's DataLoader."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from torch_ref.checks import check_integer, known_keywords
from torch_ref.loading.batch import AnyBatch, AnyStep, StepBatch
from torch_ref.loading.collate import Collator, Placed
from torch_ref.loading.fields import FieldSpec, read_samples
from torch_ref.planning.buckets import Bucket, PairBucket
from torch_ref.planning.plan import Plan

__all__ = ["PlanBatchSampler", "PlannedDataset", "PlannedRow", "SampleSource", "load"]


class SampleSource(Protocol):
    """A dataset that `load` reads, whose samples are as described there."""

    def __getitem__(self, index: int, /) -> Any:
        """Return sample `index`."""


@dataclass(frozen=True)
class _Repeated:
    """The index of a row that is read again, as a padding row: no dataset but a `PlannedDataset` takes it."""

    index: int | list[int]

    def __index__(self) -> NoReturn:
        """Refuse to be the index of any other dataset, which would read a padding row as a sample."""
        raise ValueError(
            'padding_rows="repeat" is for a PlannedDataset, which knows padding rows from samples: make one of this '
            "dataset, PlannedDataset(plan, dataset)"
        )

    def __len__(self) -> NoReturn:
        """Refuse to be taken for a sequence by tensors."""
        self.__index__()

    def __getitem__(self, place: int) -> NoReturn:
        """Refuse to be read by its elements."""
        self.__index__()

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        """Refuse to be taken for an array by arrays."""
        self.__index__()


class _Row(list[int]):
    """The ids of a packed row, by which arrays, tensors and a `PlannedDataset` are read."""

    def __index__(self) -> NoReturn:
        """Refuse to be the index of a dataset that takes single ids."""
        raise ValueError(
            "a packed row is read by a list of ids, which this dataset does not take: make a PlannedDataset of it, "
            "PlannedDataset(plan, dataset)"
        )


class _Indices(list[Any]):
    """The indices of a microbatch, maybe none, with its bucket and what a `PlannedRow` says of its step."""

    def __init__(
        self, indices: Sequence[Any], bucket: Bucket | PairBucket, num_sequences: int, num_microbatches: int
    ) -> None:
        super().__init__(indices)
        self.bucket, self.num_sequences, self.num_microbatches = bucket, num_sequences, num_microbatches


@known_keywords
class PlanBatchSampler(Sampler[list[Any]]):
    """The microbatches of one replica, in the plan's order, for a DataLoader's `batch_sampler`.

    Every replica gets the same number of microbatches, M / num_replicas a group. Each is a list of sample ids, at most
    B; for packed rows a list of lists of ids. A plain dataset can be indexed with ids, a tensor with such a list too.
    `PlannedDataset` makes items of all of them that know their bucket.

    It is for training loops of others: with M / num_replicas above 1, a step is that many batches in a row, whose
    gradients the loop must add up (`gradient_accumulation_steps` in the Trainer of transformers). Where steps have
    several groups, their numbers of batches differ, and each `PlannedRow` says that of its step. `train_step` takes all
    of them at once, as `load` gives them, and refuses one of several.

    A run that stopped after s steps goes on with `list(sampler)[plan.step_groups[s] * M // num_replicas :]` as the
    `batch_sampler`.

    Args:
        plan: the plan; M must be a multiple of `num_replicas`. It splits no sample.
        rank: this replica, 0 <= rank < num_replicas. It gets microbatches rank * M / num_replicas and the following.
        num_replicas: how many replicas share each step.
        padding_rows: "omit": a microbatch has fewer than B indices where the plan has padding rows, and none where it
            has nothing else. "repeat": B always; padding rows repeat the first row of the group, by indices that only a
            `PlannedDataset` takes, for a loss weight of 0.

    Raises:
        ValueError: if `num_replicas` does not divide M, there is no such rank, or the plan splits samples.

    Example:
        >>> from torch_ref import make_plan
        >>> plan = make_plan([1, 2, 2, 4, 3], [(2, 2), (1, 4)], order="length")
        >>> list(PlanBatchSampler(plan))
        [[0, 1], [2], [4], [3]]
    """

    def __init__(self, plan: Plan, rank: int = 0, num_replicas: int = 1, *, padding_rows: str = "omit") -> None:
        """Check the share."""
        self._share = _share(plan, rank, num_replicas)
        if padding_rows not in ("omit", "repeat"):
            raise ValueError(f'padding_rows must be "omit" or "repeat", got {padding_rows!r}')
        if plan.chunk_starts is not None and plan.chunk_starts.any():
            raise ValueError("the plan splits samples, which indices cannot say: read it with torch_ref.load")
        self._repeats = padding_rows == "repeat"
        self._num_microbatches = plan.num_microbatches // num_replicas
        self._plan = plan

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield lists of sample ids, or of lists of them."""
        for step, size in enumerate(self._plan.num_sequences.tolist()):
            groups = self._plan.groups(step)
            for group in groups:
                yield from self._microbatches(group, size, len(groups) * self._num_microbatches)

    def _microbatches(self, group: int, num_sequences: int, num_microbatches: int) -> Iterator[list[Any]]:
        """Yield those of a group, for a step of so many samples, and microbatches of this replica."""
        bucket, rows_MxB = self._plan.buckets.shapes[self._plan.group_bucket[group]], self._plan.rows(group)
        first = _Repeated(*_without_padding(rows_MxB[0, :1].tolist()))
        for rows_B in rows_MxB[self._share].tolist():
            indices = _without_padding(rows_B)
            if self._plan.row_offsets is not None:
                indices = [*map(_Row, indices)]
            indices += [first] * (bucket.rows - len(indices)) * self._repeats
            yield _Indices(indices, bucket, num_sequences, num_microbatches)

    def __len__(self) -> int:
        """Return the number of microbatches of this replica in the epoch."""
        return self._plan.num_groups * self._num_microbatches


class PlannedRow(NamedTuple):
    """An item of a `PlannedDataset`.

    Attributes:
        sample: what the dataset holds; for a packed row the list of its samples; None for a padding row that repeats
            none.
        bucket: the shape of its microbatch.
        is_real: False for a padding row, whose loss weight must be 0.
        ids: the id of the sample, or the ids of the samples; None where `sample` is None.
        num_sequences: real samples of the whole step, over all replicas.
        num_microbatches: microbatches of the step that this replica has; all of them if not read by a
            `PlanBatchSampler`.
    """

    sample: Any
    bucket: Bucket | PairBucket
    is_real: bool
    ids: int | list[int] | None
    num_sequences: int
    num_microbatches: int


@known_keywords
class PlannedDataset(Dataset[PlannedRow]):
    """A map-style dataset whose items know their bucket, for the indices of a `PlanBatchSampler`.

    A microbatch without samples is one item that is not real.

    Args:
        plan: the plan of the sampler.
        dataset: sample i is `dataset[i]`, of any kind; if it has `__getitems__`, that reads a microbatch at once.
        fields: for `collate`, as for `load`.

    Raises:
        IndexError: when an item is read that is none, -1 among them.
        ValueError: likewise, if the plan holds no such sample.

    Example:
        >>> from torch_ref import make_plan
        >>> plan = make_plan([1, 2, 4], [(3, 2), (1, 4)], order="length")
        >>> planned = PlannedDataset(plan, [[7], [7, 8], [1, 2, 3, 4]])
        >>> planned[1][:3]
        ([7, 8], Bucket(rows=3, length=2), True)
        >>> loader = DataLoader(planned, batch_sampler=PlanBatchSampler(plan), collate_fn=planned.collate)
        >>> [batch.tokens.tolist() for batch in loader]
        [[[[7, 0], [7, 8], [0, 0]]], [[[1, 2, 3, 4]]]]
    """

    def __init__(self, plan: Plan, dataset: SampleSource, *, fields: Mapping[str, FieldSpec] | None = None) -> None:
        """Look up the group of every sample."""
        self._plan = plan
        self._dataset = dataset
        self._collator = Collator(plan, dataset, fields)
        num_groups = np.diff(plan.step_groups)
        self._num_sequences = np.repeat(plan.num_sequences, num_groups)
        self._num_microbatches = np.repeat(num_groups * plan.num_microbatches, num_groups)
        self._group_of = np.full(int(plan.sample_ids.max()) + 1, -1)
        self._group_of[plan.sample_ids] = np.repeat(np.arange(plan.num_groups), np.diff(plan.group_offsets))

    def __getitem__(self, index: Any) -> PlannedRow:
        """Return a row by what the sampler gives for it: a sample id, or a list of them."""
        return self._rows([index])[0]

    def __getitems__(self, indices: _Indices) -> list[PlannedRow]:
        """Return the rows of a microbatch; DataLoader calls this."""
        return self._rows(indices) or [
            PlannedRow(None, indices.bucket, False, None, indices.num_sequences, indices.num_microbatches)
        ]

    def _rows(self, indices: Sequence[Any]) -> list[PlannedRow]:
        ids = [index.index if isinstance(index, _Repeated) else index for index in indices]
        by_row = [each if isinstance(each, list) else [each] for each in ids]
        for sample_id in chain(*by_row):
            if not 0 <= sample_id < len(self):
                raise IndexError(f"there is no sample {sample_id}, the plan knows {len(self)}")
            if self._group_of[sample_id] < 0:
                raise ValueError(f"sample {sample_id} is not in the plan")
        read = read_samples(self._dataset, chain(*by_row))
        groups = self._group_of[[of_row[0] for of_row in by_row]].tolist()
        return [
            PlannedRow(
                [read[i] for i in of_row] if isinstance(each, list) else read[each],
                self._plan.buckets.shapes[self._plan.group_bucket[group]],
                not isinstance(index, _Repeated),
                each,
                int(self._num_sequences[group]),
                getattr(indices, "num_microbatches", int(self._num_microbatches[group])),
            )
            for index, each, of_row, group in zip(indices, ids, by_row, groups, strict=True)
        ]

    def __len__(self) -> int:
        """Return one more than the largest sample id of the plan."""
        return len(self._group_of)

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
        held = [([] if row.ids is None else row.ids if isinstance(row.ids, list) else [row.ids]) for row in rows]
        ids = np.full((1, bucket.rows, max(1, *map(len, held))), -1)
        is_real = np.zeros((1, bucket.rows), dtype=np.bool_)
        samples: list[Any] = []
        for place, (row, of_row) in enumerate(zip(rows, held, strict=True)):
            ids[0, place, : len(of_row)], is_real[0, place] = of_row, row.is_real
            samples += row.sample if isinstance(row.ids, list) else [row.sample] * len(of_row)
        num_microbatches = rows[0].num_microbatches if rows[0].num_microbatches > 1 else None
        placed = Placed(ids, is_real, samples)
        return self._collator.batch(bucket, placed, rows[0].num_sequences, num_microbatches=num_microbatches)


class _Steps(Dataset[AnyStep]):
    """The steps of a plan as a dataset of batches, so that a DataLoader worker prepares whole steps."""

    def __init__(self, plan: Plan, dataset: SampleSource, share: slice, collator: Collator, *, repeats: bool) -> None:
        self._plan, self._dataset, self._share, self._collator, self._repeats = plan, dataset, share, collator, repeats

    def __getitem__(self, step: int) -> AnyStep:
        groups = [self._read(group) for group in self._plan.groups(step)]
        return StepBatch(groups, float(self._plan.num_sequences[step])) if self._plan.has_many_groups else groups[0]

    def _read(self, group: int) -> AnyBatch:
        plan = self._plan
        bucket = plan.buckets.shapes[plan.group_bucket[group]]
        arrays = (
            plan.rows(group).reshape(plan.num_microbatches, bucket.rows, -1),
            plan.chunks(group),
            plan.ends(group),
        )
        of_group = [values for values in arrays if values is not None]
        is_real = of_group[0][self._share][..., 0] >= 0
        placed = [values[self._share] for values in of_group]
        if self._repeats:
            placed = [np.where(is_real[..., None], values[self._share], values[0, 0]) for values in of_group]
        ids = placed[0][placed[0] >= 0].tolist()
        read = read_samples(self._dataset, ids)
        return self._collator.batch(
            bucket,
            Placed(placed[0], is_real, [read[i] for i in ids], *placed[1:]),
            int(plan.group_offsets[group + 1] - plan.group_offsets[group]),
            int(plan.group_tokens[group]) if len(is_real) == plan.num_microbatches else None,
        )


@known_keywords
def load(
    plan: Plan,
    dataset: SampleSource,
    *,
    rank: int = 0,
    num_replicas: int = 1,
    start_step: int = 0,
    num_workers: int = 0,
    fields: Mapping[str, FieldSpec] | None = None,
    padding_rows: str = "zeros",
) -> DataLoader[Any]:
    """Read a replica's batches in the plan's order.

    Args:
        plan: the plan; M must be a multiple of `num_replicas`.
        dataset: sample i is `dataset[i]`: 1-D integers (uint8, say) as long as they were for the plan; or
            `WeightedTokens`, whose weights go into the batch; in plans of two lengths a pair of such, (source, target).
            Or a dict or dataclass of fields: arrays, tensors, lists or numbers. `__getitems__`, if there is one, reads
            the samples of a step at once.
        rank: this replica, 0 <= rank < num_replicas.
        num_replicas: how many replicas share each step.
        start_step: the first step to read, 0 <= start_step <= num_steps; where a run stopped, say.
        num_workers: processes that read ahead; 0 reads in this one.
        fields: of samples with fields, which of their leading axes have the sample's length: "length" for [l, ...],
            which is padded or packed; "length length" for [l, l, ...], which packed rows cannot hold; "row" for all
            others, which are stacked. In plans of two lengths "source" and "target" take the place of "length". Fields
            that are not named are left out, but for `weights`. None: all fields, their axes as they vary among up to 18
            samples; for plans of one length.
        padding_rows: "zeros"; or "repeat": the first row of the group again, with weight 0.

    Returns:
        An iterable of `Batch`es with m = M / num_replicas, one for each step from `start_step`; of `PairBatch`es for
        pairs; of `StepBatch`es of such where steps have several groups; or of plain dicts of tensors for samples with
        fields. These hold the fields, [m, B, T, ...], [m, B, T, T, ...] or [m, B, ...] ([m, B, P, ...] in packed rows),
        and the tensors of a `Batch` or `PairBatch` but for the tokens, and, of packed rows, the lengths. A field
        `weights`, one number a token (of the target) or one a sample, is the loss weights, named in `fields` or not;
        samples without it have 1. Dtypes stay; Python's floats get torch's default one, and uint16, uint32 and uint64
        become int64.

    Raises:
        ValueError: if an argument is out of its range, or `num_replicas` does not divide M; while iterating, with the
            first offenders, if samples are longer than their bucket (unless the plan truncates and the bucket is the
            longest) or the samples of a whole step not as long as planned, if their fields are not alike or have names
            of a batch's tensors, or if the axes of fields cannot be inferred.
    """
    start_step = check_integer("start_step", start_step, minimum=0, maximum=plan.num_steps)
    num_workers = check_integer("num_workers", num_workers, minimum=0)
    if padding_rows not in ("zeros", "repeat"):
        raise ValueError(f'padding_rows must be "zeros" or "repeat", got {padding_rows!r}')
    if not hasattr(dataset, "__getitem__"):
        raise ValueError(f"samples are read by their ids, which {type(dataset).__name__} lacks: make a list of them")
    share, collator = _share(plan, rank, num_replicas), Collator(plan, dataset, fields)
    steps = _Steps(plan, dataset, share, collator, repeats=padding_rows == "repeat")
    return DataLoader(steps, batch_size=None, sampler=range(start_step, plan.num_steps), num_workers=num_workers)


def _without_padding(rows: list[Any]) -> list[Any]:
    """Return the rows, ids or lists of them, without -1 and without those that hold nothing else."""
    if rows and isinstance(rows[0], list):
        return [ids for row in rows if (ids := _without_padding(row))]
    return [sample_id for sample_id in rows if sample_id >= 0]


def _share(plan: Plan, rank: int, num_replicas: int) -> slice:
    """Return the microbatches of a replica."""
    num_replicas = check_integer("num_replicas", num_replicas)
    rank = check_integer("rank", rank, minimum=0, maximum=num_replicas - 1)
    size, rest = divmod(plan.num_microbatches, num_replicas)
    if rest:
        raise ValueError(f"num_replicas={num_replicas} must divide the plan's num_microbatches={plan.num_microbatches}")
    return slice(rank * size, (rank + 1) * size)
