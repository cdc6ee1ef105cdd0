"""Shard files of a measurement, from which it resumes."""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import write_atomically

__all__ = ["Check", "ShardFiles", "ShardsError", "Values"]

Values = Int64[np.ndarray, " n"] | Float64[np.ndarray, " n"]
Check = Callable[[Int64[np.ndarray, " n"], Bool[np.ndarray, " n"]], Values]

_FORMAT_VERSION = 1
_MANIFEST = "manifest.json"
_SEAL_BYTES = hashlib.sha256().digest_size


class ShardsError(UserError):
    """A directory of shards is damaged, or belongs to another measurement."""


class ShardFiles:
    """The files of a measurement: a manifest, and a sealed `.npy` for every complete shard, int64[n] or float64[n].

    A seal is the SHA-256 of the manifest, the file's name and its array. It follows the array, where NumPy does not
    look. So no file is mistaken for another, or for complete when it is not.

    Args:
      directory: where the files are; `read` creates it if missing.
      words: int64[N], the values of all samples, ints as they are, floats as their bits. `read` fills in the kept
        values, and the caller all others.
      is_float: bool[N], which of them are floats, filled in likewise.
      shard_size: samples in a file, at least 1; the last file has what is left.
      quantity: the name of what is measured.
      function: what measures it, known by its name.
      check: makes the values of a shard, as they are kept, from its words and from which are floats; raises ValueError
        if they must not be kept.
    """

    def __init__(
        self,
        directory: Path,
        words: Int64[np.ndarray, " N"],
        is_float: Bool[np.ndarray, " N"],
        *,
        shard_size: int,
        quantity: str,
        function: Callable[..., Any],
        check: Check,
    ):
        num_samples = len(words)
        self._directory = directory
        self._check = check
        self._words, self._is_float = words, is_float
        self._shards = [
            range(start, min(start + shard_size, num_samples)) for start in range(0, num_samples, shard_size)
        ]
        self._shard_size = shard_size
        self._num_missing = np.array(list(map(len, self._shards)))
        self._manifest = {
            "format_version": _FORMAT_VERSION,
            "quantity": quantity,
            "function": _qualified_name(function),
            "num_samples": num_samples,
            "shard_size": shard_size,
        }
        self._written_manifest = (json.dumps(self._manifest, indent=2) + "\n").encode()

    def read(self) -> list[range]:
        """Reads existing shards into the arrays, or begins a directory.

        Returns:
          The samples of each shard that is missing, ascending.

        Raises:
          ShardsError: the directory is of another measurement, or of something else; or files are damaged; they are
            listed. Nothing is removed.
          OSError: the directory cannot be read or made.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in self._directory.glob("*.npy")}
        self._check_manifest(present)
        if foreign := present.difference(map(self._name, range(len(self._shards)))):
            raise self._refusal(f"holds files that are no shards of this measuring: {list_first(sorted(foreign))}")
        damaged = {name for name in present if not self._read_shard(name)}
        if damaged:
            raise self._refusal(
                f"holds shards that are damaged or of another measuring, to be measured again once they are deleted: "
                f"{list_first(sorted(damaged))}"
            )
        return [shard for shard, num_missing in zip(self._shards, self._num_missing, strict=True) if num_missing]

    def add(self, samples: range) -> None:
        """Takes note that the arrays hold a range of samples, and writes its shard where that makes it whole.

        A shard that does not pass the check is left out: the same check of all values lists the offenders of all
        shards, and the next call measures it again.

        Args:
          samples: within one of the shards that `read` found missing; each sample is added once.

        Raises:
          OSError: the file cannot be written.
        """
        index = samples.start // self._shard_size
        self._num_missing[index] -= len(samples)
        if self._num_missing[index]:
            return
        shard = slice(self._shards[index].start, self._shards[index].stop)
        try:
            values = self._check(self._words[shard], self._is_float[shard])
        except ValueError:
            return
        body = io.BytesIO()
        np.save(body, values, allow_pickle=False)
        name = self._name(index)
        with write_atomically(self._directory / name) as file:
            file.write(body.getvalue() + self._seal(name, body.getvalue()))

    def _read_shard(self, name: str) -> bool:
        content = (self._directory / name).read_bytes()
        body, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
        if seal != self._seal(name, body):
            return False
        index = int(Path(name).stem)
        shard = slice(self._shards[index].start, self._shards[index].stop)
        values = np.load(io.BytesIO(body), allow_pickle=False)
        self._words[shard], self._is_float[shard] = values.view(np.int64), values.dtype == np.float64
        self._num_missing[index] = 0
        return True

    def _check_manifest(self, present: set[str]) -> None:
        path = self._directory / _MANIFEST
        if not path.exists():
            if present:
                raise self._refusal(f"holds {list_first(sorted(present))}, but no {_MANIFEST}")
            with write_atomically(path) as file:
                file.write(self._written_manifest)
            return
        try:
            found = json.loads(path.read_bytes())
            differences = [
                f"{name} is {found.get(name)!r}, not {wanted!r}"
                for name, wanted in self._manifest.items()
                if found.get(name) != wanted
            ]
        except (ValueError, AttributeError) as error:
            raise self._refusal(f"has a damaged {_MANIFEST} ({error})") from error
        if differences:
            raise self._refusal(f"is of another measuring: {'; '.join(differences)}")

    def _name(self, index: int) -> str:
        return f"{index:0{len(str(len(self._shards) - 1))}}.npy"  # so that names sort as the shards do

    def _seal(self, name: str, body: bytes) -> bytes:
        return hashlib.sha256(self._written_manifest + name.encode() + body).digest()

    def _refusal(self, reason: str) -> ShardsError:
        return ShardsError(f"{self._directory} {reason}. To start again, delete it or take another directory")


def _qualified_name(function: Callable[..., Any]) -> str:
    """A function's module and name, the same for every user; of a partial that of its function."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}"
