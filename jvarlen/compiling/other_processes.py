"""What the processes that compile a step together tell each other, through the key-value store.

A thread in the background must not take part in a collective.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future

import jax

from jvarlen._common.checks import UserError, list_first
from jvarlen.compiling.lowering import CompiledBucket
from jvarlen.distributed.processes import ProcessesError, key_value_store
from jvarlen.planning.buckets import AnyBucket

__all__ = ["OtherProcesses"]

_POLL_S = 0.02  # between two looks at what was told


class OtherProcesses:
    """What all processes tell of their programs through the key-value store; `missing`: not compiled yet by all."""

    _numbers = itertools.count()  # all processes compile the same steps, in the same order

    def __init__(self, buckets: Sequence[AnyBucket]):
        self._prefix = f"jvarlen/compiled-{next(self._numbers)}/"
        self._process = jax.process_index()
        self._places = {bucket: place for place, bucket in enumerate(buckets)}
        self.missing = set(buckets)
        self._last_look = 0.0

    def tell(self, bucket: AnyBucket, digest: str, done: Future[CompiledBucket]) -> None:
        """Tells the others that a bucket is compiled, or why not; from whatever thread that was in."""
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            self.tell_error(bucket, error)
        else:
            self._tell(bucket, digest=digest)

    def tell_error(self, bucket: AnyBucket, error: BaseException) -> None:
        """Tells the others that a bucket could not be compiled."""
        self._tell(bucket, error=f"{type(error).__name__}: {error}")

    def _tell(self, bucket: AnyBucket, **what: str) -> None:
        key = f"{self._prefix}{self._process}/{self._places[bucket]}"
        told = {"process": self._process, "bucket": str(bucket), **what}
        key_value_store().key_value_set(key, json.dumps(told), allow_overwrite=True)

    def check(self) -> None:
        """Looks at what was told: raises if another process failed or compiled another program."""
        if not self.missing or time.monotonic() - self._last_look < _POLL_S:
            return
        self._last_look = time.monotonic()
        try:
            entries = key_value_store().key_value_dir_get(self._prefix)
        except Exception as error:  # its type depends on the backend
            raise ProcessesError("process 0, where all meet, does not answer") from error
        told = [json.loads(text) for _, text in entries]
        failed = [
            f"process {each['process']}, bucket {each['bucket']}: {each['error']}"
            for each in told
            if "error" in each and each["process"] != self._process
        ]
        if failed:
            raise ProcessesError(f"other processes could not compile: {list_first(sorted(failed), '; ')}")
        for bucket in list(self.missing):
            compiled = [each for each in told if each["bucket"] == str(bucket) and "digest" in each]
            digests = {each["process"]: each["digest"] for each in compiled}
            if len(set(digests.values())) > 1:
                listed = ", ".join(f"process {process}: {digest[:12]}…" for process, digest in sorted(digests.items()))
                raise UserError(f"processes compiled different programs for bucket {bucket} (SHA-256 of {listed})")
            if len(digests) == jax.process_count():
                self.missing.discard(bucket)
