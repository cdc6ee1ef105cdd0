"""Finds data files: globs, directories, object stores and compressed files, all as plain local files.

Downloads and decompressed files are kept in the user's cache directory, and can be deleted at any time.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import glob
import gzip
import hashlib
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeAlias

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import FULL_DISK, matching_names, private_cache, regular_file, write_atomically
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.terminal import progress_bar
from jvarlen.data.length_cache import content_key, hold_lock

__all__ = [
    "ENDINGS", "HIDDEN_QUERY", "DataFile", "distinct_names", "ending_of", "find_files", "is_remote", "local_names",
    "without_credentials",
]  # fmt: skip

ENDINGS = (".txt", ".jsonl", ".csv", ".tsv", ".npz", ".bin", ".parquet", ".arrow", ".feather")
_COMPRESSIBLE = (".txt", ".jsonl", ".csv", ".tsv")
_CODECS = (".gz", ".zst")
_CHUNK_BYTES = 1 << 20
_SCHEME = "[A-Za-z][A-Za-z0-9+.-]+"
_HIDDEN = "…"
HIDDEN_QUERY = f"?{_HIDDEN}"
_OWN_CACHE = re.compile(r"\.(lengths|hashes)-[0-9a-f]{16}\.npz$")  # of `length_cache`, beside the data


_Store: TypeAlias = Any  # a file system of fsspec


class DataFile(NamedTuple):
    """A file found under a name, and where it can be read."""

    name: str
    path: Path  # a plain local file: the same, or its copy in the cache
    ending: str  # one of `ENDINGS`
    source: Path  # the local file whose content decides: the same, but compressed where it is compressed


def is_remote(path: Path | str) -> bool:
    """Whether it is the URL of an object store, such as `gs://bucket/train.jsonl`."""
    return re.match(f"(?:{_SCHEME}::)*{_SCHEME}://", str(path)) is not None


def without_credentials(path: Path | str) -> str:
    """The text of a path, without the password and the signature that a URL, or each of a chain, may hold."""
    if not is_remote(path):
        return str(path)
    text = re.sub(r"\?[^/]*=.*", HIDDEN_QUERY, str(path))  # elsewhere than on the web `?` may be part of a glob
    text = re.sub(r"(https?://[^?]*)\?.*", rf"\1{HIDDEN_QUERY}", text, flags=re.IGNORECASE)
    text = re.sub("(https?://)[^/]*@", rf"\1{_HIDDEN}@", text, flags=re.IGNORECASE)
    return re.sub("(://[^/@:]*):[^/]*@", rf"\1:{_HIDDEN}@", text)  # elsewhere a user alone is not secret


def distinct_names(paths: Iterable[Path | str]) -> list[str]:
    """The text of each path without credentials; where several have the same, from the second on with a number."""
    counts = collections.Counter[str]()
    names = []
    for name in map(without_credentials, paths):
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return names


def ending_of(name: str) -> str | None:
    """The ending of a file that names its format, without that of a compression; None if the format is not known."""
    path = PurePosixPath(name)
    if path.suffix in _CODECS:
        return path.with_suffix("").suffix if path.with_suffix("").suffix in _COMPRESSIBLE else None
    return path.suffix if path.suffix in ENDINGS else None


def find_files(path: Path | str, *, progress: bool = True) -> list[DataFile]:
    """The data files of a file, directory, glob or URL, downloaded and decompressed, in the order of their names."""
    # A store and the path in it, by the name for messages; None: a local file.
    stored = _in_store(str(path)) if is_remote(path) else {name: (None, name) for name in local_names(Path(path))}
    endings = {name: ending_of(name.removesuffix(HIDDEN_QUERY)) for name in stored}
    if unknown := [name for name, ending in endings.items() if ending is None]:
        packed = f", or {', '.join(_COMPRESSIBLE)} followed by {' or '.join(_CODECS)}"
        raise UserError(f"{list_first(unknown)} is not a data file: names must end with {', '.join(ENDINGS)}{packed}")
    if len(set(endings.values())) > 1:
        first_of = {ending: name for name, ending in reversed(endings.items())}
        raise UserError(
            f"{without_credentials(path)} holds files of several formats, such as "
            f"{list_first(sorted(first_of.values()))}: choose those of one format with a glob, such as '*.jsonl'"
        )
    found = []
    for name, ending in endings.items():
        store, root = stored[name]
        index = root.removesuffix(".bin") + ".idx"
        if ending == ".bin" and (os.path.exists(index) if store is None else store.exists(index)):
            raise UserError(f"{name}: with an .idx beside it, it holds documents of Megatron-LM, which are not read")
        source = Path(name) if store is None else _download(name, store, root, progress)
        local = _decompress(source, name, progress) if source.suffix in _CODECS else source
        assert ending is not None
        found.append(DataFile(name, local, ending, source))
    return found


def local_names(path: Path) -> list[str]:
    """The names of the data files of a local file, directory or glob; raises an error where there are none."""
    if path.is_dir():
        names = _no_directories(str(each) for each in sorted(path.iterdir()) if _is_data(each.name))
        if not names:
            raise UserError(f"{path} holds no data files, whose names end with {', '.join(ENDINGS)}")
        return names
    if path.exists():
        return [str(regular_file(path))]
    if not glob.has_magic(str(path)):
        raise FileNotFoundError(f"there is no data file {path}")
    names = _no_directories(each for each in sorted(matching_names(path)) if not _OWN_CACHE.search(each))
    if not names:
        raise FileNotFoundError(f"no data file matches {path}")
    return names


def _no_directories(names: Iterable[str]) -> list[str]:
    """The names without directories; raises ValueError for those under which there is nothing to read to an end."""
    found = [name for name in names if not os.path.isdir(name)]
    if odd := [name for name in found if not os.path.isfile(name)]:
        raise UserError(f"{list_first(odd)}: a pipe, a device, or a link to nothing; remove it, or put the file there")
    return found


def _is_data(name: str) -> bool:
    return ending_of(name) is not None and not name.startswith(".") and not _OWN_CACHE.search(name)


def _in_store(url: str) -> dict[str, tuple[_Store, str]]:
    """The store and the path in it of each file of a URL, by its name without credentials."""
    shown = without_credentials(url)
    if _HIDDEN in url:
        raise UserError(f"{url}: a run doesn't keep passwords and signatures; give the whole URL again")
    try:
        import fsspec  # here: only object stores need it
    except ModuleNotFoundError:
        raise UserError(f"{shown} can only be read with fsspec: pip install 'jvarlen[data]'") from None
    with _naming(shown, url):
        store, root = fsspec.core.url_to_fs(url)
        is_web = re.match(f"(?:{_SCHEME}::)*https?://", url, re.IGNORECASE) is not None
        if is_web and shown.endswith(HIDDEN_QUERY):  # signed for one file
            return {shown: (store, root)}
        if glob.has_magic(root):
            roots = [each for each in sorted(store.glob(root)) if store.isfile(each)]
        elif store.isdir(root):
            roots = [each for each in sorted(store.ls(root, detail=False)) if _is_data(PurePosixPath(each).name)]
        else:
            roots = [root] if store.exists(root) else []
        if not roots:
            raise FileNotFoundError
        names = [shown if each == root else without_credentials(store.unstrip_protocol(each)) for each in roots]
        return {name: (store, each) for name, each in zip(names, roots, strict=True)}


@contextlib.contextmanager
def _naming(shown: str, url: str) -> Iterator[None]:
    """A block in which errors of a store, of many types, become one that shows the URL without credentials."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        # Stores seldom say which.
        raise FileNotFoundError(f"there is no data file {shown}, or it cannot be reached") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL_DISK:  # of the disk here
            raise
        reason = str(error).replace(url, shown) or type(error).__name__
        reason = re.sub(_SCHEME + r"://[^\s'\"]+", lambda found: without_credentials(found[0]), reason)
        raise UserError(f"{shown} cannot be read: {reason}") from None


