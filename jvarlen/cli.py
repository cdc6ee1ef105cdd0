"""The `jvarlen` command. It parses the arguments and calls the command: `plan`, `sort`, `train`, `report` and so on.

Settings are dataclass fields. Only the subcommand that was typed is imported: `jvarlen plan` does not load JAX.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import io
import operator
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jvarlen import __version__
from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import exit_code_of_interrupt

if TYPE_CHECKING:
    from jvarlen.runs.config import FitConfig

__all__ = ["main", "run"]

_USER_ERROR = 2
_TRACEBACK = "--traceback"  # of any command, in any place
_EXIT_CODES_OF_TRAINING = (
    "Exit codes: 0; 2 for wrong input (--traceback shows where it was found); 130 after Ctrl-C and 143 after SIGTERM, "
    "with all steps so far saved."
)
_COMMANDS = {
    "plan": ("runs.page_commands", "PlanCommand"),
    "sort": ("sorting.sort_file", "SortCommand"),
    "train": ("runs.config", "FitConfig"),
    "report": ("runs.page_commands", "ReportCommand"),
    "sample": ("runs.model_commands", "SampleCommand"),
    "export": ("runs.model_commands", "ExportCommand"),
    "measure": ("runs.measure_command", "MeasureCommand"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
      The exit code: 0; 2 for a user's mistake; 130 after an interrupt, or 143 after SIGTERM to this process.
    """
    args = list(sys.argv[1:] if args is None else args)
    if args == ["--version"]:
        print(f"jvarlen {__version__}")
        return 0
    shows_traceback = _TRACEBACK in args
    args = [arg for arg in args if arg != _TRACEBACK]
    return _ending(None, lambda: _run(_parse(args), shows_traceback), shows_traceback)


def _run(command: Any, shows_traceback: bool) -> int:
    """Runs a command, or trains with the settings that `train` has parsed."""

    def run() -> int:
        if hasattr(command, "run"):
            command.run()
            return 0
        return _train(command)

    return _ending(command, run, shows_traceback)


def _ending(command: Any, run: Callable[[], int], shows_traceback: bool) -> int:
    """The exit code of a command, or of its error, of which it prints one line."""
    try:
        return run()
    except Exception as error:
        if shows_traceback or not _is_of_user(error):
            raise
        return _end(command, error, _USER_ERROR)
    except KeyboardInterrupt as error:
        return _end(command, error, exit_code_of_interrupt())


def _train(config: FitConfig) -> int:
    from jvarlen.distributed.launch import keep_memory_of_steps  # here: only training needs them
    from jvarlen.runs.fit import dry_run, fit

    if config.dry_run:
        dry_run(config)
        return 0
    if config.devices in (None, 1) and config.parallel is None and not config.has_processes:
        keep_memory_of_steps()
    return exit_code_of_interrupt() if fit(config).summary.interrupted else 0


def _is_of_user(error: Exception) -> bool:
    """Whether its message is enough, without a traceback: wrong input, files, a loss that is not finite, processes."""
    if isinstance(error, UserError | OSError | FloatingPointError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from jvarlen.distributed.processes import ProcessesError  # here: it imports JAX

    return isinstance(error, ProcessesError)


def _end(command: Any, error: object, code: int) -> int:
    """Prints what went wrong in one line, and bounds the wait for other processes."""
    if getattr(command, "has_processes", False):
        from jvarlen.distributed.processes import end_without_others

        end_without_others(code)
    # Notes of one line tell the sample and the step; longer ones are tracebacks of worker processes.
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    told = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    print(f"jvarlen: {' '.join('; '.join([told, *notes]).split())}", file=sys.stderr)
    return code


def run() -> None:
    """The installed command."""
    # Imports and traces leave little garbage. Looking for it takes a fifth of the time in which a layout is chosen, and
    # half a second at the end.
    gc.set_threshold(100_000, 20, 100)
    atexit.register(gc.freeze)
    sys.exit(main())


def _parse(args: list[str]) -> Any:
    """Parses the command; tyro's framed errors become a ValueError of one line."""
    typed = args[0] if args and args[0] in _COMMANDS else None
    # Of all, for the help; tyro builds a union of one as if it had no subcommands.
    commands = [_command(name, args) for name in ([typed] if typed else _COMMANDS)]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            if typed:
                return tyro.cli(commands[0], prog=f"jvarlen {typed}", args=args[1:])
            return tyro.cli(functools.reduce(operator.or_, commands), prog="jvarlen", args=args)
    except SystemExit as stopped:
        if stopped.code:
            raise UserError(_unframed(errors.getvalue())) from None
        raise


def _command(name: str, args: list[str]) -> Any:
    """The dataclass of a command, with the words and defaults for parsing it."""
    module, class_name = _COMMANDS[name]
    command = getattr(importlib.import_module(f"jvarlen.{module}"), class_name)
    if name != "train":
        return Annotated[command, tyro.conf.subcommand(name)]
    from jvarlen.runs.directory import default_settings  # here: only training needs it

    about = f"{command.__doc__} {_EXIT_CODES_OF_TRAINING}"
    return Annotated[command, tyro.conf.subcommand("train", default=default_settings(args), description=about)]


def _unframed(text: str) -> str:
    """Best effort: the first paragraph inside the frame that tyro prints around an error."""
    lines = [line.strip("│ \n") for line in text.splitlines() if not line.startswith(("╭", "╰"))]
    rules = [i for i, line in enumerate(lines) if line.startswith("─")]
    text = " ".join(lines[: rules[0] if rules else None])
    # The names of our classes mean nothing to someone who typed a flag.
    return re.sub(
        r"Error parsing (__tyro\S*?|[A-Z][a-z]+Command|FitConfig)(\.(\w+))?: ",
        r"\3 ",
        text,
    ).strip()
