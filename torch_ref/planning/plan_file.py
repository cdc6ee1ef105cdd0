"""The digest of a plan, and its file, verified when it is loaded.

Plans of very many samples are files of another kind: raw arrays after a header of 4096 bytes, which hold a digest of
every 2**20 sample ids. They are mapped, not read.
"""

import hashlib
import json
import math
import os
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_ref.checks import check_integer
from torch_ref.planning.lengths import SIZES

__all__ = ["plan_digest", "read_plan_file", "write_plan_file"]

Arrays = dict[str, NDArray[Any]]
Json = Any  # a header of JSON, whose values are checked where they are used

# The arrays of both versions are the same, but plans of version 1 may not be made again alike: packings took their
# random keys from the plan's stream.
_VERSION = 2
_CHUNK = 2**20
# name: (dtype, or "U" for text of any length; number of dimensions)
_FIELDS = {
    "format_version": ("int64", 0),
    "microbatches_per_step": ("int64", 0),
    "buckets": ("int64", 2),
    "step_bucket": ("int32", 1),
    "step_offsets": ("int64", 1),
    "sample_ids": ("int64", 1),
    "num_tokens": ("int64", 1),
    "num_dropped": ("int64", 0),
    "num_truncated": ("int64", 0),
    "overlong": ("U", 0),
    "digest": ("U", 0),
    "checksum": ("U", 0),
}
# In plans whose steps have several groups, in place of those of steps; tokens are then counted by group.
_STEP_FIELDS = ("step_bucket", "step_offsets")
_GROUP_FIELDS = {"group_bucket": ("int32", 1), "step_groups": ("int64", 1), "group_offsets": ("int64", 1)}
_PACKED_FIELDS = ("row_offsets", "samples_per_row")  # in plans of packed rows only
_RAW_MAGIC = b"jvarlen-plan-raw"
_RAW_HEADER_SIZE = 4096
_RAW_VERSION = 1
_RAW_OVERLONG = ("error", "drop", "truncate")


def plan_digest(
    num_microbatches: int,
    buckets: NDArray[np.int64],
    group_bucket: NDArray[np.int32],
    group_offsets: NDArray[np.int64],
    sample_ids: NDArray[np.int64],
    row_offsets: NDArray[np.int64] | None = None,
    piece_starts: NDArray[np.int64] | None = None,
    step_groups: NDArray[np.int64] | None = None,
    group_ids: NDArray[np.int64] | None = None,
    *,
    is_split: bool = False,
) -> str:
    """Return the SHA-256 of what a plan does, as 64 hex digits; without `step_groups` each group is a step.

    `is_split` says whether `piece_starts` are of the chunks of split samples, or of what stays of those that are cut.

    The ids enter as the hashes of chunks of 2**20, so that processes which hold a part each can compute it together.
    """
    num_steps = [] if step_groups is None else [len(step_groups) - 1]
    sizes = [num_microbatches, len(buckets), *num_steps, len(group_bucket), len(sample_ids)]
    kinds = ["jvarlen"] if group_ids is None else ["jvarlen", "group-ids"]
    if step_groups is not None:
        kinds.append("groups")
    if piece_starts is not None:
        kinds.append("split" if is_split else "cut")
    if row_offsets is not None and not is_split:
        kinds.append("packed")
    if buckets.shape[1] > 3:
        kinds.append("lengths")
        sizes.insert(2, buckets.shape[1] - 1)
    tag = "-".join([*kinds, "plan-1\0"]).encode()
    total = hashlib.sha256(tag + _little_endian(sizes) + _little_endian(buckets))
    total.update(_little_endian(group_bucket, "<i4"))
    if step_groups is not None:
        total.update(_little_endian(step_groups))
    total.update(_little_endian(group_offsets))
    if row_offsets is not None:
        total.update(_little_endian([len(row_offsets) - 1]) + _little_endian(row_offsets))
    if piece_starts is not None:
        total.update(_little_endian(piece_starts))
    if group_ids is not None:
        total.update(_little_endian([len(group_ids)]) + _little_endian(group_ids))
    for start in range(0, len(sample_ids), _CHUNK):
        total.update(hashlib.sha256(_little_endian(sample_ids[start : start + _CHUNK])).digest())
    return total.hexdigest()


