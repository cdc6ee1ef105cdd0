"""The digest of a plan, and its `.npz` file, verified when it is loaded.

Nothing is pickled. Letters: M microbatches a step, K buckets, S steps, n samples.
"""

from __future__ import annotations

import hashlib
import io
import math
import reprlib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from jaxtyping import Int32, Int64, Integer, Shaped

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import write_atomically
from jvarlen.planning.buckets import check_buckets
from jvarlen.planning.lengths import PackedOverlong

__all__ = [
    "DIGEST_CHUNK",
    "chunk_digest",
    "digest_of_chunks",
    "plan_checksum",
    "plan_digest",
    "read_plan_file",
    "write_plan_file",
]

Fields = dict[str, Shaped[np.ndarray, "..."]]

# 2: packings draw from a random stream of their own, so that the same arguments can give other packed plans.
_FORMAT_VERSION = 2
_READABLE_VERSIONS = (1, 2)  # the same arrays
_MAX_REASON = 300  # characters
_DIGEST_NAME = b"jvarlen-plan-1\0"
_PACKED_DIGEST_NAME = b"jvarlen-packed-plan-1\0"
_SPLIT_DIGEST_NAME = b"jvarlen-split-plan-1\0"
DIGEST_CHUNK = 2**20  # sample ids; processes that hold parts of a plan can hash their chunks each for itself

# The type and the number of dimensions of every array in the file.
_FIELDS: dict[str, tuple[type, int]] = {
    "format_version": (np.int64, 0),
    "microbatches_per_step": (np.int64, 0),
    "buckets": (np.int64, 2),
    "step_bucket": (np.int32, 1),
    "step_offsets": (np.int64, 1),
    "sample_ids": (np.int64, 1),
    "num_tokens": (np.int64, 1),
    "num_dropped": (np.int64, 0),
    "num_truncated": (np.int64, 0),
    "overlong": (np.str_, 0),
    "digest": (np.str_, 0),
    "checksum": (np.str_, 0),
}
_PACKED_FIELDS: dict[str, tuple[type, int]] = {"row_offsets": (np.int64, 1)}  # of packed plans only
_SPLIT_FIELDS = _PACKED_FIELDS | {"piece_starts": (np.int64, 1)}  # of those that split samples


def plan_digest(
    microbatches_per_step: int,
    buckets: Sequence[tuple[int, ...]],
    step_bucket: Int32[np.ndarray, " S"],
    step_offsets: Int64[np.ndarray, " S_plus_1"],
    sample_ids: Int64[np.ndarray, " n"],
    row_offsets: Int64[np.ndarray, " R_plus_1"] | None = None,
    piece_starts: Int64[np.ndarray, " n"] | None = None,
) -> str:
    """SHA-256 in hex of everything that decides the batches, as 64 hex digits."""
    chunks = (chunk_digest(sample_ids[i : i + DIGEST_CHUNK]) for i in range(0, len(sample_ids), DIGEST_CHUNK))
    return digest_of_chunks(
        microbatches_per_step, buckets, step_bucket, step_offsets, chunks, row_offsets, piece_starts
    )


def chunk_digest(sample_ids: Integer[np.ndarray, " n"]) -> bytes:
    """SHA-256, 32 bytes, of `DIGEST_CHUNK` sample ids in the order of the plan, or of its last ones."""
    return hashlib.sha256(sample_ids.astype("<i8", copy=False).tobytes()).digest()


def digest_of_chunks(
    microbatches_per_step: int,
    buckets: Sequence[tuple[int, ...]],
    step_bucket: Int32[np.ndarray, " S"],
    step_offsets: Int64[np.ndarray, " S_plus_1"],
    chunk_digests: Iterable[bytes],
    row_offsets: Int64[np.ndarray, " R_plus_1"] | None = None,
    piece_starts: Int64[np.ndarray, " n"] | None = None,
) -> str:
    """The digest of a plan from the digests of its chunks of sample ids, which others may have made."""
    packed_name = _PACKED_DIGEST_NAME if piece_starts is None else _SPLIT_DIGEST_NAME
    sha = hashlib.sha256(_DIGEST_NAME if row_offsets is None else packed_name)
    num_samples = int(step_offsets[-1])
    sha.update(np.array([microbatches_per_step, len(buckets), len(step_bucket), num_samples], "<i8").tobytes())
    sha.update(np.array(buckets, "<i8").tobytes())
    sha.update(step_bucket.astype("<i4", copy=False).tobytes())
    sha.update(step_offsets.astype("<i8", copy=False).tobytes())
    if row_offsets is not None:
        sha.update(np.array(len(row_offsets) - 1, "<i8").tobytes())
        sha.update(row_offsets.astype("<i8", copy=False).tobytes())
    if piece_starts is not None:
        sha.update(piece_starts.astype("<i8", copy=False).tobytes())
    for digest in chunk_digests:
        sha.update(digest)
    return sha.hexdigest()


