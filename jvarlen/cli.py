"""Command line: parses and calls. `jvarlen plan` and `jvarlen train`; the settings are the fields of dataclasses."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from jvarlen import __version__
from jvarlen.config import FitConfig, PlanConfig, load_config
from jvarlen.curriculum import Order
from jvarlen.lengths import Overlong, check_lengths

__all__ = ["PlanCommand", "main", "run"]

_USER_ERROR = 2
_INTERRUPTED = 130


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommand(PlanConfig):
    """Print the plan of an epoch for any file of lengths, and save it."""

    lengths: tyro.conf.Positional[Path]
    """A .npy file of integers, tokens a sample."""
    max_tokens: int = dataclasses.field()
    """Budget of one microbatch in tokens, padding included."""
    max_shapes: int = 16
    """The most buckets, that is compiled shapes."""
    max_length: int | None = None
    """Longest bucket in tokens; None for the longest sample."""
    overlong: Overlong = "error"
    """What becomes of samples longer than that."""
    length_multiple: int = 1
    """Lengths of buckets are rounded up to a multiple of it."""
    order: Order = "length"
    """The order in which samples come."""
    seed: int = 0
    """With the epoch, decides every shuffle."""
    epoch: int = 0
    """The epoch to plan."""
    out: Path | None = None
    """Where to save the plan (.npz)."""

    def run(self) -> None:
        """Prints the plan, and saves it where a file is named."""
        lengths = check_lengths(_load_lengths(self.lengths))
        plan = self.make_plan(lengths, self.make_buckets(lengths), seed=self.seed, epoch=self.epoch)
        print(plan.report())
        print(f"digest {plan.digest}")
        if self.out is not None:
            plan.save(self.out)
            print(self.out)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, 2 for a user's mistake, 130 when interrupted."""
    args = list(sys.argv[1:] if args is None else args)
    if args == ["--version"]:
        print(f"jvarlen {__version__}")
        return 0
    try:
        command = _parse(args)
        if isinstance(command, PlanCommand):
            command.run()
            return 0
        from jvarlen.fit import fit  # here: only training needs it

        return _INTERRUPTED if fit(command).summary.interrupted else 0
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"jvarlen: {' '.join(str(error).split())}", file=sys.stderr)
        return _USER_ERROR
    except KeyboardInterrupt:
        print("jvarlen: interrupted", file=sys.stderr)
        return _INTERRUPTED


def run() -> None:
    """The installed command."""
    sys.exit(main())


def _parse(args: list[str]) -> PlanCommand | FitConfig:
    """The command; tyro's framed errors become a ValueError of one line."""
    train = Annotated[FitConfig, tyro.conf.subcommand("train", default=_train_defaults(args))]
    plan = Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(plan | train, prog="jvarlen", args=args)
    except SystemExit as stopped:
        if stopped.code:
            raise ValueError(_unframed(errors.getvalue())) from None
        raise


def _train_defaults(args: list[str]) -> FitConfig:
    """Those of the run to resume, where one is named."""
    for place, name in enumerate(args):
        given, _, value = name.partition("=")
        run_dir = value or "".join(args[place + 1 : place + 2])
        if given == "--resume" and run_dir:
            return dataclasses.replace(load_config(Path(run_dir) / "config.json"), resume=Path(run_dir))
    return FitConfig()


def _unframed(text: str) -> str:
    """The first paragraph inside the frame."""
    lines = [line.strip("│ \n") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
    rules = [i for i, line in enumerate(lines) if line.startswith("─")]
    text = " ".join(lines[: rules[0] if rules else None])
    # The names of our classes say nothing to who typed a flag.
    return re.sub(r"Error parsing (__tyro\S*?|PlanCommand|FitConfig)(\.(\w+))?: ", r"\3 ", text).strip()


def _load_lengths(path: Path) -> np.ndarray:
    try:
        lengths = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no lengths file {path}") from None
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is not a readable .npy file of lengths: {error}") from error
    if not isinstance(lengths, np.ndarray):
        raise ValueError(f"{path} holds several arrays; a .npy file of lengths holds one")
    return lengths
