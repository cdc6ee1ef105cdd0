"""Files: atomic writes, which make a file appear complete or not at all; JSON of dataclasses; arrays."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import glob
import json
import math
import os
import reprlib
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import dacite
import numpy as np
import platformdirs

from jvarlen._common.checks import UserError, is_integer, list_first
from jvarlen._common.types import Json, JsonObject

__all__ = [
    "FULL_DISK", "RUN_FORMAT", "append_lines", "check_new_directory", "check_outputs", "check_place",
    "check_run_format", "default_cache_dir", "load_array", "load_dataclass", "matching_names", "move_into_place",
    "private_cache", "read_object", "regular_file", "save_dataclass", "save_json", "take_space", "write_atomically",
]  # fmt: skip

_T = TypeVar("_T")

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # `errno` of an OSError
RUN_FORMAT = 4  # of the files in the directory of a run; `config.json` holds it


def default_cache_dir() -> Path:
    """The cache directory of this user on this platform (`XDG_CACHE_HOME` on Linux)."""
    return platformdirs.user_cache_path("jvarlen")


def private_cache(*names: str) -> Path:
    """A directory in `default_cache_dir`, made if missing; only this user can read what is there."""
    caches = default_cache_dir()
    caches.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    if caches.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        caches.chmod(stat.S_IRWXU)
    directory = caches.joinpath(*names)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[IO[Any]]:
    """A binary file that gets the name `path` when the block ends without error; on a full disk OSError names it."""
    check_place(path)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)  # nobody else has it open, or will
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        move_into_place(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in FULL_DISK and error.strerror:
            named = OSError(f"{path} cannot be written: {error.strerror}")
            named.errno = error.errno
            raise named from error
        raise


def check_place(path: Path) -> None:
    """Raises OSError if no file can take the name `path`."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent} to write {path.name} to")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; a file of that name cannot be written")
    regular_file(path)  # it would be replaced


def check_new_directory(path: Path) -> None:
    """Raises OSError if no directory can be made under the name `path`, since something is there, or no parent."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {path.parent} to write {path.name} to")
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(f"{path} is there already")


def regular_file(path: Path) -> Path:
    """The same path; raises ValueError if a pipe or a device is there, which could be read without end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is a pipe or a device, not a regular file")
    return path


def check_outputs(outputs: Mapping[str, Path | None], *inputs: str | Path | None) -> None:
    """Raises an error for outputs, by option, that cannot be written, or would replace an input or each other.

    Inputs are files, directories with all files in them, or globs. A file that is not there yet may be made in one.
    """
    read = [each for path in inputs if path is not None for each in matching_names(path) or [str(path)]]
    taken = {os.path.realpath(path): f"{path}, which is read" for path in read}
    for option, path in outputs.items():
        if path is not None:
            check_place(path)
            if (real := os.path.realpath(path)) in taken:
                raise UserError(f"{option} ({path}) would overwrite {taken[real]}")
            if path.exists() and (inside := [str(each) for each in Path(real).parents if str(each) in taken]):
                raise UserError(f"{option} ({path}) would overwrite a file of {taken[inside[0]]}")
            taken[real] = f"{path}, which is also {option}"


def matching_names(pattern: Path | str) -> list[str]:
    """The files and directories that a glob matches. `**` enters each directory once, however linked."""
    before, found, after = str(pattern).partition("**")
    parent, name = os.path.split(before)
    if not found or name or (after and not after.startswith(os.sep)):  # beside other characters it is one `*`
        return glob.glob(str(pattern))
    seen, matches = set[str](), dict[tuple[str, str], str]()
    for root in sorted(glob.glob(parent)) if parent else [os.curdir]:
        for directory, directories, _ in os.walk(root, followlinks=True):
            if (real := os.path.realpath(directory)) in seen:
                directories.clear()
                continue
            seen.add(real)
            directories[:] = sorted(each for each in directories if not each.startswith("."))
            named = directory if parent else directory[2:]  # without `./`
            inside = os.path.join(glob.escape(named), after[1:] or "*")
            for match in matching_names(inside):
                matches.setdefault((os.path.realpath(os.path.dirname(match)), os.path.basename(match)), match)
    return list(matches.values())


