"""Lengths and buckets in; out comes the plan: which samples form which step of an epoch, in which static shape."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from torch_ref.buckets import Bucket, check_buckets
from torch_ref.checks import check_integer, to_tensor
from torch_ref.emission import Steps, emit_steps
from torch_ref.lengths import check_lengths, fit_lengths
from torch_ref.order import check_difficulty, sample_order
from torch_ref.plan_file import plan_digest, read_plan_file, write_plan_file
from torch_ref.plan_report import steps_table


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The steps of an epoch, fixed before training and the same on every process.

    Attributes:
        buckets: the K static shapes, by ascending length.
        microbatches_per_step: M, the microbatches of a step.
        step_bucket: int32[S], the bucket of each step.
        step_offsets: int64[S + 1]; step s holds `sample_ids[step_offsets[s]:step_offsets[s + 1]]`.
        sample_ids: int64[n], real samples only.
        num_tokens: int64[S], real tokens of each step (of cut samples what is left of them).
        overlong: the rule the plan was made with: "error" | "drop" | "truncate".
        num_dropped: samples left out because they were too long.
        num_truncated: samples cut to the longest bucket.
    """

    buckets: tuple[Bucket, ...]
    microbatches_per_step: int
    step_bucket: NDArray[np.int32]
    step_offsets: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    overlong: str = "error"
    num_dropped: int = 0
    num_truncated: int = 0

    def __post_init__(self) -> None:
        """Lock the arrays: the digest is computed once."""
        for array in (self.step_bucket, self.step_offsets, self.sample_ids, self.num_tokens):
            array.setflags(write=False)

    @property
    def num_steps(self) -> int:
        """S, the number of steps."""
        return len(self.step_bucket)

    @property
    def num_samples(self) -> int:
        """The number of real samples, n."""
        return len(self.sample_ids)

    @property
    def num_sequences(self) -> NDArray[np.int64]:
        """int64[S], real samples of each step."""
        return np.diff(self.step_offsets)

    @property
    def padding(self) -> float:
        """The share of all positions, dummy rows included, that hold no real token."""
        return 1.0 - int(self.num_tokens.sum()) / int(self._positions().sum())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan as 64 hex digits; equal digests mean the same steps."""
        return plan_digest(
            self.microbatches_per_step, np.array(self.buckets), self.step_bucket, self.step_offsets, self.sample_ids
        )

    def rows(self, step: int) -> NDArray[np.int64]:
        """Return the samples of a step as they lie in its microbatches.

        Args:
            step: 0 <= step < num_steps.

        Returns:
            int64[M, B] sample ids, -1 for a dummy row. Row j of the step lies in microbatch j mod M at slot j // M.

        Raises:
            IndexError: if there is no such step.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} is outside the plan's {self.num_steps} steps")
        ids = self.sample_ids[self.step_offsets[step] : self.step_offsets[step + 1]]
        rows_per_microbatch = self.buckets[self.step_bucket[step]].rows
        rows = np.full(rows_per_microbatch * self.microbatches_per_step, -1, dtype=np.int64)
        rows[: len(ids)] = ids
        return np.ascontiguousarray(rows.reshape(rows_per_microbatch, self.microbatches_per_step).T)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all.

        Args:
            path: where to; an existing file is replaced.

        Raises:
            OSError: if the file cannot be written.
        """
        write_plan_file(
            path,
            microbatches_per_step=self.microbatches_per_step,
            buckets=np.array(self.buckets),
            step_bucket=self.step_bucket,
            step_offsets=self.step_offsets,
            sample_ids=self.sample_ids,
            num_tokens=self.num_tokens,
            num_dropped=self.num_dropped,
            num_truncated=self.num_truncated,
            overlong=self.overlong,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a plan that `save` wrote.

        Args:
            path: the file.

        Returns:
            An equal plan.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is not a plan file, of another version, cut short or changed; the message names it.
        """
        fields = read_plan_file(path)
        return cls(
            buckets=check_buckets([(int(rows), int(length)) for rows, length in fields["buckets"]]),
            microbatches_per_step=int(fields["microbatches_per_step"]),
            step_bucket=fields["step_bucket"],
            step_offsets=fields["step_offsets"],
            sample_ids=fields["sample_ids"],
            num_tokens=fields["num_tokens"],
            overlong=str(fields["overlong"]),
            num_dropped=int(fields["num_dropped"]),
            num_truncated=int(fields["num_truncated"]),
        )

    def report(self) -> str:
        """Return a table: shape, samples, steps and padding of each bucket, then the totals."""
        table = steps_table(self.buckets, self.step_bucket, self.num_sequences, self.num_tokens, self._positions())
        return (
            f"{table}\n{self.microbatches_per_step} microbatches a step; {self.num_dropped:,} samples dropped, "
            f"{self.num_truncated:,} truncated; digest {self.digest[:16]}"
        )

    def _positions(self) -> NDArray[np.int64]:
        per_step = [rows * length * self.microbatches_per_step for rows, length in self.buckets]
        return np.array(per_step, dtype=np.int64)[self.step_bucket]


