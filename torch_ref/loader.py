"""Loads the padded batches of one replica, step by step, with torch's DataLoader."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from torch_ref.buckets import Bucket, PairBucket
from torch_ref.checks import check_integer
from torch_ref.plan import Plan
from torch_ref.weighted import WeightedTokens

__all__ = ["Batch", "PlanBatchSampler", "PlannedDataset", "PlannedRow", "SampleSource", "load"]


class Batch(NamedTuple):
    """A replica's share of a step, or one microbatch of it (then without the leading m).

    Attributes:
        tokens: int64[m, B, T], 0 where there is no token.
        lengths: int64[m, B], tokens of each row, 0 for a padding row unless it repeats a sample.
        weights: float32[m, B, T], of real tokens in the loss: 1 unless their samples have their own; 0 elsewhere.
        num_sequences: real samples of the whole step, over all replicas.
        segment_ids: int64[m, B, T] in batches of packed rows: 1 on the first sample of a row, 2 on the next and so on,
            0 on padding. None where a row is a sample.
        positions: int64[m, B, T] likewise: the place of each token in its sample, 0 on padding.
    """

    tokens: Tensor
    lengths: Tensor
    weights: Tensor
    num_sequences: float
    segment_ids: Tensor | None = None
    positions: Tensor | None = None


class SampleSource(Protocol):
    """What `load` reads from: sample i is a 1-D array of integers, or `WeightedTokens`."""

    def __getitem__(self, index: int, /) -> Any:
        """Return sample `index`."""


@dataclass(frozen=True)
class _Repeated:
    """The index of a row that is read again, as a padding row: no dataset but a `PlannedDataset` takes it."""

    index: int | list[int]


class _Indices(list[Any]):
    """The indices of a microbatch, of which there can be none, with its bucket."""

    def __init__(self, indices: Sequence[Any], bucket: Bucket | PairBucket) -> None:
        super().__init__(indices)
        self.bucket = bucket


class PlanBatchSampler(Sampler[list[Any]]):
    """The microbatches of one replica, in the plan's order, for a DataLoader's `batch_sampler`.

    Every replica gets the same number of microbatches, M / num_replicas a step. Each is a list of sample ids, at most
    B; for packed rows a list of lists of ids. A plain dataset can be indexed with them. `PlannedDataset` makes items of
    them that know their bucket.

    A run that stopped after s steps goes on with `list(sampler)[s * M // num_replicas :]` as the `batch_sampler`.

    Args:
        plan: the plan; M must be a multiple of `num_replicas`. It splits no sample.
        rank: this replica, 0 <= rank < num_replicas. It gets microbatches rank * M / num_replicas and the following.
        num_replicas: how many replicas share each step.
        padding_rows: "omit": a microbatch has fewer than B indices where the plan has padding rows, and none where it
            has nothing else. "repeat": B always; padding rows repeat the first row of the step, by indices that only a
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
        if plan.piece_starts is not None and plan.piece_starts.any():
            raise ValueError("the plan splits samples, which indices cannot say: read it with torch_ref.load")
        self._repeats = padding_rows == "repeat"
        self._num_microbatches = plan.microbatches_per_step // num_replicas
        self._plan = plan

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield lists of sample ids, or of lists of them."""
        for step, index in enumerate(self._plan.step_bucket.tolist()):
            bucket, rows_MxB = self._plan.buckets[index], self._plan.rows(step)
            first = _Repeated(*_without_padding(rows_MxB[0, :1].tolist()))
            for rows_B in rows_MxB[self._share].tolist():
                indices = _without_padding(rows_B)
                yield _Indices(indices + [first] * (bucket.rows - len(indices)) * self._repeats, bucket)

    def __len__(self) -> int:
        """Return the number of microbatches of this replica in the epoch."""
        return self._plan.num_steps * self._num_microbatches


class PlannedRow(NamedTuple):
    """An item of a `PlannedDataset`.

    Attributes:
        sample: what the dataset holds; for a packed row the list of its samples; None for a padding row that repeats
            none.
        bucket: the shape of its microbatch.
        is_real: False for a padding row, whose loss weight must be 0.
        ids: the id of the sample, or the ids of the samples; None where the sample is.
    """

    sample: Any
    bucket: Bucket | PairBucket
    is_real: bool
    ids: int | list[int] | None


class PlannedDataset(Dataset[PlannedRow]):
    """A map-style dataset whose items know their bucket, for the indices of a `PlanBatchSampler`.

    A microbatch without samples is one item that is not real.

    Args:
        plan: the plan of the sampler.
        dataset: sample i is `dataset[i]`, of any kind.

    Raises:
        IndexError: when an item is read that is none, -1 among them.
        ValueError: likewise, if the plan holds no such sample.

    Example:
        >>> from torch_ref import make_plan
        >>> plan = make_plan([1, 2, 4], [(3, 2), (1, 4)], order="length")
        >>> planned = PlannedDataset(plan, [[7], [7, 8], [1, 2, 3, 4]])
        >>> planned[1]
        PlannedRow(sample=[7, 8], bucket=Bucket(rows=3, length=2), is_real=True, ids=1)
        >>> loader = DataLoader(planned, batch_sampler=PlanBatchSampler(plan), collate_fn=planned.collate)
        >>> [batch.tokens.tolist() for batch in loader]
        [[[[7, 0], [7, 8], [0, 0]]], [[[1, 2, 3, 4]]]]
    """

    def __init__(self, plan: Plan, dataset: SampleSource) -> None:
        """Look up the bucket of every sample."""
        self._plan = plan
        self._dataset = dataset
        self._bucket_of = np.full(int(plan.sample_ids.max()) + 1, -1, dtype=np.int32)
        self._bucket_of[plan.sample_ids] = np.repeat(plan.step_bucket, plan.num_sequences)

    def __getitem__(self, index: Any) -> PlannedRow:
        """Return a row by what the sampler gives for it: a sample id, or a list of them."""
        is_real = not isinstance(index, _Repeated)
        ids = index if is_real else index.index
        for sample_id in ids if isinstance(ids, list) else [ids]:
            if not 0 <= sample_id < len(self):
                raise IndexError(f"there is no sample {sample_id}, the plan knows {len(self)}")
            if self._bucket_of[sample_id] < 0:
                raise ValueError(f"sample {sample_id} is not in the plan")
        sample = [self._dataset[i] for i in ids] if isinstance(ids, list) else self._dataset[ids]
        bucket = self._plan.buckets[self._bucket_of[ids[0] if isinstance(ids, list) else ids]]
        return PlannedRow(sample, bucket, is_real, ids)

    def __getitems__(self, indices: _Indices) -> list[PlannedRow]:
        """Return the rows of a microbatch; DataLoader calls this."""
        return [self[index] for index in indices] or [PlannedRow(None, indices.bucket, False, None)]

    def __len__(self) -> int:
        """Return one more than the largest sample id of the plan."""
        return len(self._bucket_of)

    def collate(self, rows: Sequence[PlannedRow]) -> Batch:
        """Pad a microbatch to its bucket, padding rows included: a DataLoader's `collate_fn`.

        Args:
            rows: the items of one microbatch. Their samples are as for `load`.

        Returns:
            A `Batch` with m = 1, which `train_step` and compiled buckets take; its `num_sequences` counts the samples
            of this microbatch. Rows that are not real have weight 0.

        Raises:
            ValueError: as `load` while iterating; or if the plan is one of pairs.
        """
        bucket = rows[0].bucket
        if len(bucket) != 2:
            raise ValueError(f"collate pads samples of one length, the plan has buckets of pairs like {bucket}")
        placed: list[_Placed] = []
        for place, row in enumerate(rows):
            if row.ids is not None:
                ids, samples = (row.ids, row.sample) if isinstance(row.ids, list) else ([row.ids], [row.sample])
                placed += [(0, place, i, sample, None, row.is_real) for i, sample in zip(ids, samples, strict=True)]
        batch = _filled(self._plan, bucket, 1, placed)
        return batch._replace(num_sequences=float(sum(is_real for *_, is_real in placed)))


# A sample in its row of a batch: microbatch, row, id, sample, the tokens of its piece (None where it is not split), and
# whether it counts.
_Placed = tuple[int, int, int, Any, slice | None, bool]


class _Steps(Dataset[Batch]):
    """The steps of a plan as a dataset of batches, so that a DataLoader worker prepares whole steps."""

    def __init__(self, plan: Plan, dataset: SampleSource, share: slice) -> None:
        self._plan = plan
        self._dataset = dataset
        self._share = share

    def __getitem__(self, step: int) -> Batch:
        plan = self._plan
        rows_MxB = plan.rows(step)[self._share]  # of packed rows [M, B, P]
        pieces_MxBxP, ends_MxBxP = plan.pieces(step), plan.ends(step)
        rows_MxBxP = rows_MxB[..., None] if plan.row_offsets is None else rows_MxB

        def placed() -> Iterator[_Placed]:
            for m, row, segment in np.argwhere(rows_MxBxP >= 0).tolist():
                sample_id = int(rows_MxBxP[m, row, segment])
                piece = None
                if pieces_MxBxP is not None and ends_MxBxP is not None:
                    piece = slice(pieces_MxBxP[self._share][m, row, segment], ends_MxBxP[self._share][m, row, segment])
                yield m, row, sample_id, self._dataset[sample_id], piece, True

        bucket = plan.buckets[plan.step_bucket[step]]
        return _filled(plan, bucket, len(rows_MxB), placed())._replace(num_sequences=float(plan.num_sequences[step]))


def _filled(plan: Plan, bucket: tuple[int, ...], num_microbatches: int, placed: Iterable[_Placed]) -> Batch:
    """Return a batch of these samples, those of a row in their order; of no sequences yet."""
    num_rows, length = bucket
    packed = plan.row_offsets is not None
    tokens_MxBxT = np.zeros((num_microbatches, num_rows, length), dtype=np.int64)
    weights_MxBxT = np.zeros(tokens_MxBxT.shape, dtype=np.float32)
    segments_MxBxT, positions_MxBxT = np.zeros_like(tokens_MxBxT), np.zeros_like(tokens_MxBxT)
    lengths_MxB = np.zeros(tokens_MxBxT.shape[:2], dtype=np.int64)
    before: tuple[int, int] | None = None
    ids: list[int] = []
    end = 0
    for m, row, sample_id, given, piece, is_real in placed:
        if before != (m, row):
            before, ids, end = (m, row), [], 0
        ids.append(sample_id)
        sample, weights = _read(plan, sample_id, given, piece, length)
        # Each sample begins where the one before it ended.
        start, end = end, end + len(sample)
        if end > length:
            raise ValueError(
                f"row {ids} takes {end} tokens, its bucket's limit is {length}: "
                "the plan was made for other lengths than the dataset has"
            )
        tokens_MxBxT[m, row, start:end] = sample
        weights_MxBxT[m, row, start:end] = weights if is_real else 0
        if packed:
            segments_MxBxT[m, row, start:end] = len(ids)
            positions_MxBxT[m, row, start:end] = np.arange(len(sample))
        lengths_MxB[m, row] = end
    return Batch(
        tokens=torch.from_numpy(tokens_MxBxT),
        lengths=torch.from_numpy(lengths_MxB),
        weights=torch.from_numpy(weights_MxBxT),
        num_sequences=0.0,
        segment_ids=torch.from_numpy(segments_MxBxT) if packed else None,
        positions=torch.from_numpy(positions_MxBxT) if packed else None,
    )


def _read(
    plan: Plan, sample_id: int, given: Any, piece: slice | None, limit: int
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Return the tokens of a sample and their weights, cut as planned."""
    try:
        sample = given.tokens if isinstance(given, WeightedTokens) else np.asarray(given)
    except ValueError:  # tokens and a label, say
        raise ValueError(f"sample {sample_id} must be a 1-D array of integers, got {type(given).__name__}") from None
    if sample.ndim != 1 or sample.size == 0 or sample.dtype.kind not in "iu":
        raise ValueError(
            f"sample {sample_id} must be a 1-D array of integers with at least one element, "
            f"got {sample.dtype} of shape {sample.shape}"
        )
    weights = given.weights if isinstance(given, WeightedTokens) else np.ones(len(sample), dtype=np.float32)
    if piece is not None:
        return sample[piece], weights[piece]
    # Only samples of the longest bucket were planned to be cut: elsewhere the plan was made for other lengths.
    if len(sample) > limit and not (plan.overlong == "truncate" and limit == plan.buckets[-1][1]):
        raise ValueError(
            f"sample {sample_id} has length {len(sample)}, its bucket's limit is {limit}: "
            "the plan was made for other lengths than the dataset has"
        )
    return sample[:limit], weights[:limit]


