"""How large steps are: numbers, arrays and ramps, which cut ordered samples into steps.

Letters: N samples, n of them in order, S steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import INT64_MAX, check_integer, list_offenders
from torch_ref.planning.group_ids import ends_of_group_ids

__all__ = ["Ordered", "StepSize", "StepSizes", "step_sizes"]

StepSize = ArrayLike | Callable[[int, int], int]


class Ordered(NamedTuple):
    """The samples of an epoch in order: `ids` int64[n] and `num_tokens` int64[n]."""

    ids: NDArray[np.int64]
    num_tokens: NDArray[np.int64]


class StepSizes:
    """Cuts the samples of an epoch into steps of given sizes.

    Args:
        name: the argument of `make_plan` that gives them.
        size: of every step; of each step of all epochs; or f(step, tokens_seen), both counted over all epochs.
    """

    def __init__(self, name: str, size: StepSize) -> None:
        """Check what is known before steps are cut."""
        self.name, self.counts_tokens = name, name == "tokens_per_step"
        self._size = size
        if callable(size):
            return
        given = np.asarray(size)
        is_integers = given.ndim <= 1 and given.size > 0 and given.dtype.kind in "iu"
        if not is_integers or int(given.min()) < 1 or int(given.max()) > INT64_MAX:
            raise ValueError(
                f"{name} must be an integer from 1 to {INT64_MAX}, an array of such, or a function, got {size!r}"
            )
        self._size = given

    def cut(
        self,
        epoch: int,
        samples_of: Callable[[int], Ordered],
        *,
        group_ids: NDArray[np.int64] | None = None,
        splits: bool = False,
    ) -> NDArray[np.int64]:
        """Return int64[S + 1], the samples before each step of an epoch, from the ordered ones of any epoch.

        With `group_ids`, int64[N], whose samples come together, steps end between these alone.

        If samples are split at the end of a step, so that it has exactly as many tokens as it may, return the tokens
        before each.

        Raises:
            ValueError: if a sample, or all of a group id, are more than their step has, or a size is none.
        """
        step = tokens_seen = 0
        depends_on_steps = callable(self._size) or np.ndim(self._size) > 0
        for earlier in range(epoch if depends_on_steps else 0):
            samples = samples_of(earlier)
            step += len(self._cut(samples, earlier, step, tokens_seen, group_ids, splits)) - 1
            tokens_seen += int(samples.num_tokens.sum())
        return self._cut(samples_of(epoch), epoch, step, tokens_seen, group_ids, splits)

    def _cut(
        self,
        samples: Ordered,
        epoch: int,
        first_step: int,
        tokens_seen: int,
        group_ids: NDArray[np.int64] | None,
        splits: bool,
    ) -> NDArray[np.int64]:
        if splits:
            return self._split(int(samples.num_tokens.sum()), epoch, first_step, tokens_seen)
        tokens = np.concatenate([[0], np.cumsum(samples.num_tokens)])
        counted = tokens if self.counts_tokens else np.arange(len(tokens))
        ends = np.arange(len(tokens)) if group_ids is None else ends_of_group_ids(samples.ids, group_ids)
        at_ends = counted[ends]
        offsets = [0]
        while (begin := offsets[-1]) < len(samples.ids):
            step = first_step + len(offsets) - 1
            size = self._size_of(step, epoch, tokens_seen + int(tokens[begin]))
            limit = min(int(counted[begin]) + size, int(counted[-1]))
            end = int(ends[np.searchsorted(at_ends, limit, side="right") - 1])
            if end == begin:
                is_of_all = not callable(self._size) and np.ndim(self._size) == 0
                sizes = np.diff(at_ends)
                large = np.flatnonzero(sizes > size) if is_of_all else np.searchsorted(ends, [begin])
                ids = samples.ids[ends[large]]
                where = f"step {step} (epoch {epoch}; steps of all epochs are counted)"
                if group_ids is None:
                    listed = list_offenders(ids, sizes[large], size)
                    raise ValueError(f"samples do not fit tokens_per_step={size} of {where}: {listed}")
                listed = list_offenders(group_ids[ids], sizes[large], size).replace("id ", "group id ")
                raise ValueError(
                    f"all samples of a group id do not fit {self.name}={size} of {where}: {listed}; give larger steps, "
                    "or such samples several group ids"
                )
            offsets.append(end)
        return np.array(offsets)

    def _split(self, num_tokens: int, epoch: int, first_step: int, tokens_seen: int) -> NDArray[np.int64]:
        offsets = [0]
        while (begin := offsets[-1]) < num_tokens:
            size = self._size_of(first_step + len(offsets) - 1, epoch, tokens_seen + begin)
            offsets.append(min(begin + size, num_tokens))
        return np.array(offsets)

    def _size_of(self, step: int, epoch: int, tokens_seen: int) -> int:
        if callable(self._size):
            return check_integer(f"{self.name}({step}, {tokens_seen})", self._size(step, tokens_seen))
        sizes = np.asarray(self._size)
        if sizes.ndim and step >= len(sizes):
            where = f"step {step} (epoch {epoch}; steps of all epochs are counted)"
            raise ValueError(f"{self.name} has {len(sizes)} values, and none for {where}")
        return int(sizes[step] if sizes.ndim else sizes)


def step_sizes(sequences_per_step: StepSize | None, tokens_per_step: StepSize | None) -> StepSizes | None:
    """Return what cuts samples into steps; None if neither is given."""
    if sequences_per_step is not None and tokens_per_step is not None:
        raise ValueError("sequences_per_step and tokens_per_step exclude each other: give one of them")
    if sequences_per_step is not None:
        return StepSizes("sequences_per_step", sequences_per_step)
    return None if tokens_per_step is None else StepSizes("tokens_per_step", tokens_per_step)