def _download(name: str, store: _Store, root: str, progress: bool) -> Path:
    """The copy of a file of an object store; it is downloaded again when the store has another version."""
    with _naming(name, root):
        key = hashlib.sha256(f"{name} {store.ukey(root)}".encode()).hexdigest()
        size = store.size(root)  # None: the store does not say
        file_name = PurePosixPath(name.removesuffix(HIDDEN_QUERY)).name
        return _keep_copy(key, file_name, functools.partial(store.open, root), f"downloading {name}", progress, size)


def _decompress(path: Path, name: str, progress: bool) -> Path:
    """The decompressed copy of a file, made again when its content changes."""
    if not path.stat().st_size:
        raise UserError(f"{name} is empty")
    open_source: Callable[[], Any] = (
        functools.partial(gzip.open, path) if path.suffix == ".gz" else functools.partial(_open_zstd, path)
    )
    try:
        return _keep_copy(content_key(path), path.with_suffix("").name, open_source, f"decompressing {name}", progress)
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the content
            raise
        raise UserError(f"{name} is damaged or was cut short: {error}") from None


def _open_zstd(path: Path) -> Any:
    try:
        import pyarrow as pa  # here: an extra
    except ModuleNotFoundError:
        raise UserError(f"{path} can only be read with pyarrow: pip install 'jvarlen[data]'") from None
    return pa.CompressedInputStream(str(path), "zstd")


def _keep_copy(
    key: str, name: str, open_source: Callable[[], Any], text: str, progress: bool, size: int | None = None
) -> Path:
    """The file of a key in the user's caches, copied by the first process that needs it; the others wait."""
    try:
        path = private_cache("files", key[:16]) / name
        if path.exists():
            return path
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} cannot be written")
    except OSError as error:
        raise UserError(
            f"{text}: the copy has no place, as {error}: set XDG_CACHE_HOME to a directory that can be written, "
            "or give a local file that is not compressed"
        ) from None
    bar = progress_bar(total=size, desc=text, unit="B", unit_scale=True, progress=progress)
    with hold_lock(path.parent / ".lock"):
        if not path.exists():
            with open_source() as stream, write_atomically(path) as out, bar as shown:
                while chunk := stream.read(_CHUNK_BYTES):
                    raise_if_interrupted()
                    out.write(chunk)
                    shown.update(len(chunk))
                if size not in (None, out.tell()):
                    raise UserError(f"{name} was cut short: {out.tell():,} of {size:,} bytes came")
    return path
