"""The `jvarlen` command. It parses the arguments and calls the command: `plan`, `train`, `report` and so on.

Only the subcommand that was typed is imported, and of it only the settings until it runs: help starts no JAX.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from jvarlen._common import __version__
from jvarlen._common.terminal import errors_of_failures, escape_controls, say

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from jvarlen.runs.config import FitConfig

__all__ = ["COMMANDS", "main", "run", "run_command"]

COMMANDS = {
    "plan": ("runs.commands.plan", "PlanCommand", "Print the plan of a training run, or of any lengths."),
    "compile": (
        "runs.commands.compile",
        "CompileCommand",
        "Compile the train step of every bucket for devices that need not be here.",
    ),
    "train": ("runs.config", "FitConfig", "Train a language model on the built-in corpus or your own data."),
    "report": ("runs.commands.report", "ReportCommand", "Report on runs, finished or not."),
    "sample": (
        "runs.commands.sample",
        "SampleCommand",
        "Continue prompts with the model of a run or of a Hugging Face directory.",
    ),
    "export": (
        "runs.commands.export",
        "ExportCommand",
        "Write the trained model of a run as a Hugging Face directory.",
    ),
    "measure": ("runs.commands.measure", "MeasureCommand", "Measure the time of training steps."),
}
"""The module and the class of each command, and its summary."""

_NOTHING_FITS, _USER_ERROR = 1, 2
_TRACEBACK = "--traceback"  # of any command, in any place
_MANY_OPTIONS = 30
_NEEDED_FIRST = (
    "data", "field", "model", "tokenizer", "max-tokens", "max-length", "overlong", "packing", "max-steps", "num-epochs",
    "optimizer.learning-rate", "eval-every", "run-dir", "resume", "parallel", "dry-run",
)  # fmt: skip
_EXIT_CODES = (
    "Exit codes: 0; 1 where nothing fits; 2 for wrong input (--traceback shows where it was found);\n"
    "130 after Ctrl-C and 143 after SIGTERM, with all steps of a training so far saved."
)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0, 1 where nothing fits, 2 for a mistake, 130 after Ctrl-C, 143 after SIGTERM."""
    args = list(sys.argv[1:] if args is None else args)
    if args == ["--version"]:
        say(f"jvarlen {__version__}")
        return 0
    if not args or args[0] in ("--help", "-h"):
        say(f"usage: jvarlen [-h] [--version] {{{','.join(COMMANDS)}}} ...\n")
        say(*(f"  {name:9}{about}" for name, (_, _, about) in COMMANDS.items()))
        say("\n`jvarlen COMMAND --help` shows the options of a command.")
        return 0
    name = args[0]
    if name not in COMMANDS:
        say(f"jvarlen: there is no command {name!r}: the commands are {', '.join(COMMANDS)}", error=True)
        return _USER_ERROR
    return run_command(*COMMANDS[name][:2], args[1:], prog=f"jvarlen {name}")


def run_command(module: str, class_name: str, args: Sequence[str], *, prog: str) -> int:
    """Runs the command of a class of settings, such as those of `COMMANDS`; returns an exit code as `main` does."""
    settings: type[DataclassInstance] | None = None
    command: Any = None
    try:
        settings = getattr(importlib.import_module(f"jvarlen.{module}"), class_name)
        if asked := {"-h", "--help", "--help-all"} & {*args}:
            return _say_help(settings, prog, is_short="--help-all" not in asked)
        command = _parse(settings, [arg for arg in args if arg != _TRACEBACK], prog)
        is_elsewhere = any(getattr(command, name, None) is not None for name in ("target", "cluster"))
        with errors_of_failures() if is_elsewhere else nullcontext():
            return command.run() or 0 if hasattr(command, "run") else _train(command)
    except Exception as error:
        if _TRACEBACK in args or not _is_of_user(error):
            raise
        from jvarlen._common.checks import NothingFitsError

        return _end(settings, command, error, _NOTHING_FITS if isinstance(error, NothingFitsError) else _USER_ERROR)
    except KeyboardInterrupt as error:
        from jvarlen._common.interrupts import exit_code_of_interrupt

        return _end(settings, command, error, exit_code_of_interrupt())


def run() -> None:
    """The installed command."""
    # Imports and traces leave little garbage. Looking for it takes a fifth of the time in which a layout is chosen, and
    # half a second at the end.
    gc.set_threshold(100_000, 20, 100)
    atexit.register(gc.freeze)
    usual = warnings.formatwarning
    warnings.formatwarning = lambda *args, **kwargs: escape_controls(usual(*args, **kwargs))
    sys.exit(main())


def _train(config: FitConfig) -> int:
    """Trains with the settings that `train` has parsed."""
    from jvarlen._common.interrupts import exit_code_of_interrupt
    from jvarlen.distributed.launch import keep_memory_of_steps
    from jvarlen.runs.fit import dry_run, fit

    if config.dry_run:
        report = dry_run(config)
        return _NOTHING_FITS if report is not None and report.fits is False else 0
    hardware = config.hardware
    if hardware.devices in (None, 1) and hardware.parallel is None and not hardware.has_processes:
        keep_memory_of_steps()
    return exit_code_of_interrupt() if fit(config).summary.interrupted else 0


def _is_of_user(error: Exception) -> bool:
    """Whether an error is the user's, so that its message is enough, without a traceback."""
    from jvarlen._common.checks import UserError

    if isinstance(error, UserError | OSError | FloatingPointError):
        return True
    if isinstance(error, ModuleNotFoundError):
        return "pip install 'jvarlen[" in str(error)  # a missing extra
    if not isinstance(error, RuntimeError):
        return False
    if str(error).startswith("Unable to initialize backend"):  # as for a wrong JAX_PLATFORMS
        return True
    from jvarlen.distributed.processes import ProcessesError  # here: it imports JAX

    return isinstance(error, ProcessesError)


def _end(
    settings: type[DataclassInstance] | None, command: DataclassInstance | None, error: BaseException, code: int
) -> int:
    """Prints what went wrong in one line, and bounds the wait for other processes."""
    if getattr(command, "has_processes", False):
        from jvarlen.distributed.processes import end_without_others

        end_without_others(code)
    # Notes of one line name the sample and the step; longer ones are tracebacks of worker processes.
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    reason = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
    text = " ".join("; ".join([reason, *notes]).split())
    if settings is not None:
        from jvarlen._common.options import in_options, options_of

        text = in_options(text, options_of(settings))
    say(f"jvarlen: {text}", error=True)
    return code


def _parse(command: type[DataclassInstance], args: Sequence[str], prog: str) -> DataclassInstance:
    """The settings of a command, from its arguments."""
    from jvarlen._common.options import parse
    from jvarlen.runs.config import FitConfig
    from jvarlen.runs.saved_config import default_settings

    return parse(command, args, prog, default_settings(args) if command is FitConfig else None)


def _say_help(command: type[DataclassInstance], prog: str, *, is_short: bool) -> int:
    """Prints the options of a command; of one with more than a screen of them, those that one needs first."""
    from jvarlen._common.options import help_of, options_of

    is_long = len([*options_of(command)]) > _MANY_OPTIONS
    say(help_of(command, prog, _NEEDED_FIRST if is_short and is_long else ()))
    say(f"\n{_EXIT_CODES}")
    return 0
