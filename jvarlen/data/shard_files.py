"""The files of a long measurement, from which it resumes: a manifest, and the values of each complete shard."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen._common.files import load_array, read_object, save_json, write_atomically

__all__ = ["Check", "ShardFiles", "Values"]

_SHARDS_VERSION = 2

Values: TypeAlias = Int64[np.ndarray, " n *sides"]
Check: TypeAlias = Callable[[Values], Values]


class ShardFiles:
    """The files of a measurement: a manifest, and a `.npy` for every complete shard, int64[n]."""

    def __init__(
        self,
        directory: Path,
        num_samples: int,
        shard_size: int,
        quantity: str,
        function: Callable[..., object],
        check: Check,
    ):
        while isinstance(function, functools.partial):
            function = function.func
        named = function if hasattr(function, "__qualname__") else type(function)
        self._directory, self._shard_size, self._check = directory, shard_size, check
        self._shards = [range(num_samples)[start : start + shard_size] for start in range(0, num_samples, shard_size)]
        self._num_missing = list(map(len, self._shards))
        self._manifest = {
            "format_version": _SHARDS_VERSION,
            "quantity": quantity,
            "function": f"{getattr(named, '__module__', None) or 'builtins'}.{named.__qualname__}",
            "num_samples": num_samples,
            "shard_size": shard_size,
        }

    def read(self, store: Callable[[range, Values], object]) -> list[range]:
        """Hands existing shards to `store`, or begins a directory; returns the samples of each missing shard."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "manifest.json"
        if path.exists():
            found = read_object(path)
            differing = [name for name, wanted in self._manifest.items() if found.get(name) != wanted]
            if differing:
                listed = "; ".join(f"{name} is {found.get(name)!r}, not {self._manifest[name]!r}" for name in differing)
                raise UserError(f"{self._directory} is of another measuring: {listed}. Delete it or take another one")
        else:
            save_json(self._manifest, path)
        for index, shard in enumerate(self._shards):
            if (path := self._path(index)).exists():
                values = load_array(path, str(self._manifest["quantity"]))
                if len(values) != len(shard):
                    raise UserError(f"{path} holds {len(values)} values, not {len(shard)}: delete it")
                store(shard, values)
                self._num_missing[index] = 0
        return [shard for shard, num_missing in zip(self._shards, self._num_missing, strict=True) if num_missing]

    def add(self, samples: range, values: Values) -> None:
        """Notes that all values hold these samples of a shard; writes it once it is whole and passes the check."""
        index = samples.start // self._shard_size
        self._num_missing[index] -= len(samples)
        if self._num_missing[index]:
            return
        shard = self._shards[index]
        try:
            values = self._check(values[shard.start : shard.stop])
        except ValueError:  # the check of all values lists the offenders of all shards
            return
        content = io.BytesIO()  # when writing to a file, NumPy would not report a full disk
        np.save(content, values, allow_pickle=False)
        with write_atomically(self._path(index)) as file:
            file.write(content.getbuffer())

    def _path(self, index: int) -> Path:
        return self._directory / f"{index:0{len(str(len(self._shards) - 1))}}.npy"  # names sort as the shards do