def load(
    plan: Plan,
    dataset: SampleSource,
    *,
    rank: int = 0,
    num_replicas: int = 1,
    start_step: int = 0,
    num_workers: int = 0,
) -> DataLoader[Batch]:
    """Read a replica's batches in the plan's order.

    Args:
        plan: the plan; M must be a multiple of `num_replicas`.
        dataset: sample i is `dataset[i]`, a 1-D integer array (uint8, say) as long as it was for the plan; or
            `WeightedTokens`, whose weights go into the batch.
        rank: this replica, 0 <= rank < num_replicas.
        num_replicas: how many replicas share each step.
        start_step: the first step to read, 0 <= start_step <= num_steps; where a run stopped, say.
        num_workers: processes that read ahead; 0 reads in this one.

    Returns:
        An iterable of `Batch`es with m = M / num_replicas, one for each step from `start_step`; those of packed rows
        have segment ids and positions. Iterating raises a
        ValueError that names the sample, its length and the limit for one longer than its bucket, unless the plan
        truncates and the bucket is the longest.

    Raises:
        ValueError: if an argument is out of its range, `num_replicas` does not divide M, or the plan is one of pairs.
    """
    if len(plan.buckets[0]) != 2:
        raise ValueError(f"load reads samples of one length, the plan has buckets of pairs like {plan.buckets[0]}")
    start_step = check_integer("start_step", start_step, minimum=0, maximum=plan.num_steps)
    num_workers = check_integer("num_workers", num_workers, minimum=0)
    steps = _Steps(plan, dataset, _share(plan, rank, num_replicas))
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
    size, rest = divmod(plan.microbatches_per_step, num_replicas)
    if rest:
        raise ValueError(
            f"num_replicas={num_replicas} must divide the plan's microbatches_per_step={plan.microbatches_per_step}"
        )
    return slice(rank * size, (rank + 1) * size)
