"""Executables: in go the programs of buckets, out comes the one of a bucket, held as long as it is needed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import jax
from jax.experimental import serialize_executable

from jvarlen.buckets import AnyBucket

__all__ = ["Executables", "deserialized", "serialized"]


class Executables:
    """The programs of buckets, at most some of them on the devices; the others wait on the host until they are used.

    Args:
      devices: those that the programs run on.
      max_live: programs on the devices at once, the least recently used make room; None: all.
    """

    def __init__(self, devices: list[jax.Device], max_live: int | None):
        self._devices = devices
        self._max_live = max_live
        self._live: OrderedDict[AnyBucket, jax.stages.Compiled] = OrderedDict()  # least recently used first
        self._stored: dict[AnyBucket, tuple[bytes, Any, Any]] = {}
        self._lock = threading.Lock()

    def add(
        self, bucket: AnyBucket, compiled: jax.stages.Compiled, stored: tuple[bytes, Any, Any] | None = None
    ) -> None:
        """Takes the program of a bucket, and, where that is known, what `serialized` gave for it.

        Raises:
          ValueError: there is a limit, and the backend cannot store programs on the host.
        """
        with self._lock:
            if self._max_live is not None:
                self._stored[bucket] = stored or serialized(compiled)
            self._hold(bucket, compiled)

    def get(self, bucket: AnyBucket) -> jax.stages.Compiled:
        """The program, loaded again where it had made room; nothing is compiled. KeyError where it was released."""
        if self._max_live is None:
            return self._live[bucket]
        with self._lock:
            if bucket in self._live:
                self._live.move_to_end(bucket)
                return self._live[bucket]
            program = deserialized(*self._stored[bucket], self._devices)
            self._hold(bucket, program)
            return program

    def any_live(self) -> jax.stages.Compiled:
        """One of the programs on the devices."""
        return next(iter(self._live.values()))

    def serialized(self, bucket: AnyBucket) -> tuple[bytes, Any, Any]:
        """The program as `serialized` gives it. KeyError where it was released."""
        return self._stored[bucket] if bucket in self._stored else serialized(self._live[bucket])

    def has(self, bucket: AnyBucket) -> bool:
        """Whether the program was not released."""
        return bucket in self._live or bucket in self._stored

    def is_stored(self, bucket: AnyBucket) -> bool:
        """Whether the program waits on the host as well."""
        return bucket in self._stored

    def is_live(self, bucket: AnyBucket) -> bool:
        """Whether the program is on the devices."""
        return bucket in self._live

    def release(self, bucket: AnyBucket) -> None:
        """Lets a program go for good; a step that still runs it is not disturbed."""
        with self._lock:
            self._live.pop(bucket, None)
            self._stored.pop(bucket, None)

    def _hold(self, bucket: AnyBucket, compiled: jax.stages.Compiled) -> None:
        while self._max_live is not None and len(self._live) >= self._max_live:
            self._live.popitem(last=False)
        self._live[bucket] = compiled


def serialized(compiled: jax.stages.Compiled) -> tuple[bytes, Any, Any]:
    """A program as bytes, and the structures of its arguments and its results.

    Raises:
      ValueError: the backend cannot, or not with this program.
    """
    try:
        return serialize_executable.serialize(compiled)
    except Exception as error:  # its type depends on the backend
        raise ValueError(f"this program cannot be turned into bytes here: {error}") from error


def deserialized(program: bytes, in_tree: Any, out_tree: Any, devices: list[jax.Device]) -> jax.stages.Compiled:
    """The program of what `serialized` gave. Loading it runs code: never of bytes that someone else could write."""
    client = devices[0].client
    return serialize_executable.deserialize_and_load(
        program, in_tree, out_tree, backend=client, execution_devices=devices
    )
