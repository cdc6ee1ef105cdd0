"""Loads the padded batches of one replica, step by step, with torch's DataLoader."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from torch_ref.checks import check_integer
from torch_ref.plan import Plan
from torch_ref.weighted import WeightedTokens

__all__ = ["Batch", "PlanBatchSampler", "SampleSource", "load"]


class Batch(NamedTuple):
    """A replica's share of a step, or one microbatch of it (then without the leading m).

    Attributes:
        tokens: int64[m, B, T], 0 where there is no token.
        lengths: int64[m, B], real tokens of each row, 0 for a padding row.
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


class PlanBatchSampler(Sampler[list[Any]]):
    """The microbatches of one replica, in the plan's order, for a DataLoader's `batch_sampler`.

    Yields the B sample ids of a microbatch, -1 marking a padding row, M / num_replicas microbatches a step; for packed
    rows B lists of P ids, -1 where there is no sample. Every replica gets the same number of microbatches. A dataset
    behind it must know what -1 stands for.

    Args:
        plan: the plan; M must be a multiple of `num_replicas`.
        rank: this replica, 0 <= rank < num_replicas. It gets microbatches rank * M / num_replicas and the following.
        num_replicas: how many replicas share each step.

    Raises:
        ValueError: if `num_replicas` does not divide M or there is no such rank.
    """

    def __init__(self, plan: Plan, rank: int = 0, num_replicas: int = 1) -> None:
        """Check the share."""
        self._share = _share(plan, rank, num_replicas)
        self._num_microbatches = plan.microbatches_per_step // num_replicas
        self._plan = plan

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield lists of B sample ids, or of B lists of them."""
        for step in range(self._plan.num_steps):
            yield from self._plan.rows(step)[self._share].tolist()

    def __len__(self) -> int:
        """Return the number of microbatches of this replica in the epoch."""
        return self._plan.num_steps * self._num_microbatches


class _Steps(Dataset[Batch]):
    """The steps of a plan as a dataset of batches, so that a DataLoader worker prepares whole steps."""

    def __init__(self, plan: Plan, dataset: SampleSource, share: slice) -> None:
        self._plan = plan
        self._dataset = dataset
        self._share = share

    def __getitem__(self, step: int) -> Batch:
        rows_MxB = self._plan.rows(step)[self._share]  # of packed rows [M, B, P]
        length = self._plan.buckets[self._plan.step_bucket[step]][1]
        packed = self._plan.row_offsets is not None
        pieces_MxBxP = self._plan.pieces(step)
        pieces_MxBxP = None if pieces_MxBxP is None else pieces_MxBxP[self._share]
        rows_MxBxP = rows_MxB if packed else rows_MxB[..., None]
        tokens_MxBxT = np.zeros((*rows_MxBxP.shape[:2], length), dtype=np.int64)
        weights_MxBxT = np.zeros(tokens_MxBxT.shape, dtype=np.float32)
        segments_MxBxT, positions_MxBxT = np.zeros_like(tokens_MxBxT), np.zeros_like(tokens_MxBxT)
        lengths_MxB = np.zeros(rows_MxBxP.shape[:2], dtype=np.int64)
        # In the order of the places in a row: each sample begins where the one before it ended.
        for *place, segment in np.argwhere(rows_MxBxP >= 0).tolist():
            row = tuple(place)
            before = None if pieces_MxBxP is None else int(pieces_MxBxP[*row, segment])
            sample, weights = self._read(int(rows_MxBxP[*row, segment]), length, before)
            start, end = lengths_MxB[row], lengths_MxB[row] + len(sample)
            if end > length:
                raise ValueError(
                    f"row {rows_MxBxP[row].tolist()} takes {end} tokens, its bucket's limit is {length}: "
                    "the plan was made for other lengths than the dataset has"
                )
            tokens_MxBxT[row][start:end] = sample
            weights_MxBxT[row][start:end] = weights
            segments_MxBxT[row][start:end] = segment + 1
            positions_MxBxT[row][start:end] = np.arange(len(sample))
            lengths_MxB[row] = end
        return Batch(
            tokens=torch.from_numpy(tokens_MxBxT),
            lengths=torch.from_numpy(lengths_MxB),
            weights=torch.from_numpy(weights_MxBxT),
            num_sequences=float(self._plan.num_sequences[step]),
            segment_ids=torch.from_numpy(segments_MxBxT) if packed else None,
            positions=torch.from_numpy(positions_MxBxT) if packed else None,
        )

    def _read(self, sample_id: int, limit: int, before: int | None) -> tuple[NDArray[Any], NDArray[np.float32]]:
        given = self._dataset[sample_id]
        try:
            sample = given.tokens if isinstance(given, WeightedTokens) else np.asarray(given)
        except ValueError:  # tokens and a label, say
            raise ValueError(
                f"sample {sample_id} must be a 1-D array of integers, got {type(given).__name__}"
            ) from None
        if sample.ndim != 1 or sample.size == 0 or sample.dtype.kind not in "iu":
            raise ValueError(
                f"sample {sample_id} must be a 1-D array of integers with at least one element, "
                f"got {sample.dtype} of shape {sample.shape}"
            )
        weights = given.weights if isinstance(given, WeightedTokens) else np.ones(len(sample), dtype=np.float32)
        if before is not None:
            return sample[before : before + limit], weights[before : before + limit]
        # Only samples of the longest bucket were planned to be cut: elsewhere the plan was made for other lengths.
        if len(sample) > limit and not (self._plan.overlong == "truncate" and limit == self._plan.buckets[-1][1]):
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
