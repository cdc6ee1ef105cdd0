"""Plan: in go lengths and buckets, out comes every step of an epoch, fixed before training.

NumPy only. Letters: N samples, n samples in the plan, S steps, K buckets, M microbatches a step, B rows.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float, Int32, Int64

from jvarlen.buckets import Bucket, check_buckets
from jvarlen.curriculum import check_difficulty, check_seed, random_keys, stable_argsort
from jvarlen.grouping import group_by_bucket
from jvarlen.kernels import take_segments
from jvarlen.lengths import Overlong, check_at_least_one, check_lengths, ends_to_offsets
from jvarlen.plan_file import plan_digest, read_plan_file, write_plan_file

__all__ = ["Plan", "make_plan"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The steps of an epoch: which samples, in which shape, in which order.

    Attributes:
      buckets: the static shapes, lengths ascending.
      microbatches_per_step: M.
      step_bucket: int32[S], the bucket of each step.
      step_offsets: int64[S+1]; step t holds `sample_ids[step_offsets[t]:step_offsets[t+1]]`.
      sample_ids: int64[n], real samples in order of step, then row.
      num_tokens: int64[S], real tokens of each step, cut samples counted as cut.
      overlong: the rule for samples longer than the longest bucket: "error", "drop" or "truncate".
      num_dropped: samples left out by that rule.
      num_truncated: samples cut by that rule.
    """

    buckets: tuple[Bucket, ...]
    microbatches_per_step: int
    step_bucket: Int32[np.ndarray, " S"]
    step_offsets: Int64[np.ndarray, " S_plus_1"]
    sample_ids: Int64[np.ndarray, " n"]
    num_tokens: Int64[np.ndarray, " S"]
    overlong: Overlong = "error"
    num_dropped: int = 0
    num_truncated: int = 0

    def __post_init__(self):
        for array in (self.step_bucket, self.step_offsets, self.sample_ids, self.num_tokens):
            array.setflags(write=False)  # the digest is computed once

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.step_bucket)

    @property
    def num_samples(self) -> int:
        """n, real samples; every one comes exactly once."""
        return len(self.sample_ids)

    @property
    def num_sequences(self) -> Int64[np.ndarray, " S"]:
        """int64[S], real samples of each step."""
        return np.diff(self.step_offsets)

    @property
    def positions_per_step(self) -> Int64[np.ndarray, " S"]:
        """int64[S], tokens that the arrays of each step have room for: M × rows × length."""
        shapes = np.array(self.buckets, np.int64)
        return (self.microbatches_per_step * shapes.prod(axis=1))[self.step_bucket]

    @property
    def padding(self) -> float:
        """The share of all positions that holds no token, dummy rows included, in [0, 1)."""
        return 1.0 - int(self.num_tokens.sum()) / int(self.positions_per_step.sum())

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 in hex of everything that decides the batches: equal digests mean equal batches."""
        return plan_digest(
            self.microbatches_per_step, self.buckets, self.step_bucket, self.step_offsets, self.sample_ids
        )

    def rows(self, step: int) -> Int64[np.ndarray, "M B"]:
        """The sample of every row of a step.

        Args:
          step: 0 ≤ step < S.

        Returns:
          int64[M, B] of sample ids, −1 for a dummy row. Row j of the step lies in microbatch j mod M, slot j // M, so
          that all microbatches hold nearly the same tokens.

        Raises:
          IndexError: no such step.
        """
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of a plan of {self.num_steps} steps")
        num_rows = self.buckets[self.step_bucket[step]].rows
        rows_BxM = np.full((num_rows, self.microbatches_per_step), -1, np.int64)
        ids = self.sample_ids[self.step_offsets[step] : self.step_offsets[step + 1]]
        rows_BxM.reshape(-1)[: len(ids)] = ids
        return rows_BxM.T

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to one uncompressed `.npz` file, in one piece or not at all.

        Args:
          path: the file, whose directory exists; a file of that name is replaced.

        Raises:
          OSError: it cannot be written; what was there stays.
        """
        fields = {field.name: np.asarray(getattr(self, field.name)) for field in dataclasses.fields(self)}
        write_plan_file(Path(path), fields | {"digest": np.array(self.digest)})

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Reads a plan that `save` wrote, and verifies it.

        Args:
          path: the file.

        Returns:
          The plan.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: the file is no plan, is damaged, of another version, or was edited; it says what is wrong.
        """
        fields = read_plan_file(Path(path))
        return Plan(
            buckets=check_buckets(fields["buckets"].tolist()),
            microbatches_per_step=int(fields["microbatches_per_step"]),
            step_bucket=fields["step_bucket"],
            step_offsets=fields["step_offsets"],
            sample_ids=fields["sample_ids"],
            num_tokens=fields["num_tokens"],
            overlong=cast(Overlong, str(fields["overlong"])),
            num_dropped=int(fields["num_dropped"]),
            num_truncated=int(fields["num_truncated"]),
        )

    def report(self, learning_rates: Float[np.ndarray, " S"] | None = None) -> str:
        """A table: per bucket its shape, samples, steps and padding; in total steps, tokens, padding.

        Args:
          learning_rates: float64[S], as from `lr_sequence`; their range is shown.

        Returns:
          Lines of text.
        """
        num_buckets = len(self.buckets)
        steps = np.bincount(self.step_bucket, minlength=num_buckets)
        samples = np.bincount(self.step_bucket, self.num_sequences, num_buckets).astype(np.int64)
        tokens = np.bincount(self.step_bucket, self.num_tokens, num_buckets)
        positions = np.bincount(self.step_bucket, self.positions_per_step, num_buckets)
        padding = 1.0 - tokens / np.maximum(positions, 1)
        lines = [f"{'rows × length':>15} {'samples':>12} {'steps':>8} {'padding':>9}"]
        for bucket, num_samples, num_steps, share in zip(self.buckets, samples, steps, padding, strict=True):
            shown = f"{share:9.2%}" if num_steps else f"{'–':>9}"
            lines.append(f"{bucket.rows:>6,} × {bucket.length:>6,} {num_samples:>12,} {num_steps:>8,} {shown}")
        lines.append(f"{'total':>15} {self.num_samples:>12,} {self.num_steps:>8,} {self.padding:9.2%}")
        lines.append(
            f"{int(self.num_tokens.sum()):,} real tokens in {int(self.positions_per_step.sum()):,} positions; "
            f"microbatches a step: {self.microbatches_per_step}"
        )
        lines.append(
            f"longest bucket {self.buckets[-1].length:,} tokens; overlong={self.overlong!r}: "
            f"{self.num_truncated:,} samples cut, {self.num_dropped:,} dropped"
        )
        if learning_rates is not None:
            lines.append(f"learning rate {learning_rates.min():.3g} to {learning_rates.max():.3g}")
        return "\n".join(lines)


def make_plan(
    lengths: npt.ArrayLike,
    buckets: Sequence[tuple[int, int]],
    *,
    microbatches_per_step: int = 1,
    order: str | npt.ArrayLike = "length",
    difficulty: npt.ArrayLike | None = None,
    seed: int = 0,
    epoch: int = 0,
    shuffle_steps: bool = False,
    longest_first: bool = False,
    overlong: Overlong = "error",
) -> Plan:
    """Plans an epoch: every sample exactly once, in steps of the buckets' shapes.

    A sample goes to the smallest bucket that holds it. The samples of a bucket, in order, are cut into steps of M ×
    rows; only a bucket's last step can be short, and dummy rows fill it.

    Args:
      lengths: integers[N], tokens a sample.
      buckets: (rows, length) pairs, lengths strictly ascending.
      microbatches_per_step: M, microbatches of one optimizer update. The plan depends on it, and on no number of
        devices or processes.
      order: as in `sample_order`. It also decides when a step comes. `"length"`: by bucket ascending.
        `"length_descending"`: by bucket descending. `"shuffle"`: at random. `"dataset"`, an array, or any order with a
        difficulty other than the length: when the step's last sample arrives, short steps at the end.
      difficulty: as in `sample_order`.
      seed: 0 ≤ seed < 2**63.
      epoch: 0 ≤ epoch < 2**63.
      shuffle_steps: permutes the steps at random, whatever the order of the samples.
      longest_first: swaps a step of the longest bucket to the front, so that running out of memory shows at once.
      overlong: what becomes of samples longer than the longest bucket: `"error"`, `"drop"` or `"truncate"`.

    Returns:
      A `Plan`.

    Raises:
      ValueError: arguments that are not as described; offending samples are listed as id, value, limit.

    Example:
      >>> plan = make_plan([3, 1, 4, 2, 8], [(2, 4), (1, 8)], microbatches_per_step=2)
      >>> plan.num_steps, plan.rows(0).tolist()
      (2, [[1, 0], [3, 2]])

    References:
      Batches of near-equal lengths under a token budget, their order shuffled: Ott et al. 2019, "fairseq".
    """
    check_at_least_one(microbatches_per_step=microbatches_per_step)
    lengths = check_lengths(lengths)
    buckets = check_buckets(buckets)
    check_seed(seed, epoch)
    if difficulty is not None and np.array_equal(check_difficulty(difficulty, len(lengths)), lengths):
        difficulty = None
    edges = np.array([bucket.length for bucket in buckets])
    samples = group_by_bucket(lengths, edges, order, difficulty, seed, epoch, overlong)

    steps = _canonical_steps(samples.num_samples, buckets, microbatches_per_step)
    by_arrival = not isinstance(order, str) or order == "dataset" or difficulty is not None
    num_steps = len(steps.bucket)
    if by_arrival and samples.place is not None:
        emitted = _by_arrival(steps, samples.place)
    elif order == "length_descending":
        emitted = np.argsort(-steps.bucket, kind="stable")
    else:
        emitted = np.arange(num_steps)
    if shuffle_steps or (not by_arrival and order == "shuffle"):
        emitted = emitted[stable_argsort(random_keys(num_steps, seed=seed, epoch=epoch, start=len(lengths)))]
    if longest_first:
        first = int((steps.bucket[emitted] == steps.bucket[-1]).argmax())
        emitted[[0, first]] = emitted[[first, 0]]

    is_canonical = bool((np.diff(emitted) == 1).all())
    offsets = steps.offsets if is_canonical else ends_to_offsets(np.cumsum(np.diff(steps.offsets)[emitted]))
    num_tokens = np.add.reduceat(samples.lengths, steps.offsets[:-1], dtype=np.int64)
    return Plan(
        buckets=buckets,
        microbatches_per_step=int(microbatches_per_step),
        step_bucket=steps.bucket[emitted],
        step_offsets=offsets,
        sample_ids=samples.ids if is_canonical else take_segments(samples.ids, steps.offsets, emitted, offsets),
        num_tokens=num_tokens[emitted],
        overlong=overlong,
        num_dropped=samples.num_dropped,
        num_truncated=samples.num_truncated,
    )


class _CanonicalSteps(NamedTuple):
    """Steps by bucket ascending, then position.

    Attributes:
      bucket: int32[S].
      offsets: int64[S+1] into the grouped samples.
      is_full: bool[S], whether all rows are real.
    """

    bucket: Int32[np.ndarray, " S"]
    offsets: Int64[np.ndarray, " S_plus_1"]
    is_full: Bool[np.ndarray, " S"]


def _canonical_steps(
    num_samples: Int64[np.ndarray, " K"], buckets: tuple[Bucket, ...], microbatches_per_step: int
) -> _CanonicalSteps:
    rows_per_step = microbatches_per_step * np.array([bucket.rows for bucket in buckets])
    num_steps = -(-num_samples // rows_per_step)
    bucket = np.repeat(np.arange(len(buckets), dtype=np.int32), num_steps)
    sizes = rows_per_step[bucket]
    has_steps = num_steps > 0
    last = np.cumsum(num_steps)[has_steps] - 1
    sizes[last] = (num_samples - (num_steps - 1) * rows_per_step)[has_steps]
    return _CanonicalSteps(bucket, ends_to_offsets(np.cumsum(sizes)), sizes == rows_per_step[bucket])


def _by_arrival(steps: _CanonicalSteps, place: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " S"]:
    """Full steps in order of the arrival of their last sample, then the short ones as they are."""
    last_place = place[steps.offsets[1:] - 1]
    return np.argsort(np.where(steps.is_full, last_place, np.iinfo(np.int64).max), kind="stable")
