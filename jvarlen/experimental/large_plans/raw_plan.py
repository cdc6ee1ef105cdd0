"""A plan as one file of raw arrays with a header, opened as memory maps in milliseconds.

The file begins with `_MAGIC`, the SHA-256 of the header (32 bytes) and the header, JSON filled up with spaces to
`_HEADER_BYTES` in all. The header has the digest and all else that is not an array, and of each array the type, the
shape and the place. Letters: M microbatches a step, K buckets, S steps, n samples, C chunks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import reprlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int64, Shaped

from jvarlen._common.checks import UserError, check_at_least_one, check_at_least_zero, check_choices, list_first
from jvarlen._common.files import regular_file, take_space
from jvarlen._common.terminal import progress_bar
from jvarlen.experimental.large_plans.columns import run_ahead, write_values
from jvarlen.experimental.large_plans.histogram import LargeOverlong
from jvarlen.planning.buckets import Buckets
from jvarlen.planning.plan import Plan
from jvarlen.planning.plan_file import DIGEST_CHUNK, chunk_digest, plan_checksum, plan_digest
from jvarlen.planning.steps import check_steps

__all__ = ["MappedPlan", "PlanFileWriter", "open_plan"]

_MAGIC = b"jvarlen-plan-raw"
_FORMAT_VERSION = 1
_ALIGNMENT = _HEADER_BYTES = 4096
_HASH_BYTES = 32

Arrays = dict[str, Shaped[np.ndarray, "..."]]


class PlanFileWriter:
    """Writes the file of a plan whose sizes are known, array by array.

    Args:
      path: the file; what it has already stays.
      num_buckets: K.
      num_steps: S.
      num_samples: n.

    Attributes:
      arrays: type, shape and place of each array.
      num_bytes: of the whole file.
    """

    def __init__(self, path: Path, num_buckets: int, num_steps: int, num_samples: int):
        self._path = path
        self.arrays: dict[str, dict[str, Any]] = {}
        self.num_bytes = _HEADER_BYTES
        for name, dtype, shape in (
            ("buckets", "<i8", (num_buckets, 2)),
            ("step_bucket", "<i4", (num_steps,)),
            ("step_offsets", "<i8", (num_steps + 1,)),
            ("num_tokens", "<i8", (num_steps,)),
            ("chunk_digests", "|u1", (-(-num_samples // DIGEST_CHUNK), _HASH_BYTES)),
            ("sample_ids", "<i8", (num_samples,)),
        ):
            self.arrays[name] = {"dtype": dtype, "shape": list(shape), "offset": self.num_bytes}
            num_bytes = np.dtype(dtype).itemsize * math.prod(shape)
            self.num_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def take_space(self) -> None:
        """Takes the space of the whole file, so that a full disk shows before the work.

        Raises:
          OSError: there is not enough space.
        """
        with self._path.open("ab") as file:
            take_space(file, self.num_bytes)

    def write(self, name: str, values: Shaped[np.ndarray, " m *rest"], start: int = 0) -> None:
        """Writes values of an array from its place `start` on."""
        array = self.arrays[name]
        values = np.ascontiguousarray(values, array["dtype"])
        row_bytes = values.itemsize * math.prod(array["shape"][1:])
        write_values(self._path, values, array["offset"] + start * row_bytes)

    def write_chunk_digests(self, first_chunk: int) -> Iterator[int]:
        """Writes the digests of the sample ids, which are there by now, from a chunk on; yields the next one."""
        digests = _chunk_digests(self._path, self.arrays["sample_ids"], first_chunk)
        for chunk, digest in enumerate(digests, first_chunk):
            self.write("chunk_digests", np.frombuffer(digest, np.uint8)[None], chunk)
            yield chunk + 1

    def finish(self, **values: Any) -> None:
        """Writes the header, after which the file is complete, and on disk.

        Args:
          values: microbatches_per_step, overlong, num_dropped and num_truncated.
        """
        arrays = _map_arrays(self._path, self.arrays)
        ids = self.arrays["sample_ids"]
        num_chunks = len(arrays["chunk_digests"])
        digest = _digest(values["microbatches_per_step"], arrays)
        header = values | {
            "format_version": _FORMAT_VERSION,
            "digest": digest,
            "checksum": _checksum(digest, arrays, values),
            "largest_id": max(int(_read_chunk(self._path, ids, i).max()) for i in range(num_chunks)),
            "num_bytes": self.num_bytes,
            "changed_ns": time.time_ns() // 1000 * 1000,  # not all file systems keep nanoseconds
            "arrays": self.arrays,
        }
        text = json.dumps(header).encode().ljust(_HEADER_BYTES - len(_MAGIC) - _HASH_BYTES)
        with self._path.open("r+b") as file:
            file.write(_MAGIC + hashlib.sha256(text).digest() + text)
            file.flush()
            os.fsync(file.fileno())
        os.utime(self._path, ns=(header["changed_ns"], header["changed_ns"]))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class MappedPlan(Plan):
    """A `Plan` whose arrays are mapped from its file: `open_plan` returns it, and `plan_on_disk`.

    It pickles as the name of its file, which another process opens.
    """

    _path: ClassVar[Path]
    _header: ClassVar[dict[str, Any]]

    def verify(self, *, progress: bool = True) -> None:
        """Reads all of the file, and compares it with its digests.

        Args:
          progress: whether to show a progress bar.

        Raises:
          ValueError: the file is damaged; the message lists the chunks of sample ids and their steps.
        """
        if _read_header(self._path) != self._header:
            raise UserError(f"{self._path} was replaced since it was opened")
        _verify(self._path, self._header, _map_arrays(self._path, self._header["arrays"]), progress)

    def __reduce__(self) -> Any:
        return _open_same, (self._path, self.digest)


def open_plan(path: str | os.PathLike[str]) -> MappedPlan:
    """Opens the file of a plan that `plan_on_disk` wrote, in milliseconds, however long it is.

    Header, size, modification time and steps are checked, and the arrays are mapped. If the time differs, as after
    copying, all of the file is verified first. The sample ids are trusted: that each comes once is not checked.

    Args:
      path: the file.

    Returns:
      The plan.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not such a file, is damaged, incomplete, or of another version; the message says which.
    """
    path = Path(path).absolute()
    header, found = _read_header(path), path.stat()
    if found.st_size != header["num_bytes"]:
        raise UserError(f"{path} is refused: it has {found.st_size:,} bytes, not {header['num_bytes']:,}")
    arrays = _map_arrays(path, header["arrays"])
    if found.st_mtime_ns // 1000 * 1000 != header["changed_ns"]:
        _verify(path, header, arrays, progress=False)
    try:
        plan = MappedPlan(
            buckets=Buckets(tuple(arrays["buckets"].tolist()), header["microbatches_per_step"]),
            num_microbatches=header["microbatches_per_step"],
            overlong=header["overlong"],
            num_dropped=header["num_dropped"],
            num_truncated=header["num_truncated"],
            group_bucket=arrays["step_bucket"],
            group_offsets=arrays["step_offsets"],
            group_tokens=arrays["num_tokens"],
            sample_ids=arrays["sample_ids"],
        )
        check_steps(plan, len(plan.sample_ids), plan.step_offsets)
    except UserError as error:
        raise UserError(f"{path} is refused: {error}") from None
    vars(plan).update(_path=path, _header=header, digest=header["digest"], largest_id=header["largest_id"])
    return plan


def _open_same(path: Path, digest: str) -> MappedPlan:
    """Opens the plan that another process has opened."""
    plan = open_plan(path)
    if plan.digest != digest:
        raise UserError(f"{path} was replaced by another plan since it was opened")
    return plan


def _verify(path: Path, header: dict[str, Any], arrays: Arrays, progress: bool) -> None:
    """Raises ValueError where arrays differ from their digests."""
    ids, offsets = arrays["sample_ids"], arrays["step_offsets"]
    bar = progress_bar(total=len(ids), desc="verify plan", unit="sample", unit_scale=True, progress=progress)
    damaged = []
    with bar as shown:
        for chunk, digest in enumerate(_chunk_digests(path, header["arrays"]["sample_ids"], 0)):
            first, end = chunk * DIGEST_CHUNK, min((chunk + 1) * DIGEST_CHUNK, len(ids))
            if digest != arrays["chunk_digests"][chunk].tobytes():
                steps = np.searchsorted(offsets, [first, end - 1], side="right") - 1
                damaged.append(f"places {first:,} to {end - 1:,} (steps {steps[0]:,} to {steps[1]:,})")
            shown.update(end - first)
    if damaged:
        raise UserError(f"{path} is damaged: the sample ids differ from their digests at {list_first(damaged)}")
    of_all = _digest(header["microbatches_per_step"], arrays)
    if of_all != header["digest"]:
        raise UserError(f"{path} is damaged: its digest is {of_all}, but it says {header['digest']}")
    if _checksum(of_all, arrays, header) != header["checksum"]:
        raise UserError(f"{path} is damaged: num_tokens differ from their checksum")
    if (largest := int(ids.max())) != header["largest_id"]:
        raise UserError(f"{path} is refused: its largest id is {largest}, and it says {header['largest_id']}")


def _read_header(path: Path) -> dict[str, Any]:
    with regular_file(path).open("rb") as file:
        begin = file.read(_HEADER_BYTES)
    if not begin.startswith(_MAGIC):
        raise UserError(f"{path} is not a plan that was made on disk; Plan.load reads what Plan.save wrote")
    text = begin[len(_MAGIC) + _HASH_BYTES :]
    if len(begin) < _HEADER_BYTES or hashlib.sha256(text).digest() != begin[len(_MAGIC) :][:_HASH_BYTES]:
        raise UserError(f"{path} is refused: its header is damaged")
    try:
        header = json.loads(text)
        if header["format_version"] != _FORMAT_VERSION:
            version = reprlib.repr(header["format_version"])
            raise UserError(f"its format_version is {version}, this library reads {_FORMAT_VERSION}")
        _check_header(header)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is refused: {error if isinstance(error, UserError) else repr(error)}") from None
    return header


def _check_header(header: dict[str, Any]) -> None:
    """Raises an error for a header that `PlanFileWriter.finish` does not write."""
    arrays = header["arrays"]
    sizes = {f"number of {name}": arrays[name]["shape"][0] for name in ("buckets", "step_bucket", "sample_ids")}
    check_at_least_one(**sizes, num_microbatches=header["microbatches_per_step"])
    check_at_least_zero(**{name: header[name] for name in ("num_dropped", "num_truncated", "largest_id", "changed_ns")})
    check_choices(overlong=(header["overlong"], LargeOverlong))
    written = PlanFileWriter(Path(), *sizes.values())
    if (arrays, header["num_bytes"]) != (written.arrays, written.num_bytes):
        raise UserError("its arrays have other types, shapes or places than those of such a plan")
    header |= {"arrays": written.arrays, "num_bytes": written.num_bytes}  # 2.0 == 2, and is no size
    for name in ("digest", "checksum"):
        bytes.fromhex(header[name])


def _map_arrays(path: Path, arrays: dict[str, dict[str, Any]]) -> Arrays:
    content = np.memmap(path, np.uint8, "r")  # one map, since each holds a descriptor
    return {name: _part_of(content, **array) for name, array in arrays.items()}


def _part_of(content: np.ndarray, dtype: str, shape: list[int], offset: int) -> np.ndarray:
    num_bytes = np.dtype(dtype).itemsize * math.prod(shape)
    return content[offset : offset + num_bytes].view(dtype).reshape(shape)


def _read_chunk(path: Path, ids: dict[str, Any], chunk: int) -> Int64[np.ndarray, " c"]:
    """A chunk of the sample ids; a map would keep them in memory."""
    start, end = chunk * DIGEST_CHUNK, min((chunk + 1) * DIGEST_CHUNK, ids["shape"][0])
    dtype = np.dtype(ids["dtype"])
    return np.fromfile(path, dtype, end - start, offset=ids["offset"] + start * dtype.itemsize)


def _chunk_digests(path: Path, ids: dict[str, Any], first_chunk: int) -> Iterator[bytes]:
    chunks = range(first_chunk, -(-ids["shape"][0] // DIGEST_CHUNK))
    return run_ahead(lambda chunk: chunk_digest(_read_chunk(path, ids, chunk)), chunks)


def _digest(num_microbatches: int, arrays: Arrays) -> str:
    chunks = (digest.tobytes() for digest in arrays["chunk_digests"])
    return plan_digest(arrays | {"microbatches_per_step": np.array(num_microbatches)}, chunks)


def _checksum(digest: str, arrays: Arrays, values: dict[str, Any]) -> str:
    names = ("num_dropped", "num_truncated", "overlong")
    return plan_checksum(
        {"digest": digest, "num_tokens": arrays["num_tokens"]} | {name: values[name] for name in names}
    )
