"""Batch sizes that grow with the tokens that training has seen."""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Sequence
from fractions import Fraction

from jvarlen._common.checks import UserError, is_integer, list_first

__all__ = ["BatchSizeStages", "first_size", "read_stages"]

_STAGE = re.compile(r"(\d+(_\d+)*|\d\d?(\.\d+)?%):[1-9]\d*(_\d+)*")


@dataclasses.dataclass(frozen=True)
class BatchSizeStages:
    """Batch sizes by tokens seen, for `sequences_per_step` or `tokens_per_step` of `make_plan`.

    Args:
      stages: pairs of tokens seen and batch size, ascending and from 0 tokens. A size holds from the first step that
        so many real tokens, of all epochs, come before.

    Raises:
      ValueError: no stages, a first one that is not from 0, starts that do not ascend, sizes below 1.

    Example:
      >>> from jvarlen import make_plan
      >>> make_plan([10] * 9, [(1, 10)], sequences_per_step=BatchSizeStages([(0, 1), (30, 2)])).num_sequences.tolist()
      [1, 1, 1, 2, 2, 2]
    """

    stages: Sequence[tuple[int, int]]
    """Pairs of tokens seen and batch size, as a tuple."""

    def __post_init__(self):
        stages = list(map(tuple, self.stages))
        if not stages or not all(len(stage) == 2 and all(map(is_integer, stage)) for stage in stages):
            raise UserError(f"stages must be pairs of integers, tokens seen and batch size, not {self.stages!r}")
        wrong = [f"stage 0: starts at {stages[0][0]} tokens, not at 0"] if stages[0][0] else []
        for i, (tokens, size) in enumerate(stages):
            if i and tokens <= (before := stages[i - 1][0]):
                wrong.append(f"stage {i}: starts at {tokens} tokens, not after {before}")
            if not 1 <= size < 2**63:
                wrong.append(f"stage {i}: size {size} (from 1 to 2**63 - 1)")
        if wrong:
            raise UserError(f"stages of batch sizes: {list_first(wrong)}")
        object.__setattr__(self, "stages", tuple((int(tokens), int(size)) for tokens, size in stages))

    def __call__(self, step: int, tokens_seen: int) -> int:
        """The size of a step."""
        return self.stages[bisect.bisect_right(self.stages, tokens_seen, key=lambda stage: stage[0]) - 1][1]

    def __str__(self) -> str:
        """The text that `read_stages` reads."""
        return ",".join(f"{tokens}:{size}" for tokens, size in self.stages)


def read_stages(text: str, num_tokens: int) -> BatchSizeStages:
    """The stages of a text such as "0:32,1_000_000:64" or "0:32,50%:64", shares of the tokens of the whole run.

    Example:
      >>> read_stages("0:32,50%:64", 1_000_000).stages
      ((0, 32), (500000, 64))
    """
    return BatchSizeStages([(_tokens(start, num_tokens), int(size)) for start, size in _pairs(text)])


def first_size(stages: str | int | None) -> int | None:
    """The first size of a text that `read_stages` reads; others as they are."""
    return int(_pairs(stages)[0][1]) if isinstance(stages, str) else stages


def _pairs(text: str) -> list[list[str]]:
    """The start and the size of each stage of a text."""
    pairs = text.replace(" ", "").split(",")
    if wrong := [repr(pair) for pair in pairs if not _STAGE.fullmatch(pair)]:
        raise UserError(
            "stages are tokens:size, or share%:size with less than 100 %, and sizes from 1, such as 0:32,50%:64, "
            f"not {list_first(wrong)}"
        )
    return [pair.split(":") for pair in pairs]


def _tokens(start: str, num_tokens: int) -> int:
    """The first count of tokens at or after the start of a stage."""
    if not start.endswith("%"):
        return int(start)
    return -int(-Fraction(start[:-1]) * num_tokens // 100)
