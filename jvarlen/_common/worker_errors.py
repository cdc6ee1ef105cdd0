"""Exceptions of worker processes, in a form that survives pickling."""

from __future__ import annotations

import pickle
import traceback
from typing import NamedTuple

__all__ = ["PackedError", "pack_error", "portable_error"]


def portable_error(error: BaseException) -> BaseException:
    """The error with its traceback as a note; a RuntimeError with its text and notes if it cannot be pickled."""
    told = "".join(traceback.format_exception(error))
    try:
        portable = pickle.loads(pickle.dumps(error))  # what this process itself pickled
        if type(portable) is not type(error):
            raise TypeError("pickled as another type")
    except Exception:
        portable = RuntimeError(repr(error))
        for note in getattr(error, "__notes__", ()):
            portable.add_note(note)
    portable.add_note(f"In a worker process:\n{told}")
    return portable


class PackedError(NamedTuple):
    """An error from a process that may have other packages than the one that reads it."""

    pickled: bytes  # the error, made portable
    text: str  # its `repr`
    notes: list[str]  # the last one is the traceback

    def unpack(self) -> BaseException:
        """The error; where its type cannot be imported, a RuntimeError with its text and notes."""
        try:
            return pickle.loads(self.pickled)
        except Exception:  # whatever the type's module raises here
            error = RuntimeError(self.text)
            error.__notes__ = self.notes
            return error


def pack_error(error: BaseException) -> PackedError:
    """An error as bytes, for a process that may not have its type.

    Example:
      >>> pack_error(KeyError("name")).unpack()
      KeyError('name')
    """
    portable = portable_error(error)
    return PackedError(pickle.dumps(portable), repr(error), portable.__notes__)
