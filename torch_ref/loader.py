"""A plan and a dataset in, padded batches of one replica out, step by step, through torch's DataLoader."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from torch_ref.checks import check_integer
from torch_ref.plan import Plan


class Batch(NamedTuple):
    """A replica's share of a step, or one microbatch of it (then without the leading m).

    Attributes:
        tokens: int64[m, B, T], 0 where there is no token.
        lengths: int64[m, B], real tokens of each row, 0 for a dummy row.
        weights: float32[m, B, T], 1 on real tokens, 0 elsewhere.
        num_sequences: real samples of the whole step, over all replicas.
    """

    tokens: Tensor
    lengths: Tensor
    weights: Tensor
    num_sequences: float


class SampleSource(Protocol):
    """What `load` reads from: sample i is a 1-D array of integers."""

    def __getitem__(self, index: int, /) -> Any:
        """Return sample `index`."""


class PlanBatchSampler(Sampler[list[int]]):
    """The microbatches of one replica, in the plan's order, for a DataLoader's `batch_sampler`.

    Yields the B sample ids of a microbatch, -1 marking a dummy row, M / num_replicas microbatches a step. Every replica
    gets the same number of microbatches. A dataset behind it must know what -1 stands for.

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

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of B sample ids."""
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
        rows_MxB = self._plan.rows(step)[self._share]
        length = self._plan.buckets[self._plan.step_bucket[step]].length
        tokens_MxBxT = np.zeros((*rows_MxB.shape, length), dtype=np.int64)
        lengths_MxB = np.zeros(rows_MxB.shape, dtype=np.int64)
        for place in zip(*np.nonzero(rows_MxB >= 0), strict=True):
            sample = self._read(int(rows_MxB[place]), length)
            tokens_MxBxT[place][: len(sample)] = sample
            lengths_MxB[place] = len(sample)
        lengths = torch.from_numpy(lengths_MxB)
        weights = (torch.arange(length) < lengths[..., None]).to(torch.float32)
        return Batch(torch.from_numpy(tokens_MxBxT), lengths, weights, float(self._plan.num_sequences[step]))

    def _read(self, sample_id: int, limit: int) -> NDArray[Any]:
        sample = np.asarray(self._dataset[sample_id])
        if sample.ndim != 1 or sample.size == 0 or sample.dtype.kind not in "iu":
            raise ValueError(
                f"sample {sample_id} must be a 1-D array of integers with at least one element, "
                f"got {sample.dtype} of shape {sample.shape}"
            )
        # Only samples of the longest bucket were planned to be cut: elsewhere the plan was made for other lengths.
        if len(sample) > limit and not (self._plan.overlong == "truncate" and limit == self._plan.buckets[-1].length):
            raise ValueError(
                f"sample {sample_id} has length {len(sample)}, its bucket's limit is {limit}: "
                "the plan was made for other lengths than the dataset has"
            )
        return sample[:limit]


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
        dataset: sample i is `dataset[i]`, a 1-D integer array (uint8, say) as long as it was for the plan.
        rank: this replica, 0 <= rank < num_replicas.
        num_replicas: how many replicas share each step.
        start_step: the first step to read, 0 <= start_step <= num_steps; where a run stopped, say.
        num_workers: processes that read ahead; 0 reads in this one.

    Returns:
        An iterable of `Batch`es with m = M / num_replicas, one for each step from `start_step`. Iterating raises a
        ValueError that names the sample, its length and the limit for one longer than its bucket, unless the plan
        truncates and the bucket is the longest.

    Raises:
        ValueError: if an argument is out of its range or `num_replicas` does not divide M.
    """
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
