"""The digest of a plan, and its `.npz` file, verified when it is loaded.

Nothing is pickled. Letters: M microbatches a step, K buckets, S steps, n samples.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from jaxtyping import Int32, Int64, Integer, Shaped

from jvarlen._common.checks import UserError, check_choices, list_offenders, offenders_where
from jvarlen._common.files import regular_file, write_atomically
from jvarlen.planning.buckets import Buckets, check_buckets, rows_of_steps
from jvarlen.planning.lengths import PackedOverlong, PairSize

__all__ = [
    "DIGEST_CHUNK",
    "check_plan",
    "chunk_digest",
    "chunk_digests",
    "most_in_rows",
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
_ZIP_LENGTHS = 26  # where a member's own header has the lengths of its name and of the extra field
_MOST_IDS_A_SAMPLE = 8  # ids up to so many times the samples are marked in a table; further apart they are sorted
_DIGEST_NAME = b"jvarlen-plan-1\0"
_PACKED_DIGEST_NAME = b"jvarlen-packed-plan-1\0"
_SPLIT_DIGEST_NAME = b"jvarlen-split-plan-1\0"
_COUNTED = ("sum", "larger", "product", "function")  # what pairs count
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
# Of packed plans only: the first of all, the second of those that split samples, the third not of older files.
_PACKED_FIELDS = ("row_offsets", "piece_starts", "samples_per_row")


def chunk_digest(sample_ids: Integer[np.ndarray, " n"]) -> bytes:
    """SHA-256, 32 bytes, of `DIGEST_CHUNK` sample ids in the order of the plan, or of its last ones."""
    return hashlib.sha256(np.ascontiguousarray(sample_ids, "<i8").data).digest()


def chunk_digests(sample_ids: Int64[np.ndarray, " n"]) -> Iterator[bytes]:
    """The digests of all chunks."""
    return (chunk_digest(sample_ids[i : i + DIGEST_CHUNK]) for i in range(0, len(sample_ids), DIGEST_CHUNK))


def plan_digest(
    microbatches_per_step: int,
    buckets: Sequence[tuple[int, ...]],
    step_bucket: Int32[np.ndarray, " S"],
    step_offsets: Int64[np.ndarray, " S_plus_1"],
    digests: Iterable[bytes],
    row_offsets: Int64[np.ndarray, " R_plus_1"] | None = None,
    piece_starts: Int64[np.ndarray, " n"] | None = None,
) -> str:
    """SHA-256 in hex of everything that decides the batches; of the sample ids it takes the digests of chunks."""
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
    for digest in digests:
        sha.update(digest)
    return sha.hexdigest()


def write_plan_file(path: Path, fields: Fields, pair_size: PairSize = "sum") -> None:
    """Writes a plan's arrays and their digest to one uncompressed `.npz` file, atomically."""
    fields = {name: value for name, value in fields.items() if name in _fields_of(fields)}
    checksum = _checksum(fields, "function" if callable(pair_size) else pair_size)
    sealed = fields | {"format_version": np.array(_FORMAT_VERSION), "checksum": np.array(checksum)}
    arrays: Any = {name: sealed[name].astype(dtype, copy=False) for name, (dtype, _) in _fields_of(sealed).items()}
    with write_atomically(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_plan_file(path: Path, pair_size: Callable[..., Any] | None = None) -> tuple[Fields, PairSize]:
    """Reads what `write_plan_file` wrote, and what pairs count; raises ValueError where it is anything else."""
    try:
        with regular_file(path).open("rb") as file, zipfile.ZipFile(file) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            if any(member.compress_type for member in members.values()):
                raise UserError("its arrays are compressed")  # a small one could take all memory
            version = _read_member(file, members, "format_version")
            if version.shape != () or version not in _READABLE_VERSIONS:
                readable = " and ".join(map(str, _READABLE_VERSIONS))
                raise UserError(f"its format_version is {version}, this version of the library reads {readable}")
            fields: Fields = {
                name: _read_member(file, members, name).astype(dtype, casting="equiv", copy=False)
                for name, (dtype, _) in _fields_of(members).items()
            }
        if wrong := [name for name, (_, ndim) in _fields_of(fields).items() if fields[name].ndim != ndim]:
            raise UserError(f"wrong number of dimensions: {', '.join(wrong)}")
        # Only the checksum holds what pairs count, so that all files have the same arrays.
        sealed = next((word for word in _COUNTED if _checksum(fields, word) == str(fields["checksum"])), None)
        if sealed is not None and (sealed == "function") != (pair_size is not None):
            raise UserError(
                "a function says what its pairs count: pass it as pair_size="
                if sealed == "function"
                else f"its pairs count their {sealed}, by no function: leave pair_size out"
            )
        counted = pair_size or cast(PairSize, sealed or "sum")
        with ThreadPoolExecutor(1) as thread:  # both leave the interpreter free
            checked = thread.submit(check_plan, fields, counted)
            digest = plan_digest(
                int(fields["microbatches_per_step"]),
                fields["buckets"].tolist(),
                fields["step_bucket"],
                fields["step_offsets"],
                chunk_digests(fields["sample_ids"]),
                fields.get("row_offsets"),
                fields.get("piece_starts"),
            )
        if digest != str(fields["digest"]) or sealed is None:
            raise UserError("it does not have the digest or the checksum that it says: it was damaged or edited")
        checked.result()
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no plan file {path}") from None
    except Exception as error:  # damage shows in many ways: as zip, as header of an array, as memory that there is not
        reason = str(error)[:_MAX_REASON]  # NumPy repeats what it cannot read
        raise UserError(f"{path} is not a readable plan file: {reason}") from error
    return fields, counted


def _read_member(file: BinaryIO, members: Mapping[str, zipfile.ZipInfo], name: str) -> np.ndarray:
    """An array of an uncompressed archive, without its CRC-32: digest and checksum tell whether it is as written."""
    if name not in members:
        raise UserError(f"it has no {name}")
    file.seek(members[name].header_offset + _ZIP_LENGTHS)
    name_bytes, extra_bytes = struct.unpack("<HH", file.read(4))
    file.seek(name_bytes + extra_bytes, os.SEEK_CUR)
    return np.lib.format.read_array(file, allow_pickle=False)


def _fields_of(fields: Container[str]) -> dict[str, tuple[type, int]]:
    """The arrays that such a plan has."""
    packed = _PACKED_FIELDS if "row_offsets" in fields else ()
    return _FIELDS | {name: (np.int64, 1) for name in packed if name in fields}


def most_in_rows(
    row_offsets: Int64[np.ndarray, " R_plus_1"],
    step_offsets: Int64[np.ndarray, " S_plus_1"],
    step_bucket: Int32[np.ndarray, " S"],
    num_buckets: int,
) -> Int64[np.ndarray, " K"]:
    """The most samples that a row of each bucket has; 1 where there is no row."""
    first_rows = np.searchsorted(row_offsets, step_offsets[:-1])
    most = np.ones(num_buckets, np.int64)
    np.maximum.at(most, step_bucket, np.maximum.reduceat(np.diff(row_offsets), first_rows))
    return most


def check_plan(fields: Mapping[str, Any], pair_size: PairSize = "sum") -> None:
    """Raises ValueError that lists what no plan has: whoever edits a file can renew its digest and checksum."""
    step_bucket, offsets, num_tokens = (fields[name] for name in ("step_bucket", "step_offsets", "num_tokens"))
    ids, num_steps = fields["sample_ids"], len(step_bucket)
    buckets = Buckets(check_buckets(fields["buckets"].tolist()), None, pair_size)
    rows_per_step = rows_of_steps(buckets, int(fields["microbatches_per_step"]))
    if not num_steps or (len(offsets), len(num_tokens)) != (num_steps + 1, num_steps):
        raise UserError("step_bucket, step_offsets and num_tokens are of no step, or of different numbers of steps")
    outside = (step_bucket < 0) | (step_bucket >= len(buckets))
    if outside.any():
        listed = list_offenders(*offenders_where(outside, step_bucket), limit=len(buckets) - 1, name="step")
        raise UserError(f"steps of no bucket: {listed}")
    row_offsets = fields.get("row_offsets")
    for name, bounds in (("step_offsets", offsets), ("row_offsets", row_offsets)):
        # Compared, not subtracted: differences of what a file holds can overflow.
        if bounds is not None and (bounds[0] != 0 or bounds[-1] != len(ids) or (bounds[1:] <= bounds[:-1]).any()):
            raise UserError(f"{name} do not ascend from 0 to the number of sample_ids, {len(ids):,}")
    num_samples = num_rows = np.diff(offsets)
    if row_offsets is not None:
        rows_before = np.searchsorted(row_offsets, offsets)
        num_rows = np.diff(rows_before)
        if (row_offsets[rows_before] != offsets).any():
            raise UserError("step_offsets cut rows")
    room = rows_per_step * buckets.row_sizes
    wrong = {
        "more rows than their buckets": (num_rows > rows_per_step[step_bucket], num_rows),
        "fewer tokens than samples": (num_tokens < num_samples, num_tokens),
        "more tokens than room": (num_tokens > room[step_bucket], num_tokens),
    }
    problems = [
        f"steps with {what}: {list_offenders(*offenders_where(is_wrong, values), name='step')}"
        for what, (is_wrong, values) in wrong.items()
        if is_wrong.any()
    ]
    problems += _problems_of_ids(ids, fields.get("piece_starts"))
    most = fields.get("samples_per_row")
    if row_offsets is not None and most is not None:
        fewest = most_in_rows(row_offsets, offsets, step_bucket, len(buckets))
        row_lengths = np.array([bucket.lengths[0] for bucket in buckets])  # each sample has a token there
        if len(most) != len(buckets) or (most < fewest).any() or (most > row_lengths).any():
            problems.append(
                f"samples_per_row are {most.tolist()}: rows of the buckets have up to {fewest.tolist()} samples, and "
                f"room for {row_lengths.tolist()}"
            )
    overlong, counts = str(fields["overlong"]), {}
    check_choices(overlong=(overlong, PackedOverlong))
    for name, rule in (("num_dropped", "drop"), ("num_truncated", "truncate")):
        counts[name] = int(fields[name])
        if not 0 <= counts[name] <= (0 if overlong != rule else 2**63 - 1):
            problems.append(f"{name} is {counts[name]:,} under overlong={overlong!r}")
    if counts["num_truncated"] > len(ids):
        problems.append(f"num_truncated is {counts['num_truncated']:,} of {len(ids):,} samples")
    if problems:
        raise UserError("; ".join(problems))


def _problems_of_ids(ids: Int64[np.ndarray, " n"], starts: Int64[np.ndarray, " n"] | None) -> list[str]:
    """Ids below 0, samples that come twice, and chunks that come twice or without the first of their sample."""
    if (lowest := int(ids.min())) < 0:
        return [f"sample_ids are from 0 on, and one is {lowest}"]
    if starts is None:
        return _repeated(ids)
    if len(starts) != len(ids) or starts.min() < 0:
        return ["piece_starts are negative, or not as many as sample_ids"]
    is_later = starts > 0
    problems = _repeated(ids[~is_later])
    later_ids, later_starts = ids[is_later], starts[is_later]
    by_piece = np.lexsort([later_starts, later_ids])
    later_ids, later_starts = later_ids[by_piece], later_starts[by_piece]
    twice = (later_ids[1:] == later_ids[:-1]) & (later_starts[1:] == later_starts[:-1])
    if twice.any():
        problems.append(f"pieces that come more than once: {list_offenders(later_ids[1:][twice])}")
    orphans = later_ids[~np.isin(later_ids, ids[~is_later])]
    return problems + [f"samples without their first piece: {list_offenders(orphans)}"] * bool(len(orphans))


def _repeated(ids: Int64[np.ndarray, " n"]) -> list[str]:
    """Lists samples that come more than once."""
    largest = int(ids.max(initial=0))
    if largest < _MOST_IDS_A_SAMPLE * len(ids):
        comes = np.zeros(largest + 1, bool)
        comes[ids] = True
        num_distinct = int(np.count_nonzero(comes))
    else:
        num_distinct = len(np.unique(ids))
    if num_distinct == len(ids):
        return []
    values, times = np.unique(ids, return_counts=True)
    return [f"samples that come more than once: {list_offenders(values[times > 1], times[times > 1])}"]


def _checksum(fields: Fields, counted: str = "sum") -> str:
    counts = (int(fields["num_dropped"]), int(fields["num_truncated"]))
    overlong, per_row = str(fields["overlong"]), fields.get("samples_per_row")
    return plan_checksum(str(fields["digest"]), fields["num_tokens"], *counts, overlong, counted, per_row)


def plan_checksum(
    digest: str,
    num_tokens: Int64[np.ndarray, " S"],
    num_dropped: int,
    num_truncated: int,
    overlong: str,
    counted: str = "sum",
    samples_per_row: Int64[np.ndarray, " K"] | None = None,
) -> str:
    """SHA-256 in hex of the digest and of what the digest leaves out."""
    sha = hashlib.sha256(digest.encode())
    sha.update(num_tokens.astype("<i8", copy=False).tobytes())
    sha.update(np.array([num_dropped, num_truncated], "<i8").tobytes())
    if samples_per_row is not None:
        sha.update(samples_per_row.astype("<i8", copy=False).tobytes())
    sha.update((overlong if counted == "sum" else f"{overlong}\0{counted}").encode())
    return sha.hexdigest()
