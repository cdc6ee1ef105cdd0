"""The arrays of a plan in, its digest and its file out; and back, where every change to the file is refused."""

import hashlib
import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_ref.lengths import OVERLONG

_VERSION = 1
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


def plan_digest(
    microbatches_per_step: int,
    buckets: NDArray[np.int64],
    step_bucket: NDArray[np.int32],
    step_offsets: NDArray[np.int64],
    sample_ids: NDArray[np.int64],
) -> str:
    """Return the SHA-256 of what a plan does.

    Args:
        microbatches_per_step: M.
        buckets: int64[K, 2], (rows, length).
        step_bucket: int32[S].
        step_offsets: int64[S + 1].
        sample_ids: int64[n], real rows only, in the order of the steps.

    Returns:
        64 hex digits. The ids enter as the hashes of chunks of 2**20, so that processes which hold a part each can
        compute it together.
    """
    sizes = [microbatches_per_step, len(buckets), len(step_bucket), len(sample_ids)]
    total = hashlib.sha256(b"jvarlen-plan-1\0" + _little_endian(sizes) + _little_endian(buckets))
    total.update(_little_endian(step_bucket, "<i4"))
    total.update(_little_endian(step_offsets))
    for start in range(0, len(sample_ids), _CHUNK):
        total.update(hashlib.sha256(_little_endian(sample_ids[start : start + _CHUNK])).digest())
    return total.hexdigest()


def write_plan_file(path: str | os.PathLike[str], **fields: Any) -> None:
    """Write a plan's fields to an uncompressed .npz file, through a temporary file beside it.

    Args:
        path: where to; an existing file is replaced only once the new one is complete.
        **fields: all fields of the format but its version, digest and checksum.

    Raises:
        OSError: if the file cannot be written.
    """
    digest = _digest_of(fields)
    fields |= {"format_version": _VERSION, "digest": digest, "checksum": _checksum(digest, fields)}
    arrays: dict[str, Any] = {
        name: np.asarray(fields[name], dtype=None if kind == "U" else np.dtype(kind).newbyteorder("<"))
        for name, (kind, _) in _FIELDS.items()
    }
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.savez(file, **arrays)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def read_plan_file(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Read and verify a plan file.

    Args:
        path: the file.

    Returns:
        The fields by name, with the dtypes of the format.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a plan file, of another version, cut short or changed; the message names it.
    """
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                fields = {name: archive[name] for name in archive.files}
        # A damaged archive fails in many ways (BadZipFile, KeyError, EOFError, struct.error, ...): all mean the same.
        except Exception as error:
            raise ValueError(f"{path}: not a readable plan file ({type(error).__name__}: {error})") from error
    problem = _find_problem(fields)
    if problem:
        raise ValueError(f"{path}: {problem}")
    return fields


def _find_problem(fields: dict[str, NDArray[Any]]) -> str | None:
    version = fields.get("format_version")
    if version is not None and (version.shape != () or version != _VERSION):
        return f"plan format {version} is not supported, this version reads format {_VERSION}"
    if fields.keys() != _FIELDS.keys():
        missing, unknown = sorted(_FIELDS.keys() - fields.keys()), sorted(fields.keys() - _FIELDS.keys())
        return f"not a plan file of format {_VERSION}: missing {missing}, unknown {unknown}"
    for name, (kind, num_dims) in _FIELDS.items():
        array = fields[name]
        right_kind = array.dtype.kind == "U" if kind == "U" else array.dtype == kind
        if not right_kind or array.ndim != num_dims:
            return f"{name} has dtype {array.dtype} and shape {array.shape}, not {kind} with {num_dims} dimensions"
    num_steps = len(fields["step_bucket"])
    if fields["buckets"].shape[1] != 2 or len(fields["step_offsets"]) != num_steps + 1:
        return "the sizes of its arrays do not fit together"
    if str(fields["overlong"]) not in OVERLONG:
        return f"overlong is {str(fields['overlong'])!r}, not one of {', '.join(OVERLONG)}"
    digest = _digest_of(fields)
    if digest != str(fields["digest"]):
        return f"the plan was changed: its digest is {digest}, the file says {fields['digest']}"
    if _checksum(digest, fields) != str(fields["checksum"]):
        return "its counts (num_tokens, num_dropped, num_truncated, overlong) were changed: checksum does not match"
    return None


def _digest_of(fields: dict[str, Any]) -> str:
    names = ("buckets", "step_bucket", "step_offsets", "sample_ids")
    return plan_digest(int(fields["microbatches_per_step"]), *(fields[name] for name in names))


def _checksum(digest: str, fields: dict[str, Any]) -> str:
    counts = _little_endian(fields["num_tokens"]) + _little_endian([fields["num_dropped"], fields["num_truncated"]])
    return hashlib.sha256(digest.encode("ascii") + counts + str(fields["overlong"]).encode("utf-8")).hexdigest()


def _little_endian(values: Any, dtype: str = "<i8") -> bytes:
    return np.ascontiguousarray(values, dtype=dtype).tobytes()
