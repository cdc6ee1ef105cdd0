"""Source texts: in goes a directory of Python files, out come the texts of their outermost functions, each once."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from jvarlen.interrupts import raise_if_interrupted
from jvarlen.progress import progress_bar

__all__ = ["read_functions"]

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}  # directories


def read_functions(root: Path, progress: bool) -> list[bytes]:
    """The source of every outermost function and method below a directory, by file path, then by line.

    Args:
      root: directories of tests, and of packages that were installed into it, are left out.
      progress: whether to show a progress bar.

    Returns:
      Texts of whole lines, without decorators. What Python cannot parse gives none.

    Raises:
      FileNotFoundError: there are no source files.
    """
    files = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _LEFT_OUT]
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    if not files:
        raise FileNotFoundError(f"the standard library at {root} holds no source files to build the corpus from")
    samples: dict[bytes, None] = {}  # a dict keeps the first of equal texts, in order
    for path in progress_bar(sorted(files), desc="corpus", unit="file", progress=progress):
        raise_if_interrupted()
        source = path.read_bytes()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old sources hold invalid escapes
                tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue  # templates and deliberately broken files
        lines = source.splitlines(keepends=True)
        for function in _outermost_functions(tree):
            samples[b"".join(lines[function.lineno - 1 : function.end_lineno])] = None
    samples.pop(b"", None)
    return list(samples)


def _outermost_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from _outermost_functions(node)