def write_plan_file(path: Path, fields: Fields) -> None:
    """Writes a plan's arrays and their digest to one uncompressed `.npz` file, atomically."""
    sealed = fields | {
        "format_version": np.array(_FORMAT_VERSION, np.int64),
        "checksum": np.array(_checksum(fields)),
    }
    arrays: dict[str, np.ndarray] = {
        name: sealed[name].astype(dtype, copy=False) for name, (dtype, _) in _fields_of(sealed).items()
    }
    with write_atomically(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_plan_file(path: Path) -> Fields:
    """Reads what `write_plan_file` wrote."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            fields = _read_arrays(archive)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no plan file {path}") from None
    except Exception as error:  # damage shows in many ways: as zip, as header of an array, as memory that there is not
        reason = str(error)[:_MAX_REASON]  # NumPy repeats what it cannot read
        raise UserError(f"{path} is not a readable plan file: {reason}") from error
    try:
        _check_fields(fields)
        _check_structure(fields)
        _check_seals(fields)
    except ValueError as error:
        raise UserError(f"{path} is refused: {error}") from None
    return fields


def _read_arrays(archive: zipfile.ZipFile) -> Fields:
    """All arrays of an archive. A claimed size takes no memory unless the file has the bytes to fill it."""
    names = [member.filename for member in archive.infolist()]
    compressed = [member.filename for member in archive.infolist() if member.compress_type]
    if compressed or len(set(names)) != len(names):
        raise UserError("its arrays are compressed, or there twice")
    if "format_version.npy" not in names:
        raise UserError("it holds no plan (no format_version)")
    version = _read_array(archive.read("format_version.npy"))
    if version.shape != () or version not in _READABLE_VERSIONS:
        said = reprlib.repr(version.tolist())
        readable = " and ".join(map(str, _READABLE_VERSIONS))
        raise UserError(f"its format_version is {said}, this version of the library reads {readable}")
    expected = {f"{name}.npy" for name in _FIELDS}
    optional = [{f"{name}.npy" for name in fields} for fields in ({}, _PACKED_FIELDS, _SPLIT_FIELDS)]
    if (at_fault := expected ^ set(names)) not in optional:
        listed = list_first(reprlib.repr(name.removesuffix(".npy")) for name in sorted(at_fault))
        raise UserError(f"its fields are not those of a plan; at fault: {listed}")
    return {name.removesuffix(".npy"): _read_array(archive.read(name)) for name in names}


def _read_array(content: bytes) -> Shaped[np.ndarray, ...]:
    """The array of a `.npy` file, which must have as many bytes as its shape says."""
    file = io.BytesIO(content)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, is_fortran, dtype = read_header[np.lib.format.read_magic(file)](file)
    num_values, num_bytes = math.prod(shape), len(content) - file.tell()
    if num_values * dtype.itemsize != num_bytes:
        raise UserError(f"{num_bytes:,} bytes are not {dtype}{list(shape)}")
    array = np.frombuffer(content, dtype, num_values, file.tell()).reshape(shape, order="F" if is_fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def _fields_of(fields: Fields) -> dict[str, tuple[type, int]]:
    """The arrays that such a plan has."""
    packed = _SPLIT_FIELDS if "piece_starts" in fields else _PACKED_FIELDS
    return _FIELDS | packed if "row_offsets" in fields else _FIELDS


def _check_fields(fields: Fields) -> None:
    mistyped = [
        f"{name} is {fields[name].dtype}{list(fields[name].shape)}"
        for name, (dtype, ndim) in _fields_of(fields).items()
        if not np.issubdtype(fields[name].dtype, dtype) or fields[name].ndim != ndim
    ]
    if mistyped:
        raise UserError(f"wrong dtype or number of dimensions: {', '.join(mistyped)}")


def _check_structure(fields: Fields) -> None:
    """Raises ValueError that lists everything impossible in a plan."""
    microbatches = int(fields["microbatches_per_step"])
    step_bucket, offsets, ids = fields["step_bucket"], fields["step_offsets"], fields["sample_ids"]
    buckets = check_buckets(fields["buckets"].tolist())
    rows = np.array([bucket.rows for bucket in buckets])
    wrong = []
    if microbatches < 1:
        wrong.append("microbatches_per_step is below 1")
    if str(fields["overlong"]) not in get_args(PackedOverlong):
        wrong.append(f"overlong is {reprlib.repr(str(fields['overlong']))}")
    if fields["num_dropped"] < 0 or fields["num_truncated"] < 0:
        wrong.append("num_dropped or num_truncated is negative")
    if len(step_bucket) == 0 or len(offsets) != len(step_bucket) + 1 or len(fields["num_tokens"]) != len(step_bucket):
        wrong.append("step_bucket, step_offsets and num_tokens do not agree on the number of steps")
    elif step_bucket.min() < 0 or step_bucket.max() >= len(rows):
        wrong.append("step_bucket names buckets that do not exist")
    else:
        if offsets[0] != 0 or offsets[-1] != len(ids):
            wrong.append("step_offsets do not span sample_ids")
        row_offsets = fields.get("row_offsets", np.arange(len(ids) + 1))
        spans = len(row_offsets) > 1 and row_offsets[0] == 0 and row_offsets[-1] == len(ids)
        # Compared, not subtracted: differences of what a file holds can overflow.
        if not spans or (row_offsets[1:] <= row_offsets[:-1]).any():
            wrong.append("row_offsets do not ascend from 0 to the number of samples")
        elif not np.isin(offsets, row_offsets).all():
            wrong.append("step_offsets cut rows")
        sizes = np.diff(np.searchsorted(row_offsets, offsets))
        if (sizes < 1).any() or (sizes > microbatches * rows[step_bucket]).any():
            wrong.append("step_offsets give steps without samples, or with more than they have rows")
        most = np.array([min(microbatches * bucket.padded_tokens, 2**63 - 1) for bucket in buckets])[step_bucket]
        tokens = fields["num_tokens"]
        if (tokens < np.diff(offsets)).any() or (tokens > most).any():
            wrong.append("num_tokens are fewer than samples, or more than their steps have room for")
    if len(ids) and ids.min() < 0:
        wrong.append("sample_ids are negative")
    starts = fields.get("piece_starts")
    if starts is not None and (len(starts) != len(ids) or (len(starts) and starts.min() < 0)):
        wrong.append("piece_starts are negative, or not as many as sample_ids")
    elif _repeat(ids, starts):
        wrong.append("sample_ids repeat")
    if wrong:
        raise UserError("; ".join(wrong))


def _repeat(ids: Int64[np.ndarray, " n"], starts: Int64[np.ndarray, " n"] | None) -> bool:
    """Whether a sample comes twice, or a piece of one."""
    if starts is None:
        return len(np.unique(ids)) != len(ids)
    by_piece = np.lexsort([starts, ids])
    ids, starts = ids[by_piece], starts[by_piece]
    return bool(((ids[1:] == ids[:-1]) & (starts[1:] == starts[:-1])).any())


def _check_seals(fields: Fields) -> None:
    buckets = [tuple(bucket) for bucket in fields["buckets"].tolist()]
    names = ("step_bucket", "step_offsets", "sample_ids", "row_offsets", "piece_starts")
    digest = plan_digest(int(fields["microbatches_per_step"]), buckets, *map(fields.get, names))  # type: ignore[arg-type]
    if digest != str(fields["digest"]):
        raise UserError(
            f"its digest is {digest}, but it says {reprlib.repr(str(fields['digest']))}: it was damaged or edited"
        )
    if _checksum(fields) != str(fields["checksum"]):
        raise UserError("num_tokens, num_dropped, num_truncated or overlong were damaged or edited")


def _checksum(fields: Fields) -> str:
    counts = (int(fields["num_dropped"]), int(fields["num_truncated"]))
    return plan_checksum(str(fields["digest"]), fields["num_tokens"], *counts, str(fields["overlong"]))


def plan_checksum(
    digest: str, num_tokens: Int64[np.ndarray, " S"], num_dropped: int, num_truncated: int, overlong: str
) -> str:
    """SHA-256 in hex of the digest and of what the digest leaves out."""
    sha = hashlib.sha256(digest.encode())
    sha.update(num_tokens.astype("<i8", copy=False).tobytes())
    sha.update(np.array([num_dropped, num_truncated], "<i8").tobytes())
    sha.update(overlong.encode())
    return sha.hexdigest()
