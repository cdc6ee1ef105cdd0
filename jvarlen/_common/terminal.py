"""What commands and runs print: control characters of names as escapes, and no error where printing fails."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any

__all__ = ["Unbroken", "escape_controls", "say"]

# Of terminals, of the direction of text, and what names hold that are not UTF-8; newlines and tabs stay.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    r"""The text with control characters, but newlines and tabs, as escapes such as \x1b."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def say(*lines: object, error: bool = False) -> None:
    """Prints lines of any text at once, on standard output or standard error. Work goes on where that is closed."""
    stream = Unbroken(sys.stderr if error else sys.stdout)
    stream.write(escape_controls("\n".join(map(str, lines))) + "\n")
    stream.flush()


class Unbroken:
    """A stream that drops what it cannot write, once its reader has gone, and escapes what its encoding lacks."""

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
        """From now on the stream writes to nowhere: also what it holds, which Python flushes at the end."""
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
