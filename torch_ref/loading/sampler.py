"""The microbatches of a replica as lists of sample ids, epoch by epoch, for the `DataLoader`s of others."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
from torch import distributed
from torch.utils.data import Sampler

from torch_ref.checks import MAX_LISTED, check_count, check_integer, known_keywords
from torch_ref.planning.buckets import Bucket, MultiLengthBucket
from torch_ref.planning.plan import Plan

__all__ = ["Indices", "PlanBatchSampler", "Repeated", "StepCounts", "share_of"]


@dataclass(frozen=True)
class Repeated:
    """The index of a row that is read again, as a padding row: no dataset but a `PlannedDataset` takes it."""

    index: int | list[int]

    def __index__(self) -> NoReturn:
        """Refuse to be the index of any other dataset, which would read a padding row as a sample."""
        raise ValueError(
            'padding_rows="repeat" is for a PlannedDataset, which knows padding rows from samples: make one of this '
            "dataset, PlannedDataset(sampler, dataset)"
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
            "PlannedDataset(sampler, dataset)"
        )


class StepCounts(NamedTuple):
    """Real samples and tokens of a whole step, and how many microbatches of it the sampler gives."""

    num_sequences: int
    num_tokens: int
    num_microbatches: int


class Indices(list[Any]):
    """The indices of a microbatch, maybe none, with its bucket, the counts of its step, and a row of the same group.

    `windows` are where what stays of each sample of the group begins and ends, by id; None where all have a beginning.
    """

    def __init__(
        self,
        indices: Sequence[Any],
        bucket: Bucket | MultiLengthBucket,
        counts: StepCounts,
        first: Any,
        windows: dict[int, tuple[Any, Any]] | None = None,
    ) -> None:
        super().__init__(indices)
        self.bucket, self.counts, self.first, self.windows = bucket, counts, first, windows


@known_keywords
class PlanBatchSampler(Sampler[list[Any]]):
    """The microbatches of one replica, epoch by epoch, in the plan's order: a DataLoader's `batch_sampler`.

    Every replica gets the same number of microbatches, M / num_replicas a group. Each is a list of sample ids, at most
    B; for packed rows a list of lists of ids. A plain dataset can be indexed with ids, a tensor with such a list too.
    `PlannedDataset` makes items of all of them that know their bucket.

    It is for training loops of others. A step is several batches in a row, whose gradients the loop must add up
    (`gradient_accumulation_steps` of trainers), unless each step has one group and M is `num_replicas`. `train_step`
    takes all of them at once, as `load` gives them, and refuses one of several.

    accelerate's `prepare` deals the batches of a sampler without `rank` and `num_replicas` out to its processes, in
    turn; their number must divide M, so that they share each step. A sampler that has its share already, a plan whose
    steps they cannot share, or a sampler without a share that nobody deals out is refused when it is read.

    Args:
        plan: a plan, the same for every epoch; or a function that gives that of an epoch, such as `plan.of_epoch`. M
            must be a multiple of `num_replicas`. It splits no sample. Samples that it cuts are read whole;
            `PlannedDataset.collate` cuts them.
        rank: this replica, 0 <= rank < num_replicas. It gets microbatches rank * M / num_replicas and the following.
            None: the only process has all, or `prepare` deals them out.
        num_replicas: how many replicas share each step. With `rank=0, num_replicas=1` each of several processes reads
            all microbatches, for tensor parallelism.
        num_microbatches: how many microbatches each step has, for trainers that accumulate a constant number: empty
            ones, of a bucket of the step, fill it up. None: as many as the groups of the step have.
        padding_rows: "omit": a microbatch has fewer than B indices where the plan has padding rows, and none where it
            has nothing else. "repeat": B always; padding rows repeat the first row of the group, by indices that only a
            `PlannedDataset` takes, for a loss weight of 0.

    Attributes:
        plan: the plan of the epoch that is set.
        epoch: that epoch; 0 at first.

    Raises:
        ValueError: if `num_replicas` does not divide M, there is no such rank, only one of the two is given, the plan
            splits samples, or a step has more than `num_microbatches`.

    Example:
        >>> from torch_ref import make_plan
        >>> plan = make_plan([1, 2, 2, 4, 3], [(2, 2), (1, 4)], order="length")
        >>> list(PlanBatchSampler(plan))
        [[0, 1], [2], [4], [3]]
    """

    def __init__(
        self,
        plan: Plan | Callable[[int], Plan],
        rank: int | None = None,
        num_replicas: int | None = None,
        *,
        num_microbatches: int | None = None,
        padding_rows: str = "omit",
    ) -> None:
        """Make the plan of epoch 0, and check the share."""
        if padding_rows not in ("omit", "repeat"):
            raise ValueError(f'padding_rows must be "omit" or "repeat", got {padding_rows!r}')
        self._repeats = padding_rows == "repeat"
        self._plan_of_epoch = plan if callable(plan) else None
        self.plan: Plan = plan(0) if callable(plan) else plan
        if (rank is None) != (num_replicas is None):
            raise ValueError(f"give rank and num_replicas, or neither: got rank={rank}, num_replicas={num_replicas}")
        self._is_dealt_out = rank is None
        self._num_replicas = 1 if num_replicas is None else num_replicas
        self._share = share_of(self.plan, 0 if rank is None else rank, self._num_replicas)
        self._num_filled = check_count("num_microbatches", num_microbatches)
        self.epoch, self._start_step = 0, 0
        self._epoch_is: Literal["set", "loaded", "read"] = "set"  # loaded: by a state, and no iterator made since
        self._told: tuple[int, int] | None = None  # the epoch whose length was asked for last, and that length
        self._check(self.plan)

    @property
    def sampler(self) -> "PlanBatchSampler":
        """The sampler itself: accelerate and Lightning call `set_epoch` on this attribute."""
        return self

    @property
    def batch_sampler(self) -> "PlanBatchSampler":
        """The sampler itself: the Trainer of transformers calls `set_epoch` on this attribute."""
        return self

    @property
    def num_microbatches(self) -> int:
        """The most microbatches that this sampler gives of a step: `gradient_accumulation_steps` of one process."""
        return self._num_filled or int(self._num_by_step(self.plan).max())

    @property
    def padding(self) -> float:
        """The share of all positions of the epoch, in all replicas' batches, that hold no real token."""
        plan, sizes = self.plan, _sizes(self.plan)
        filled = 0
        if self._num_filled is not None:
            missing = self._num_filled - self._num_by_step(plan)
            filled = int((missing * np.minimum.reduceat(sizes, plan.step_groups[:-1])).sum()) * self._num_replicas
        return 1.0 - int(plan.group_tokens.sum()) / (int(plan.positions.sum()) + filled)

    def set_epoch(self, epoch: int) -> None:
        """Take the plan of an epoch, before the epoch is read; trainers call this.

        Args:
            epoch: 0 <= epoch < 2**63.

        Raises:
            ValueError: if the sampler has one plan, and that of this epoch would be another; if the plan has other
                buckets than before; if a state of another epoch was loaded and not read yet; or if the plan of this
                epoch was read to its end.
        """
        epoch = check_integer("epoch", epoch, minimum=0)
        if epoch == self.epoch:
            self._check_unread()
            return
        if self._epoch_is == "loaded":
            raise ValueError(
                f"the state that was loaded is of epoch {self.epoch}, and the loop begins with epoch {epoch}: begin "
                f"with epoch {self.epoch} (after accelerate's prepare, loader.set_epoch({self.epoch}))"
            )
        self.plan, self.epoch, self._start_step = self._plan_of(epoch), epoch, 0
        self._epoch_is = "set"

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return where to go on, in this process or on another number of replicas.

        Args:
            step: how many steps of this epoch the optimizer has taken. Only the loop knows: DataLoader reads ahead.

        Returns:
            The epoch, the step and the digest of the plan.

        Raises:
            ValueError: if the epoch does not have so many steps.
        """
        step = check_integer("step", step, minimum=0, maximum=self.plan.num_steps)
        return {"epoch": self.epoch, "step": step, "digest": self.plan.digest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the epoch of a state, and let the next iteration begin after its steps.

        Args:
            state_dict: what `state_dict` gave.

        Raises:
            ValueError: if the plan of that epoch is another.
        """
        epoch, step = state_dict["epoch"], state_dict["step"]
        plan = self.plan if epoch == self.epoch else self._plan_of(epoch)
        if plan.digest != state_dict["digest"]:
            raise ValueError(
                f"the state is of a plan with digest {state_dict['digest'][:16]}, that of epoch {epoch} has "
                f"{plan.digest[:16]}: make the plan from the same lengths with the same arguments"
            )
        self.plan, self.epoch, self._start_step = plan, epoch, step
        self._epoch_is = "loaded"

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield lists of sample ids, or of lists of them.

        Raises:
            ValueError: if the epoch was read to its end, and epochs differ; if whoever reads shards again, or several
                processes read and nobody shards; if
                the epoch has more batches than a loop was told that asked for their number in another epoch; or, from
                the iterator, if another epoch is set before its end and it is read on.
        """
        self._check_reader([*_callers(sys._getframe(1))])
        self._check_unread()
        length = self._num_batches()
        if self._told is not None and self._told[0] != self.epoch and self._told[1] < length:
            raise ValueError(
                f"epoch {self.epoch} has {length} batches, and the loop was told of {self._told[1]}, those of epoch "
                f"{self._told[0]}: trainers that ask once would leave the last out. Plan epochs of as many steps each "
                "(those of packed rows vary), or ask for the length after set_epoch"
            )
        self._epoch_is = "set"
        return self._read(self.plan, self.epoch, self._start_step)

    def __len__(self) -> int:
        """Return the number of microbatches of this replica in the epoch, also where a state goes on within it."""
        self._told = self.epoch, self._num_batches()
        return self._told[1]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what makes other epochs, which need not be picklable; a process that reads has the indices."""
        return vars(self) | {"_plan_of_epoch": None}

    def _read(self, plan: Plan, epoch: int, start_step: int) -> Iterator[list[Any]]:
        """Yield the microbatches of a plan from a step on, all as they were when the iterator was made."""
        for step in range(start_step, plan.num_steps):
            for indices in self._step(plan, step):
                if self.epoch != epoch:
                    raise ValueError(
                        f"set_epoch({self.epoch}) came while epoch {epoch} is read: set the epoch before the "
                        "DataLoader's iterator is made. Lightning makes it before it sets the epoch of a resumed run: "
                        "set it in train_dataloader(), to the epoch of the checkpoint"
                    )
                yield indices
        if self.epoch == epoch:
            self._epoch_is, self._start_step = "read", 0

    def _step(self, plan: Plan, step: int) -> Iterator[list[Any]]:
        """Yield the microbatches of a step, filled up."""
        groups = plan.groups(step)
        num_held = len(groups) * (plan.num_microbatches // self._num_replicas)
        filled = self._num_filled or num_held
        counts = StepCounts(int(plan.num_sequences[step]), int(plan.num_tokens[step]), filled)
        for group in groups:
            yield from self._microbatches(plan, group, counts)
        if filled > num_held:
            least = min(groups, key=_sizes(plan).__getitem__)
            bucket, first = plan.buckets.shapes[plan.group_bucket[least]], _first(plan.rows(least))
            padding = [Repeated(first)] * bucket.rows * self._repeats
            for _ in range(filled - num_held):
                yield Indices(padding, bucket, counts, first, _windows(plan, least))

    def _microbatches(self, plan: Plan, group: int, counts: StepCounts) -> Iterator[list[Any]]:
        """Yield those of a group, for a step of these counts."""
        bucket, rows_MxB = plan.buckets.shapes[plan.group_bucket[group]], plan.rows(group)
        first, windows = _first(rows_MxB), _windows(plan, group)
        for rows_B in rows_MxB[self._share].tolist():
            indices = _without_padding(rows_B)
            if plan.row_offsets is not None:
                indices = [*map(_Row, indices)]
            indices += [Repeated(first)] * (bucket.rows - len(indices)) * self._repeats
            yield Indices(indices, bucket, counts, first, windows)

    def _num_by_step(self, plan: Plan) -> Any:
        """Return how many microbatches this replica has of each step, int64[S]."""
        return np.diff(plan.step_groups) * (plan.num_microbatches // self._num_replicas)

    def _num_batches(self) -> int:
        """Return how many batches the sampler gives in the epoch."""
        if self._num_filled is not None:
            return self.plan.num_steps * self._num_filled
        return int(self._num_by_step(self.plan).sum())

    def _plan_of(self, epoch: int) -> Plan:
        """Return the plan of another epoch."""
        if self._plan_of_epoch is None:
            if self.plan.plan_epoch is None or self.plan.of_epoch(epoch).digest != self.plan.digest:
                raise ValueError(
                    f"the sampler has the plan of one epoch, which is not that of epoch {epoch}: give it a function "
                    "such as plan.of_epoch, or lambda epoch: plan to repeat the same steps"
                )
            return self.plan
        plan = self._plan_of_epoch(epoch)
        shapes = [(each.buckets.shapes, each.num_microbatches) for each in (self.plan, plan)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"epoch {epoch} has other buckets or num_microbatches than epoch {self.epoch}: {shapes}")
        self._check(plan)
        return plan

    def _check(self, plan: Plan) -> None:
        if plan.is_split and plan.chunk_starts is not None and plan.chunk_starts.any():
            raise ValueError("the plan splits samples, which indices cannot say: read it with torch_ref.load")
        num_by_step = self._num_by_step(plan)
        if self._num_filled is not None and num_by_step.max() > self._num_filled:
            steps = np.flatnonzero(num_by_step > self._num_filled)
            found = ", ".join(f"step {step}: {num_by_step[step]}" for step in steps[:MAX_LISTED])
            raise ValueError(
                f"num_microbatches={self._num_filled} are fewer than {len(steps)} steps have ({found}): give at least "
                f"{num_by_step.max()}"
            )

    def _check_unread(self) -> None:
        """Raise ValueError if the epoch was read to its end and epochs differ."""
        if self._epoch_is == "read" and self._plan_of_epoch is not None:
            raise ValueError(
                f"epoch {self.epoch} was read to its end: call set_epoch with the next one before each epoch (after "
                f"accelerate's skip_first_batches, loader.set_epoch({self.epoch + 1})), or to read this one again "
                "load_state_dict(sampler.state_dict(0))"
            )

    def _check_reader(self, callers: list[Any]) -> None:
        """Raise ValueError if who reads shards the batches of this sampler and cannot share its steps, or nobody does.

        accelerate's classes say nothing to what they wrap, so they are taken from the callers' frames.
        """
        reader = callers[0]
        name = type(reader).__name__
        if any(type(caller).__name__ == "DataLoaderDispatcher" for caller in callers):
            raise ValueError(
                "dispatch_batches=True joins microbatches of several shapes, or deals out a share again: prepare the "
                "DataLoader with DataLoaderConfiguration(dispatch_batches=False), or in Trainer accelerator_config="
                "{'dispatch_batches': False}"
            )
        num_processes = getattr(reader, "num_processes", 1) if getattr(reader, "batch_sampler", None) is self else 1
        if num_processes == 1:
            if self._is_dealt_out and (count := _num_processes()) > 1:
                raise ValueError(
                    f"each of {count} processes would read all microbatches: give the DataLoader to accelerate's "
                    "prepare (in Trainer, self.accelerator.prepare), or make the sampler with rank and num_replicas, "
                    "or with rank=0, num_replicas=1 if all are to read the same, as in tensor parallelism"
                )
            return
        if self._num_replicas > 1:
            raise ValueError(
                f"sharded twice: the sampler gives the share of one of {self._num_replicas} replicas, and {name} "
                f"deals it out to {num_processes} processes again. Make the sampler without rank and num_replicas "
                "where accelerate prepares the DataLoader, or do not prepare it"
            )
        if self.plan.has_many_groups and self._num_filled is None:
            raise ValueError(
                f"steps have up to {self.num_microbatches} microbatches, and {name} counts on the same number in each: "
                f"give num_microbatches={self.num_microbatches}, or the most of all epochs"
            )
        for count in (self.plan.num_microbatches, self._num_filled or self.plan.num_microbatches):
            if count % num_processes:
                raise ValueError(
                    f"{name} deals batches out to {num_processes} processes, which do not share steps of {count} "
                    f"microbatches evenly: plan with num_microbatches={num_processes}, or a multiple of it"
                )


def _num_processes() -> int:
    """Return how many processes torch.distributed has."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _callers(frame: FrameType | None) -> Iterator[Any]:
    """Yield the objects whose methods call, the nearest first: who reads, torch's loader and the wrapper around it."""
    for _ in range(8):
        if frame is None:
            return
        yield frame.f_locals.get("self")
        frame = frame.f_back


def share_of(plan: Plan, rank: int, num_replicas: int) -> slice:
    """Return the microbatches of a replica."""
    num_replicas = check_integer("num_replicas", num_replicas)
    rank = check_integer("rank", rank, minimum=0, maximum=num_replicas - 1)
    size, rest = divmod(plan.num_microbatches, num_replicas)
    if rest:
        raise ValueError(f"num_replicas={num_replicas} must divide the plan's num_microbatches={plan.num_microbatches}")
    return slice(rank * size, (rank + 1) * size)


def _sizes(plan: Plan) -> Any:
    """Return the positions of one microbatch of each group, int64[G]."""
    return plan.positions // plan.num_microbatches


def _windows(plan: Plan, group: int) -> dict[int, tuple[Any, Any]] | None:
    """Return where what stays of each sample of a group begins and ends, where the plan cuts beginnings."""
    if plan.chunk_starts is None or plan.chunk_ends is None or plan.is_split:
        return None
    of_group = slice(*plan.group_offsets[group : group + 2])
    bounds = zip(plan.chunk_starts[of_group].tolist(), plan.chunk_ends[of_group].tolist(), strict=True)
    return dict(zip(plan.sample_ids[of_group].tolist(), bounds, strict=True))


def _first(rows_MxB: Any) -> int | list[int]:
    """Return the first row of a group."""
    (first,) = _without_padding(rows_MxB[0, :1].tolist())
    return first


def _without_padding(rows: list[Any]) -> list[Any]:
    """Return the rows, ids or lists of them, without -1 and without those that hold nothing else."""
    if rows and isinstance(rows[0], list):
        return [ids for row in rows if (ids := _without_padding(row))]
    return [sample_id for sample_id in rows if sample_id >= 0]
