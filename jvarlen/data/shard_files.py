"""The files of a measurement, which resumes from them."""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import write_atomically
from jvarlen.data.sample_ranges import Values

__all__ = ["Check", "ShardFiles", "ShardsError"]

Check = Callable[[Values], Values]

_SHARDS_VERSION = 1
_SEAL_BYTES = hashlib.sha256().digest_size


class ShardsError(UserError):
    """A directory of shards is damaged, or belongs to another measurement."""


class ShardFiles:
    """The files of a measurement: a manifest, and a sealed `.npy` for every complete shard, int64[n] or float64[n]."""

    # A seal is the SHA-256 of the manifest, the file's name and its array, and follows the array, where NumPy does not
    # look: no file is mistaken for another.

    def __init__(
        self,
        directory: Path,
        num_samples: int,
        shard_size: int,
        quantity: str,
        function: Callable[..., Any],
        check: Check,
    ):
        while isinstance(function, functools.partial):
            function = function.func
        named = function if hasattr(function, "__qualname__") else type(function)
        self._directory = directory
        self._check = check
        self._shards = [range(num_samples)[start : start + shard_size] for start in range(0, num_samples, shard_size)]
        self._num_missing = np.array(list(map(len, self._shards)))
        self._manifest: dict[str, Any] = {
            "format_version": _SHARDS_VERSION,
            "quantity": quantity,
            "function": f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}",
            "num_samples": num_samples,
            "shard_size": shard_size,
        }
        self._written_manifest = (json.dumps(self._manifest, indent=2) + "\n").encode()

    def read(self, store: Callable[[range, Values], object]) -> list[range]:
        """Hands existing shards to `store`, or begins a directory; returns the samples of each missing shard."""
        self._directory.mkdir(parents=True, exist_ok=True)
        manifest = self._directory / "manifest.json"
        if manifest.exists():
            self._check_manifest(manifest.read_bytes())
        else:
            with write_atomically(manifest) as file:
                file.write(self._written_manifest)
        damaged = []
        for index in range(len(self._shards)):
            path = self._path(index)
            if path.exists() and not self._read_shard(index, path, store):
                damaged.append(path.name)
        if damaged:
            raise self._refusal(
                "holds shards that are damaged or of another measuring, to be measured again once they are deleted: "
                f"{list_first(damaged)}"
            )
        return [shard for shard, num_missing in zip(self._shards, self._num_missing, strict=True) if num_missing]

    def add(self, samples: range, values: Values) -> None:
        """Notes that all values hold these samples of a shard; writes it once it is whole and passes the check."""
        index = samples.start // self._manifest["shard_size"]
        self._num_missing[index] -= len(samples)
        if self._num_missing[index]:
            return
        shard = self._shards[index]
        try:
            values = self._check(values[shard.start : shard.stop])
        except ValueError:  # the check of all values lists the offenders of all shards
            return
        body = io.BytesIO()
        np.save(body, values, allow_pickle=False)
        path = self._path(index)
        with write_atomically(path) as file:
            file.write(body.getvalue() + self._seal(path, body.getvalue()))

    def _read_shard(self, index: int, path: Path, store: Callable[[range, Values], object]) -> bool:
        content = path.read_bytes()
        body, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
        if seal != self._seal(path, body):
            return False
        store(self._shards[index], np.load(io.BytesIO(body), allow_pickle=False))
        self._num_missing[index] = 0
        return True

    def _check_manifest(self, content: bytes) -> None:
        try:
            found = dict(json.loads(content))
        except (ValueError, TypeError) as error:
            raise self._refusal(f"has a damaged manifest.json ({error})") from error
        differences = [
            f"{name} is {found.get(name)!r}, not {wanted!r}"
            for name, wanted in self._manifest.items()
            if found.get(name) != wanted
        ]
        if differences:
            raise self._refusal(f"is of another measuring: {'; '.join(differences)}")

    def _path(self, index: int) -> Path:
        return self._directory / f"{index:0{len(str(len(self._shards) - 1))}}.npy"  # names sort as the shards do

    def _seal(self, path: Path, body: bytes) -> bytes:
        return hashlib.sha256(self._written_manifest + path.name.encode() + body).digest()

    def _refusal(self, reason: str) -> ShardsError:
        return ShardsError(f"{self._directory} {reason}. To start again, delete it or take another directory")