def make_plan(
    lengths: ArrayLike,
    buckets: Sequence[tuple[int, int]],
    *,
    microbatches_per_step: int = 1,
    order: str | ArrayLike = "length",
    difficulty: ArrayLike | None = None,
    seed: int = 0,
    epoch: int = 0,
    shuffle_steps: bool = False,
    longest_first: bool = False,
    overlong: str = "error",
) -> Plan:
    """Cut the ordered samples into steps of static shapes.

    Args:
        lengths: [N] integers >= 1, in tokens.
        buckets: (rows, length) pairs of strictly ascending lengths; a sample goes to the first that holds it.
        microbatches_per_step: M, data-parallel shards times accumulation.
        order: "length" | "length_descending" | "dataset" | "shuffle", or an array of unique sample ids.
        difficulty: [N] integers or floats to sort by in place of the lengths. Other than the lengths themselves, it
            makes the steps come in the order in which they fill up.
        seed: 0 <= seed < 2**63, chooses the random keys.
        epoch: 0 <= epoch < 2**63, likewise.
        shuffle_steps: shuffle the steps as well, whatever the order of the samples.
        longest_first: swap the first step of the longest bucket in use to the front.
        overlong: samples above the longest bucket: "error" | "drop" | "truncate".

    Returns:
        The plan; it depends on nothing but these arguments.

    Raises:
        ValueError: if an argument is out of its range, or a sample is too long (the first offenders are listed).

    Example:
        >>> plan = make_plan([1, 2, 2, 4], [(2, 2), (1, 4)])
        >>> [plan.rows(step).tolist() for step in range(plan.num_steps)]
        [[[0, 1]], [[2, -1]], [[3]]]
    """
    lengths = check_lengths(lengths)
    buckets = check_buckets(buckets)
    num_microbatches = check_integer("microbatches_per_step", microbatches_per_step)
    values = check_difficulty(difficulty, lengths)
    ids = sample_order(lengths, order, difficulty=difficulty, seed=seed, epoch=epoch)
    fitted = fit_lengths(lengths, ids, buckets[-1].length, overlong)

    edges = torch.tensor([bucket.length for bucket in buckets])
    rows_per_step = torch.tensor([bucket.rows * num_microbatches for bucket in buckets])
    steps = emit_steps(
        torch.bucketize(to_tensor(fitted.lengths), edges),
        rows_per_step,
        order=order if isinstance(order, str) else "array",
        by_length=np.array_equal(values, lengths),
        random_stream=(int(seed), int(epoch), len(lengths)),
        shuffle_steps=shuffle_steps,
        longest_first=longest_first,
    )
    return _gather_plan(steps, fitted.sample_ids, fitted.lengths, buckets, num_microbatches, overlong, fitted[2:])


def _gather_plan(
    steps: Steps,
    sample_ids: NDArray[np.int64],
    lengths: NDArray[np.int64],
    buckets: tuple[Bucket, ...],
    num_microbatches: int,
    overlong: str,
    counts: tuple[int, int],
) -> Plan:
    places = steps.places.numpy()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(steps.num_sequences, dim=0)]).numpy()
    tokens_before = np.concatenate([[0], np.cumsum(lengths[places])])
    return Plan(
        buckets=buckets,
        microbatches_per_step=num_microbatches,
        step_bucket=steps.bucket.to(torch.int32).numpy(),
        step_offsets=offsets,
        sample_ids=sample_ids[places],
        num_tokens=np.diff(tokens_before[offsets]),
        overlong=overlong,
        num_dropped=counts[0],
        num_truncated=counts[1],
    )
