"""The built-in corpus: the functions of Python's standard library, whose lengths have a realistic long tail."""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jvarlen._common.files import default_cache_dir, private_cache, write_atomically
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.terminal import progress_bar
from jvarlen.data.token_files import open_arrays
from jvarlen.data.tokens import TokenDataset

__all__ = ["read_functions", "stdlib_functions"]

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}  # directories


def read_functions(root: Path, progress: bool) -> list[bytes]:
    """The source of every outermost function and method below a directory, by file path, then by line."""
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


_CACHE_VERSION = 1


def stdlib_functions(*, progress: bool = True) -> TokenDataset:
    """The source of every outermost function and method in the standard library of the running interpreter.

    Texts are whole lines without decorators, each once, by file path, then by line. The first scan is cached.

    Args:
      progress: whether the scan shows a progress bar.

    Returns:
      A `TokenDataset` of about 15,000 samples of 15 to about 17,000 bytes.

    Raises:
      FileNotFoundError: the standard library of this interpreter has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    interpreter = hashlib.sha256(f"{_CACHE_VERSION} {sys.version} {root}".encode()).hexdigest()[:16]
    cache = default_cache_dir() / f"stdlib-functions-{interpreter}.npz"
    if cache.exists():
        return open_arrays(cache, None)
    dataset = TokenDataset.from_bytes(read_functions(root, progress))
    try:
        private_cache()
        with write_atomically(cache) as out:
            np.savez_compressed(out, tokens=dataset.tokens, offsets=dataset.offsets)
    except OSError as error:
        warnings.warn(f"the corpus is not cached: {error}", stacklevel=2)
    return dataset