def move_into_place(part: Path, path: Path) -> None:
    """Renames a file that is complete and on disk, replacing an existing file, so that it survives a power cut."""
    os.replace(part, path)
    # Some file systems cannot do this for a directory; the file has its name, and is whole, all the same.
    with contextlib.suppress(OSError):
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def append_lines(file: IO[bytes], lines: Iterable[str]) -> None:
    """Appends lines to an unbuffered file, whose readers see them at once; OSError that names it if that fails."""
    rest = memoryview("".join(f"{line}\n" for line in lines).encode())
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise OSError(f"{file.name} cannot be written: {error.strerror}") from error


def take_space(file: IO[bytes], num_bytes: int) -> None:
    """Allocates the disk space of an open file where possible, so that a full disk shows before the work."""
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        file.truncate(num_bytes)


def load_array(path: Path, what: str) -> np.ndarray:
    """The array of a `.npy` file, memory-mapped; `what` it should hold is for errors."""
    regular_file(path)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {what} file {path}") from None
    except Exception as error:  # NumPy parses a header as Python, which fails in many ways
        raise UserError(f"{path} is not a readable .npy file of {what}: {error}") from error
    if not isinstance(array, np.ndarray):
        raise UserError(f"{path} holds several arrays; a .npy file of {what} holds one")
    return array


def read_object(path: Path, problem: str = "is damaged") -> JsonObject:
    """The object in a JSON file; raises ValueError by its path, with this problem, for anything else."""
    try:
        read = json.loads(regular_file(path).read_bytes(), parse_float=_finite_float, parse_int=_finite_int)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} {problem}: {error}") from None
    if not isinstance(read, dict):
        raise UserError(f"{path} {problem}: it holds no JSON object")
    return read


def _finite_float(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"the number {reprlib.repr(text)} is above 1.8e308")
    return number


def _finite_int(text: str) -> int:
    _finite_float(text)  # as it may be used as one
    return int(text)


def save_dataclass(value: Any, path: str | os.PathLike[str]) -> None:
    """Writes a frozen dataclass as JSON, atomically; an existing file is replaced, or stays if that fails."""
    save_json(dataclasses.asdict(value), Path(path))


def save_json(value: Json, path: Path) -> None:
    """Writes JSON atomically, a value a line."""
    with write_atomically(path) as file:
        file.write(json.dumps(value, indent=2).encode() + b"\n")


def load_dataclass(cls: type[_T], path: str | os.PathLike[str], what: str) -> _T:
    """Reads what `save_dataclass` wrote, or a user: `what` it is in messages. Integers are taken as floats."""
    try:
        given = read_object(Path(path), f"holds no {what}")
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {what} {path}") from None
    try:
        fields = {field.name: field.type for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted({*given} - {*fields}):
            raise UserError(f"unknown keys: {list_first(unknown)}")
        floats = {name: float(value) for name, value in given.items() if fields[name] == "float" and is_integer(value)}
        return dacite.from_dict(cls, given | floats, dacite.Config(cast=[tuple], strict=True))
    except (dacite.DaciteError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path} holds no {what}: {error}") from error


def check_run_format(settings: JsonObject, path: Path) -> None:
    """Raises ValueError if the settings in a run's `config.json` are those of another version."""
    number = settings.get("format", 1)
    if number != RUN_FORMAT:
        readers = {1: "jvarlen 0.1.0", 2: "jvarlen 0.2.0", 3: "jvarlen 0.4.0"}
        reader = readers.get(number, "a newer version") if isinstance(number, int) else "a newer version"
        raise UserError(f"{path} has format {number!r}, which {reader} reads; this version reads format {RUN_FORMAT}")
