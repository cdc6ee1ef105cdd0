"""Exceptions of worker processes, in a form that survives pickling."""

from __future__ import annotations

import pickle
import traceback

__all__ = ["portable_error"]


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
