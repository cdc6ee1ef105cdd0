"""Data configuration: in go settings, out comes what a training is told of its data."""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Literal

from jvarlen.checks import list_first
from jvarlen.setting_checks import check_at_least, check_setting

__all__ = ["HELD_OUT", "DataConfig"]

HELD_OUT = "held_out"  # the evaluation set that is taken from the data


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained and evaluated on."""

    data: tuple[Path, ...] = ()
    """Files to train on instead of the built-in corpus: lines of text (.txt) or JSON (.jsonl), tokens and offsets
    (.npz), a column (.parquet, .arrow), or a directory of a Hugging Face dataset."""
    field: str = "text"
    """The field of a JSON line, or the column, that holds the text or the tokens."""
    tokenizer: Path | None = None
    """JSON file of a tokenizer; None trains on bytes."""
    weights: tuple[float, ...] = ()
    """How much of an epoch comes of each file, relative to each other; drawn once, so that all epochs have the same
    samples. Without weights, every sample of all files."""
    mixture_samples: int | None = None
    """Samples of an epoch that is mixed by weights; None for the most at which none comes twice."""
    held_out_fraction: float = 0.02
    """Share of the samples that is never trained on, chosen by the hash of their content."""
    eval_data: tuple[Path, ...] = ()
    """More files to evaluate on, each by itself, besides the held-out samples."""
    on_mismatch: Literal["error", "adjust"] = "error"
    """A sample of another length than planned ends the run, or is cut or left shorter, and counted."""
    num_workers: int = 0
    """Processes that read and collate, and that measure lengths; 0 for a thread of the main one."""

    def __post_init__(self):
        check_at_least(self, 0, "num_workers")
        check_at_least(self, 1, "mixture_samples")
        check_setting(self, ("held_out_fraction",), lambda share: 0 < share < 1, "above 0 and below 1")
        if self.weights and len(self.weights) != len(self.data):
            raise ValueError(f"weights {self.weights} must be one for each file of data, of which are {len(self.data)}")
        if self.mixture_samples is not None and not self.weights:
            raise ValueError(f"mixture_samples ({self.mixture_samples}) needs weights: without, all come once")
        names = collections.Counter([HELD_OUT, *(path.stem for path in self.eval_data)])
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"eval_data name their evaluations, so that names must differ: {list_first(repeated)}")
        # Absolute, so that the run can be resumed from another directory.
        for name in ("data", "eval_data"):
            object.__setattr__(self, name, tuple(path.absolute() for path in getattr(self, name)))
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", self.tokenizer.absolute())
