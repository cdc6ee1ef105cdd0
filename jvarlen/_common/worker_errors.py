"""Exceptions of worker processes, in a form that survives pickling."""

from __future__ import annotations

import pickle
import traceback
from typing import NamedTuple

__all__ = ["PackedError", "pack_error", "portable_error"]


def portable_error(error: BaseException) -> BaseException:
    """An error that survives pickling, with its traceback as a note.

    Args:
      error: as it was raised, notes and causes included.

    Returns:
      The same type, message and notes if these survive pickling; otherwise a RuntimeError with its text and notes.

    Example:
      >>> error = portable_error(KeyError("name"))
      >>> error, error.__notes__[-1].splitlines()[0]
      (KeyError('name'), 'In a worker process:')
    """
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
    """An error from a process that may have other packages than the one that reads it.

    Attributes:
      pickled: the error, made portable.
      text: its `repr`.
      notes: its notes; the last one is the traceback.
    """

    pickled: bytes
    text: str
    notes: list[str]

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

    Args:
      error: as it was raised, notes and causes included.

    Returns:
      `PackedError`.

    Example:
      >>> pack_error(KeyError("name")).unpack()
      KeyError('name')
    """
    portable = portable_error(error)
    return PackedError(pickle.dumps(portable), repr(error), portable.__notes__)
