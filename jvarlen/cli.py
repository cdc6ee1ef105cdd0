"""Command line: in go the words of a command, out come what it prints, the files it writes and an exit code.

It only parses and calls: `plan`, `sort`, `train`, `report` and `measure`. Settings are the fields of dataclasses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro
from jaxtyping import Float64, Int64

from jvarlen import __version__
from jvarlen._common.interrupts import exit_code_of_interrupt
from jvarlen.distributed.processes import ProcessesError, end_without_others
from jvarlen.models import TransformerConfig
from jvarlen.planning.compare import StrategyFigures, compare_strategies, comparison_table
from jvarlen.planning.lengths import Overlong, check_lengths
from jvarlen.planning.order import Order
from jvarlen.planning.plan import Plan
from jvarlen.reports.plan_page import write_html_report
from jvarlen.reports.run_page import read_runs
from jvarlen.runs.config import BatchSizeRule, DeviceConfig, FitConfig, PlanConfig, load_config
from jvarlen.runs.directory import is_run_dir
from jvarlen.sorting.balance import balance_table
from jvarlen.sorting.sort_file import load_array, sort_file
from jvarlen.training.learning_rate import lr_sequence

__all__ = ["MeasureCommand", "PlanCommand", "ReportCommand", "SortCommand", "main", "run"]

_USER_ERROR = 2
_EXIT_CODES_OF_TRAINING = (
    "Exit codes: 0; 2 for a mistake of the user; 130 after Ctrl-C and 143 after SIGTERM, with all steps so far saved."
)


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
    learning_rate: float | None = None
    """A base rate; the rates of the steps are then shown, by base_batch_size."""
    base_batch_size: float | None = None
    """Sequences of the step at which the rate is the base rate."""
    batch_size_rule: BatchSizeRule = "sqrt"
    """How the rate grows with the sequences of a step."""
    out: Path | None = None
    """Where to save the plan (.npz)."""
    compare: bool = False
    """Also print what every strategy, packed rows and no plan at all would make of the lengths."""
    html: Path | None = None
    """Where to write a page that shows the plan: one file that works offline."""

    def run(self) -> None:
        """Prints the plan and what it is compared with, and writes the files that are named."""
        lengths = check_lengths(load_array(self.lengths, "lengths"))
        plan = self.make_plan(lengths, self.make_buckets(lengths), seed=self.seed, epoch=self.epoch)
        rates = self._learning_rates(plan)
        print(plan.report(rates, cost=self.cost, compile_seconds=self.compile_seconds))
        print(f"digest {plan.digest}")
        comparison = self._compare(lengths) if self.compare else None
        if comparison is not None:
            print(f"\n{comparison_table(comparison)}")
        if self.out is not None:
            plan.save(self.out)
            print(self.out)
        if self.html is not None:
            write_html_report(self.html, plan, lengths, learning_rates=rates, cost=self.cost, comparison=comparison)
            print(self.html)

    def _learning_rates(self, plan: Plan) -> Float64[np.ndarray, " S"] | None:
        if self.learning_rate is None and self.base_batch_size is None:
            return None
        if self.learning_rate is None or self.base_batch_size is None:
            raise ValueError("learning_rate and base_batch_size go together: a rate, and the sequences it is for")
        rule = None if self.batch_size_rule == "none" else self.batch_size_rule
        return lr_sequence(plan, self.learning_rate, self.base_batch_size, rule=rule)

    def _compare(self, lengths: Int64[np.ndarray, " N"]) -> list[StrategyFigures]:
        return compare_strategies(
            lengths,
            self.max_tokens,
            max_shapes=self.max_shapes,
            max_length=self.max_length,
            overlong=self.overlong,
            microbatches_per_step=self.microbatches_per_step,
            row_multiple=self.row_multiple,
            length_multiple=self.length_multiple,
            cost=self.cost,
            compile_seconds=self.compile_seconds,
            max_cost=self.max_cost,
            memory=self.memory,
            max_bytes=self.max_bytes,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SortCommand(DeviceConfig):
    """Sort any file of lengths or other keys on several devices, and write the order of the samples."""

    lengths: tyro.conf.Positional[Path]
    """A .npy file of integers or floats, one a sample."""
    out: Path = Path("order.npy")
    """Where the ids of the samples go, sorted by key, ties by id."""
    progress: bool = True
    """Show progress bars."""

    def run(self) -> None:
        """Sorts, writes the order, and prints how evenly it lay on the devices."""
        if self.out.is_dir() or self.out.resolve() == self.lengths.resolve():
            raise ValueError(f"out {self.out} must be a file, and another one than the lengths")
        sorted_file = sort_file(self.lengths, self.out, self.make_mesh(), progress=self.progress)
        if jax.process_index() == 0:
            print(balance_table({"exact": sorted_file.exact, "each for itself": sorted_file.local}))
            volume = sorted_file.volume
            sent = "what each sent depends on the keys"
            if volume is not None:
                sent = f"each sent {volume.messages:,} messages, {volume.num_bytes / 1e6:,.1f} MB"
            print(
                f"{sorted_file.num_rows:,} keys on {sorted_file.num_shards} devices: {sorted_file.seconds:.2f} s with "
                f"compilation; {sent}"
            )
            print(self.out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureCommand:
    """Measure what a training step of the built-in model takes, for `plan --cost-model` and `--memory-model`."""

    max_tokens: int = 4096
    """Tokens of the largest buckets that are measured."""
    lengths: tuple[int, ...] = (32, 128, 512, 1024)
    """Lengths of rows that are measured."""
    microbatches_per_step: int = 1
    """Microbatches of one optimizer update."""
    pack: bool = False
    """Measure rows that hold several samples."""
    out: Path = Path("cost.json")
    """Where the cost model in seconds goes."""
    memory_out: Path = Path("memory.json")
    """Where the cost model in bytes goes."""
    progress: bool = True
    """Show progress bars."""
    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)

    def run(self) -> None:
        """Measures, prints and saves."""
        from jvarlen.runs.measure_costs import measure_costs

        missing = [str(path) for path in (self.out, self.memory_out) if not path.parent.is_dir()]
        if missing:
            raise FileNotFoundError(f"there is no directory for {', '.join(missing)}")
        costs = measure_costs(
            self.model,
            max_tokens=self.max_tokens,
            lengths=self.lengths,
            microbatches_per_step=self.microbatches_per_step,
            packed=self.pack,
            progress=self.progress,
        )
        for fitted, path in ((costs.seconds, self.out), (costs.num_bytes, self.memory_out)):
            fitted.save(path)
            print(f"{path}: {fitted}")
        print(f"compiling a bucket took {costs.compile_seconds:.2f} s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Show what runs did, also while they go on: a table, and a page of pictures in which they lie over each other."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs."""
    html: Path | None = None
    """Where to write the page, one file that works offline; report.html in the directory of the run or, of several
    runs, in the current one."""

    def run(self) -> None:
        """Prints the table, then writes the page."""
        report = read_runs(self.run_dirs)
        print(report.table())
        page = self.html or (self.run_dirs[0] if len(self.run_dirs) == 1 else Path()) / "report.html"
        report.write_html(page)
        print(f"\n{page}")


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
      The exit code: 0; 2 for a user's mistake; where it was interrupted, 130, or 143 by SIGTERM to this process.
    """
    args = list(sys.argv[1:] if args is None else args)
    if args == ["--version"]:
        print(f"jvarlen {__version__}")
        return 0
    command = None
    try:
        command = _parse(args)
        if not isinstance(command, FitConfig):
            command.run()
            return 0
        from jvarlen.runs.fit import fit  # here: only training needs it

        return exit_code_of_interrupt() if fit(command).summary.interrupted else 0
    except (ValueError, OSError, FloatingPointError, ProcessesError) as error:
        return _end(command, error, _USER_ERROR)
    except RuntimeError as error:
        if not isinstance(command, SortCommand):  # where it is an error of ours
            raise
        return _end(command, error, _USER_ERROR)
    except KeyboardInterrupt:
        return _end(command, "interrupted", exit_code_of_interrupt())


def _end(command: object, error: object, code: int) -> int:
    """Says what went wrong in one line; other processes are not waited for without end."""
    if isinstance(command, DeviceConfig) and command.has_processes:
        end_without_others()
    # Notes of one line tell the sample and the step; longer ones are tracebacks of worker processes.
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    print(f"jvarlen: {' '.join('; '.join([str(error), *notes]).split())}", file=sys.stderr)
    return code


def run() -> None:
    """The installed command."""
    sys.exit(main())


def _parse(args: list[str]) -> PlanCommand | SortCommand | ReportCommand | MeasureCommand | FitConfig:
    """The command; tyro's framed errors become a ValueError of one line."""
    about = f"{FitConfig.__doc__} {_EXIT_CODES_OF_TRAINING}"
    train = Annotated[FitConfig, tyro.conf.subcommand("train", default=_train_defaults(args), description=about)]
    plan = Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    sort = Annotated[SortCommand, tyro.conf.subcommand("sort")]
    report = Annotated[ReportCommand, tyro.conf.subcommand("report")]
    measure = Annotated[MeasureCommand, tyro.conf.subcommand("measure")]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(plan | sort | train | report | measure, prog="jvarlen", args=args)
    except SystemExit as stopped:
        if stopped.code:
            raise ValueError(_unframed(errors.getvalue())) from None
        raise


def _train_defaults(args: list[str]) -> FitConfig:
    """Those of the run to continue, where one is named."""
    for place, name in enumerate(args):
        given, _, value = name.partition("=")
        run_dir = value or "".join(args[place + 1 : place + 2])
        if given == "--resume" and run_dir:
            return dataclasses.replace(load_config(Path(run_dir) / "config.json"), resume=Path(run_dir))
        if given == "--run-dir" and run_dir and is_run_dir(Path(run_dir)):
            return dataclasses.replace(load_config(Path(run_dir) / "config.json"), run_dir=Path(run_dir))
    return FitConfig()


def _unframed(text: str) -> str:
    """The first paragraph inside the frame."""
    lines = [line.strip("│ \n") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
    rules = [i for i, line in enumerate(lines) if line.startswith("─")]
    text = " ".join(lines[: rules[0] if rules else None])
    # The names of our classes say nothing to who typed a flag.
    return re.sub(
        r"Error parsing (__tyro\S*?|PlanCommand|SortCommand|ReportCommand|MeasureCommand|FitConfig)(\.(\w+))?: ",
        r"\3 ",
        text,
    ).strip()
