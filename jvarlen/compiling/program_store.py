"""Compiled programs in JAX's persistent cache, as bytes, and in signed files.

The cache is the only JAX setting that compiling changes for the whole process, and only where the user has not set it.

Programs are machine code wrapped in a pickle, so a file from someone else could run anything. Every file is therefore
signed with a key that only this user can read, and nothing of it is loaded without a valid signature.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import secrets
import stat
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import platformdirs
from filelock import FileLock
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jvarlen._common.checks import UserError
from jvarlen._common.files import regular_file, write_atomically
from jvarlen.compiling.compile_options import default_compilation_cache

__all__ = [
    "deserialized",
    "read_compiled",
    "serialized",
    "use_compilation_cache",
    "without_compilation_cache",
    "write_compiled",
]

_FORMAT = b"jvarlen-compiled-3"
_KEY_BYTES = 32  # as many as a signature has

# JAX's own limits, and those that keep every program: (setting, what it is where no one has set it, what it becomes).
_LIMITS = (
    ("jax_persistent_cache_min_compile_time_secs", 1.0, 0.0),
    ("jax_persistent_cache_min_entry_size_bytes", 0, -1),
)

_switching = threading.RLock()  # two that switch the cache off one into the other would leave it off
_own_setting: str | None = None  # the directory that was set from here, which is no choice of the user's


def use_compilation_cache(directory: str | os.PathLike[str] | None = None) -> None:
    """Keeps all compiled programs in JAX's persistent compilation cache, also those that compile fast.

    This sets JAX for the whole process, from now on. A user's own settings stay: a cache that is switched off
    (`jax_enable_compilation_cache`), the directory (`jax_compilation_cache_dir`; a warning says so), and limits
    (`jax_persistent_cache_min_compile_time_secs`, `jax_persistent_cache_min_entry_size_bytes`).

    Args:
      directory: created if missing, for this user alone; without it, if that fails, with a warning. Its programs are
        run: whoever can write to it is trusted. None: that of an earlier call, or else one among the user's caches.
    """
    global _own_setting
    settings: Any = jax.config  # whose attributes are made while JAX is imported
    if not settings.jax_enable_compilation_cache:
        return
    default = default_compilation_cache()
    wanted = Path(directory or default).expanduser().absolute()  # JAX opens it later, maybe from elsewhere
    chosen = settings.jax_compilation_cache_dir
    if chosen is None or (chosen == _own_setting and wanted != default):
        try:
            wanted.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        except OSError as error:
            warnings.warn(f"compiled programs are not cached: {error}", stacklevel=2)
            return
        if chosen != str(wanted):
            _own_setting = str(wanted)
            settings.update("jax_compilation_cache_dir", _own_setting)
            reset_cache()  # JAX keeps the directory, or the lack of one, that it found first
    elif wanted not in (default, Path(chosen).absolute()):
        warnings.warn(f"compiled programs are cached in {chosen} by JAX's setting, not in {wanted}", stacklevel=2)
    for name, usual, lowest in _LIMITS:
        if getattr(settings, name) == usual:
            settings.update(name, lowest)


@contextlib.contextmanager
def without_compilation_cache() -> Iterator[None]:
    """A block in which every program is compiled and none is cached, in other threads too."""
    settings: Any = jax.config
    with _switching:
        before = settings.jax_enable_compilation_cache
        settings.update("jax_enable_compilation_cache", False)
        reset_cache()  # JAX remembers whether it uses one
        try:
            yield
        finally:
            settings.update("jax_enable_compilation_cache", before)
            reset_cache()


def serialized(compiled: jax.stages.Compiled) -> tuple[bytes, Any, Any]:
    """A program as bytes, and the structures of its arguments and its results."""
    try:
        return serialize_executable.serialize(compiled)
    except Exception as error:  # its type depends on the backend
        raise UserError(f"this program cannot be turned into bytes here: {error}") from error


def deserialized(program: bytes, in_tree: Any, out_tree: Any, devices: list[jax.Device]) -> jax.stages.Compiled:
    """The program of what `serialized` gave. Loading it runs code: never of bytes that someone else could write."""
    client = devices[0].client
    return serialize_executable.deserialize_and_load(
        program, in_tree, out_tree, backend=client, execution_devices=devices
    )


def write_compiled(path: Path, header: Mapping[str, Any], programs: Sequence[bytes]) -> None:
    """Writes a signed file that only its owner can read, atomically."""
    described = json.dumps({**header, "sizes": [len(program) for program in programs]}).encode()
    content = b"\n".join([_FORMAT, described, b"".join(programs)])
    key_path = _key_path()
    key_path.parent.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
    with FileLock(key_path.with_suffix(".lock")):  # of several processes at once, one makes it for all
        if not key_path.exists():
            with write_atomically(key_path, mode=stat.S_IRUSR | stat.S_IWUSR) as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
    with write_atomically(path, mode=stat.S_IRUSR | stat.S_IWUSR) as file:
        file.write(content + hmac.digest(key_path.read_bytes(), content, "sha256"))


def read_compiled(path: Path) -> tuple[dict[str, Any], list[bytes]]:
    """Reads what `write_compiled` wrote."""
    written = regular_file(path).read_bytes()
    content, signature = written[:-_KEY_BYTES], written[-_KEY_BYTES:]
    if not content.startswith(_FORMAT):
        raise UserError(f"{path} holds no compiled programs, or those of another version of jvarlen")
    key_path = _key_path()
    key = key_path.read_bytes() if key_path.exists() else b""
    # A shorter key could be guessed.
    if len(key) < _KEY_BYTES or not hmac.compare_digest(signature, hmac.digest(key, content, "sha256")):
        raise UserError(
            f"{path} is damaged, or not signed with the key of this user, {key_path}: loading what was made elsewhere "
            "could run anything. Compile and save it here, or copy the key from the machine that made it"
        )
    _, described, joined = content.split(b"\n", 2)
    header = json.loads(described)
    ends = itertools.accumulate(header["sizes"], initial=0)
    return header, [joined[begin:end] for begin, end in itertools.pairwise(ends)]


def _key_path() -> Path:
    """Where this user's key lies, beside what is kept for good: a cache that is emptied must not make files useless."""
    return platformdirs.user_data_path("jvarlen") / "compiled.key"
