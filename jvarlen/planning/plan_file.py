"""The digest of a plan, and its `.npz` file, verified when it is loaded.

Letters: M microbatches of a group, K buckets, S steps, G groups, N samples, n of them in the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from jaxtyping import Int64, Integer, Shaped

from jvarlen._common.checks import UserError
from jvarlen._common.files import regular_file, write_atomically
from jvarlen.planning.lengths import SampleSize

__all__ = [
    "DIGEST_CHUNK", "Values", "chunk_digest", "chunk_digests", "plan_checksum", "plan_digest", "read_plan_file",
    "write_plan_file",
]  # fmt: skip

Fields = dict[str, Shaped[np.ndarray, "..."]]
Values = Mapping[str, Any]  # arrays, and what NumPy makes such of, by their names in files

# 2: packings draw from a separate random stream, so that the same arguments can give other packed plans.
_FORMAT_VERSION = 2
_MAX_REASON = 300  # characters
DIGEST_CHUNK = 2**20  # sample ids; processes that hold parts of a plan can hash their chunks each for itself

# The type and the number of dimensions of every array in the file.
_FIELDS: dict[str, tuple[type, int | None]] = {
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
_PACKED_FIELDS: dict[str, tuple[type, int | None]] = {"row_offsets": (np.int64, 1), "samples_per_row": (np.int64, 1)}
# In plans whose steps have several groups, in place of those of steps; `num_tokens` is then that of groups.
_GROUP_FIELDS: dict[str, tuple[type, int | None]] = {
    "group_bucket": (np.int32, 1),
    "step_groups": (np.int64, 1),
    "group_offsets": (np.int64, 1),
}


def chunk_digest(sample_ids: Integer[np.ndarray, " n"]) -> bytes:
    """SHA-256, 32 bytes, of `DIGEST_CHUNK` sample ids in the order of the plan, or of its last ones."""
    return hashlib.sha256(np.ascontiguousarray(sample_ids, "<i8").data).digest()


def chunk_digests(sample_ids: Int64[np.ndarray, " n"]) -> Iterator[bytes]:
    """The digests of all chunks."""
    return (chunk_digest(sample_ids[i : i + DIGEST_CHUNK]) for i in range(0, len(sample_ids), DIGEST_CHUNK))


def plan_digest(fields: Values, digests: Iterable[bytes]) -> str:
    """SHA-256 in hex of everything that decides the batches: the arrays of a file, but of ids the digests of chunks."""
    has_groups, is_split = "step_groups" in fields, "piece_starts" in fields and str(fields["overlong"]) == "split"
    of = "group" if has_groups else "step"
    buckets, bucket, offsets = np.asarray(fields["buckets"]), fields[f"{of}_bucket"], fields[f"{of}_offsets"]
    num_lengths = buckets.shape[1] - 1
    words = {
        "group-ids": "group_ids" in fields,
        "groups": has_groups,
        "cut": "piece_starts" in fields and not is_split,
        "packed": "row_offsets" in fields and not is_split,
        "split": is_split,
        "lengths": num_lengths > 2,
    }
    kind = "".join(f"{word}-" for word, is_of_it in words.items() if is_of_it)
    sizes = [fields["microbatches_per_step"], len(buckets), *([num_lengths] if num_lengths > 2 else [])]
    sizes += [len(fields["step_groups"]) - 1] if has_groups else []
    hashed = [[*sizes, len(bucket), offsets[-1]], buckets, bucket]
    hashed += [fields["step_groups"], offsets] if has_groups else [offsets]
    hashed += [len(fields["row_offsets"]) - 1, fields["row_offsets"]] if "row_offsets" in fields else []
    hashed += [fields["piece_starts"]] if "piece_starts" in fields else []
    hashed += [len(fields["group_ids"]), fields["group_ids"]] if "group_ids" in fields else []
    sha = hashlib.sha256(f"jvarlen-{kind}plan-1\0".encode())
    for array in hashed:
        sha.update(np.asarray(array, "<i4" if array is bucket else "<i8").tobytes())
    for digest in digests:
        sha.update(digest)
    return sha.hexdigest()


def write_plan_file(path: Path, fields: Values, size: SampleSize = "sum") -> None:
    """Writes a plan's arrays and their digest to one uncompressed `.npz` file, atomically."""
    fields = {name: fields[name] for name in _fields_of(fields) if name in fields}
    sealed = {**fields, "format_version": _FORMAT_VERSION, "checksum": plan_checksum(fields, size)}
    arrays: Values = {name: np.asarray(sealed[name], dtype) for name, (dtype, _) in _fields_of(fields).items()}
    with write_atomically(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_plan_file(path: Path) -> tuple[Fields, SampleSize]:
    """Reads what `write_plan_file` wrote, and what pairs count; raises ValueError where it is anything else."""
    try:
        with regular_file(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            if any(member.compress_type for member in archive.zip.infolist()):
                raise UserError("its arrays are compressed")  # a small one could take all memory
            version = archive["format_version"]
            if version.shape != () or version != _FORMAT_VERSION:
                reader = "jvarlen 0.1.0" if str(version) == "1" else "another version"
                raise UserError(
                    f"its format_version is {version}, which {reader} reads; this version reads {_FORMAT_VERSION}"
                )
            fields: Fields = {
                name: archive[name].astype(dtype, casting="equiv", copy=False)
                for name, (dtype, _) in _fields_of(archive).items()
            }
        if wrong := [name for name, (_, ndim) in _fields_of(fields).items() if ndim not in (None, fields[name].ndim)]:
            raise UserError(f"wrong number of dimensions: {', '.join(wrong)}")
        digest = plan_digest(fields, chunk_digests(fields["sample_ids"]))
        # Only the checksum holds what pairs count, so that all files have the same arrays.
        sealed = next(
            (word for word in get_args(SampleSize) if plan_checksum(fields, word) == str(fields["checksum"])), None
        )
        if digest != str(fields["digest"]) or sealed is None:
            raise UserError("it does not have the digest or the checksum that it says: it was damaged or edited")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no plan file {path}") from None
    except Exception as error:  # damage shows in many ways: as zip, as header of an array, as memory that there is not
        reason = str(error)[:_MAX_REASON]  # NumPy repeats what it cannot read
        raise UserError(f"{path} is not a readable plan file: {reason}") from error
    return fields, cast(SampleSize, sealed)


def _fields_of(fields: Container[str]) -> dict[str, tuple[type, int | None]]:
    """The arrays that such a plan has."""
    others: dict[str, tuple[type, int | None]] = dict(_PACKED_FIELDS) if "row_offsets" in fields else {}
    if "piece_starts" in fields:
        others["piece_starts"] = (np.int64, None)  # of packed pairs one a side
    if "group_ids" in fields:
        others["group_ids"] = (np.int64, 1)
    of_steps = _FIELDS
    if "step_groups" in fields:
        of_steps = {name: kind for name, kind in _FIELDS.items() if name not in ("step_bucket", "step_offsets")}
        of_steps |= _GROUP_FIELDS
    return of_steps | others


def plan_checksum(fields: Values, counted: SampleSize = "sum") -> str:
    """SHA-256 in hex of the digest and of what the digest leaves out."""
    sha = hashlib.sha256(str(fields["digest"]).encode())
    for name in ("num_tokens", "num_dropped", "num_truncated", "samples_per_row"):
        if name in fields:
            sha.update(np.asarray(fields[name], "<i8").tobytes())
    overlong = str(fields["overlong"])
    sha.update((overlong if counted == "sum" else f"{overlong}\0{counted}").encode())
    return sha.hexdigest()