def write_plan_file(path: str | os.PathLike[str], *, size: str = "sum", **fields: ArrayLike) -> None:
    """Write a plan's fields to an uncompressed .npz file, through a temporary file in the same folder.

    The fields are all of the format but its version, digest and checksum; `row_offsets` and `samples_per_row` only of
    packed rows, `piece_starts` only where samples are split or lack their beginning, `group_ids` only of samples that
    have some, and those of groups only where steps have several.
    """
    kinds = {name: kind for name, (kind, _) in _fields_of(fields).items()}
    arrays = {name: _as_array(value, kinds[name]) for name, value in fields.items()}
    digest = _digest_of(arrays)
    checksum = _checksum(digest, arrays, size)
    sealed: dict[str, ArrayLike] = {"format_version": _VERSION, "digest": digest, "checksum": checksum}
    arrays |= {name: _as_array(value, kinds[name]) for name, value in sealed.items()}
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, allow_pickle=False, **{name: arrays[name] for name in kinds})
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def read_plan_file(path: str | os.PathLike[str]) -> tuple[Arrays, str]:
    """Read and verify a plan file: its fields by name, with the dtypes of the format, and what pairs count.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a plan file, of another version, cut short or changed; the message names it.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path}: not a regular file")
    with open(path, "rb") as file:
        if file.read(len(_RAW_MAGIC)) == _RAW_MAGIC:
            return _map_raw_file(path), "sum"
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) as archive:
                if any(member.compress_type for member in archive.zip.infolist()):
                    raise ValueError("its arrays are compressed")
                fields = {name: archive[name] for name in archive.files}
        # A damaged archive fails in many ways (BadZipFile, KeyError, EOFError, struct.error, ...): all mean the same.
        except Exception as error:
            raise ValueError(f"{path}: not a readable plan file ({type(error).__name__}: {error})") from error
    problem, counted = _find_problem(fields), "sum"
    if not problem:
        # The checksum alone holds what pairs count: every file has the same fields.
        digest = _digest_of(fields)
        seals = {_checksum(digest, fields, word): word for word in SIZES}
        counted = seals.get(str(fields["checksum"]), "")
        if not counted:
            problem = "its counts (num_tokens, num_dropped, num_truncated, overlong) were changed: checksum is another"
    if problem:
        raise ValueError(f"{path}: {problem}")
    return fields, counted


def _map_raw_file(path: str | os.PathLike[str]) -> Arrays:
    """Map the arrays of a raw plan file; the ids are verified only where the file was changed since it was written."""
    with open(path, "rb") as file:
        start = file.read(_RAW_HEADER_SIZE)
        status = os.fstat(file.fileno())
    text = start[len(_RAW_MAGIC) + 32 :]
    if hashlib.sha256(text).digest() != start[len(_RAW_MAGIC) :][:32] or len(start) < _RAW_HEADER_SIZE:
        raise ValueError(f"{path}: the header is damaged")
    try:
        header = _check_header(json.loads(text))
        if status.st_size != header["num_bytes"]:
            raise ValueError(f"{status.st_size} bytes where the header says {header['num_bytes']}: it was cut")
        fields: Arrays = {
            name: np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)
            for name, (dtype, shape, offset) in _raw_layout(header["arrays"]).items()
        }
        fields["buckets"] = np.array(fields["buckets"])
        for name in ("microbatches_per_step", "num_dropped", "num_truncated", "overlong", "digest", "checksum"):
            fields[name] = np.array(header[name])
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    del fields["chunk_digests"]
    if abs(status.st_mtime_ns - header["changed_ns"]) < 1000:
        return fields
    if _digest_of(fields) != header["digest"] or _checksum(header["digest"], fields) != header["checksum"]:
        raise ValueError(f"{path}: it was changed, its arrays do not have the digest {header['digest']}")
    return fields


def _check_header(header: Json) -> Json:
    if header["format_version"] != _RAW_VERSION:
        raise ValueError(f"raw plan format {header['format_version']}, this version reads {_RAW_VERSION}")
    check_integer("microbatches_per_step", header["microbatches_per_step"])
    for name in ("num_dropped", "num_truncated", "changed_ns"):
        check_integer(name, header[name], minimum=0)
    if header["overlong"] not in _RAW_OVERLONG:
        raise ValueError(f"overlong is {header['overlong']!r}, not one of {', '.join(_RAW_OVERLONG)}")
    layout = _raw_layout(header["arrays"])
    given = {name: (array["dtype"], tuple(array["shape"]), array["offset"]) for name, array in header["arrays"].items()}
    dtype, shape, offset = layout["sample_ids"]
    size = _pages(np.dtype(dtype).itemsize * shape[0])
    if given != layout or header["num_bytes"] != offset + size:
        raise ValueError("its arrays have other types, shapes or places than those of a plan")
    return header


def _raw_layout(arrays: Json) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return the dtype, shape and place of each array of a raw file, from the sizes that its header says."""
    buckets, steps, ids = (
        check_integer(f"size of {name}", arrays[name]["shape"][0]) for name in ("buckets", "step_bucket", "sample_ids")
    )
    layout: dict[str, tuple[str, tuple[int, ...], int]] = {}
    offset = _RAW_HEADER_SIZE
    for name, dtype, shape in (
        ("buckets", "<i8", (buckets, 2)),
        ("step_bucket", "<i4", (steps,)),
        ("step_offsets", "<i8", (steps + 1,)),
        ("num_tokens", "<i8", (steps,)),
        ("chunk_digests", "|u1", (-(-ids // _CHUNK), 32)),
        ("sample_ids", "<i8", (ids,)),
    ):
        layout[name] = dtype, shape, offset
        offset += _pages(np.dtype(dtype).itemsize * math.prod(shape))
    return layout


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // _RAW_HEADER_SIZE) * _RAW_HEADER_SIZE


def _find_problem(fields: Arrays) -> str | None:
    version = fields.get("format_version")
    if version is not None and (version.shape != () or version != _VERSION):
        reader = "jvarlen 0.1.0" if str(version) == "1" else "another version"
        return f"plan format {version}, which {reader} reads; this version reads format {_VERSION}"
    expected = _fields_of(fields)
    if fields.keys() != expected.keys():
        missing, unknown = sorted(expected.keys() - fields.keys()), sorted(fields.keys() - expected.keys())
        return f"not a plan file of format {_VERSION}: missing {missing}, unknown {unknown}"
    for name, (kind, num_dims) in expected.items():
        array = fields[name]
        right_kind = array.dtype.kind == "U" if kind == "U" else array.dtype == kind
        is_of_sides = name == "piece_starts" and array.ndim == 2  # of pairs, as the plan checks
        if not right_kind or (array.ndim != num_dims and not is_of_sides):
            return f"{name} has dtype {array.dtype} and shape {array.shape}, not {kind} with {num_dims} dimensions"
    digest = _digest_of(fields)
    if digest != str(fields["digest"]):
        return f"the plan was changed: its digest is {digest}, the file says {fields['digest']}"
    return None


def _fields_of(names: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return the fields of a file that has these, with their kinds."""
    packed = _PACKED_FIELDS if "row_offsets" in names else ()
    others = [name for name in ("piece_starts", "group_ids") if name in names]
    of_steps = _FIELDS
    if "step_groups" in names:
        of_steps = {name: kind for name, kind in _FIELDS.items() if name not in _STEP_FIELDS} | _GROUP_FIELDS
    return of_steps | dict.fromkeys([*packed, *others], ("int64", 1))


def _digest_of(fields: Arrays) -> str:
    return plan_digest(
        int(fields["microbatches_per_step"]),
        fields["buckets"],
        fields["group_bucket" if "step_groups" in fields else "step_bucket"],
        fields["group_offsets" if "step_groups" in fields else "step_offsets"],
        fields["sample_ids"],
        fields.get("row_offsets"),
        fields.get("piece_starts"),
        fields.get("step_groups"),
        fields.get("group_ids"),
        is_split="piece_starts" in fields and str(fields["overlong"]) == "split",
    )


def _as_array(value: ArrayLike, kind: str) -> NDArray[Any]:
    return np.asarray(value, dtype=None if kind == "U" else np.dtype(kind).newbyteorder("<"))


def _checksum(digest: str, fields: Arrays, counted: str = "sum") -> str:
    counts = _little_endian(fields["num_tokens"]) + _little_endian([fields["num_dropped"], fields["num_truncated"]])
    if "samples_per_row" in fields:
        counts += _little_endian(fields["samples_per_row"])
    words = str(fields["overlong"]) + ("" if counted == "sum" else f"\0{counted}")
    return hashlib.sha256(digest.encode("ascii") + counts + words.encode("utf-8")).hexdigest()


def _little_endian(values: ArrayLike, dtype: str = "<i8") -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()
