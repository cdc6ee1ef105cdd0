"""What commands and runs print: lines, tables and progress.

Control characters of names are printed as escapes, and nothing fails where printing does.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

__all__ = ["Unbroken", "errors_of_failures", "escape_controls", "progress_bar", "say", "show_line", "text_table"]

# Controls of terminals and of the direction of text, and bytes of names that are not UTF-8; newlines and tabs stay.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    r"""The text with control characters, except newlines and tabs, as escapes such as \x1b."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def say(*lines: object, error: bool = False) -> None:
    """Prints lines of any text at once, on standard output or standard error. Work goes on where that is closed."""
    stream = Unbroken(sys.stderr if error else sys.stdout)
    stream.write(escape_controls("\n".join(map(str, lines))) + "\n")
    stream.flush()


class Unbroken:
    """A stream that drops text once its reader has gone, and escapes characters that its encoding lacks."""

    def __init__(self, stream: Any):
        self._wrapped = stream

    def write(self, text: str) -> int:
        """Writes what can be written."""
        encoding = getattr(self._wrapped, "encoding", None) or "utf-8"
        try:
            self._wrapped.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except (OSError, ValueError, AttributeError) as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Flushes, if there is someone to read it."""
        try:
            self._wrapped.flush()
        except (OSError, ValueError, AttributeError) as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Sends the stream to nowhere, with its buffer, which Python flushes at the end."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._wrapped.fileno())
            os.close(nowhere)
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError) and self._wrapped is sys.stdout:
            Unbroken(sys.stderr).write(f"jvarlen: standard output cannot be written: {error.strerror}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __eq__(self, other: object) -> bool:
        return self._wrapped == getattr(other, "_wrapped", other)

    def __hash__(self) -> int:
        return hash(self._wrapped)


_KEEPER = "import sys; kept = sys.stdin.buffer.read(); kept.endswith(b'\\0') or sys.stderr.buffer.write(kept)"


@contextlib.contextmanager
def errors_of_failures() -> Iterator[None]:
    """Keeps what libraries write to file descriptor 2, such as a compiler's warnings, off unless the block fails.

    A process of its own holds it, so that the last words of a crash are printed as well. A user's mistake, unless it
    has a cause, is no failure.
    """
    from jvarlen._common.checks import UserError  # here: it imports NumPy

    with contextlib.ExitStack() as stack:
        stack.callback(os.close, terminal := os.dup(2))
        command = [sys.executable, "-I", "-S", "-c", _KEEPER]
        keeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert keeper.stdin is not None
        with contextlib.suppress(OSError, ValueError, AttributeError):  # streams without a descriptor
            if sys.stderr.fileno() == 2:
                shown = stack.enter_context(open(terminal, "w", buffering=1, closefd=False))
                stack.enter_context(contextlib.redirect_stderr(shown))
        os.dup2(keeper.stdin.fileno(), 2)
        try:
            yield
            os.write(2, b"\0")
        except UserError as error:
            if error.__cause__ is None:
                os.write(2, b"\0")
            raise
        finally:
            os.dup2(terminal, 2)
            keeper.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):  # children hold the pipe open as well
                keeper.wait(5)


def text_table(
    rows: Sequence[Sequence[str]], *, align: str = "<>", least_widths: Sequence[int] = (), gap: str = "  "
) -> str:
    """A table as text, its columns as wide as their widest cells; the header comes first."""
    # In a line with fewer cells than the header, the last one stretches over the columns that are missing. The last of
    # `align` is that of all further columns.
    num_columns = len(rows[0])
    aligned = [row[:num_columns] if len(row) >= num_columns else row[:-1] for row in rows]
    widths = [*least_widths, *[0] * (num_columns - len(least_widths))]
    for row in aligned:
        widths[: len(row)] = map(max, widths, map(len, row))
    sides = align.ljust(num_columns, align[-1])
    lines = []
    for row, cells in zip(rows, aligned, strict=True):
        padded = [f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=False)]
        lines.append(gap.join([*padded, *row[len(cells) :]]).rstrip())
    return "\n".join(lines)


def progress_bar(iterable: Iterable | None = None, *, progress: bool = True, **settings: Any) -> tqdm:
    """A tqdm bar with tqdm's settings on a terminal; otherwise one line at the end, as a log shows no redrawn bar."""
    settings |= {
        "desc": escape_controls(settings.get("desc") or ""),
        "file": Unbroken(sys.stderr),
        "disable": not progress,
    }
    if progress and not sys.stderr.isatty():
        return _FinalLine(iterable, delay=math.inf, **settings)
    return tqdm(iterable, **settings)


def show_line(text: str, *, progress: bool = True) -> None:
    """Prints a line on standard error, above the bar if there is one; False prints nothing."""
    if progress:
        tqdm.write(escape_controls(text), file=Unbroken(sys.stderr))


class _FinalLine(tqdm):
    """A bar that prints its count and duration when it is closed. With an endless delay, tqdm draws nothing."""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        return False

    def close(self) -> None:
        if not self.disable:
            done = f"{self.n:,}" if self.total is None else f"{self.n:,}/{self.total:,}"
            self.fp.write(f"{self.desc}: {done} × {self.unit}, {self.format_dict['elapsed']:.1f} s\n")
        super().close()
