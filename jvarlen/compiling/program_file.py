"""Signed files of compiled programs.

Programs are machine code wrapped in a pickle, so a file from someone else could run anything. Every file is therefore
signed with a key that only this user can read, and nothing of it is loaded without a valid signature.
"""

from __future__ import annotations

import hmac
import itertools
import json
import secrets
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

from jvarlen._common.checks import UserError, is_integer
from jvarlen._common.files import regular_file, write_atomically

__all__ = ["read_compiled", "write_compiled"]

_FORMAT = b"jvarlen-compiled-3"
_KEY_BYTES = 32  # as many as a signature has


def write_compiled(path: Path, header: Mapping[str, Any], programs: Sequence[bytes]) -> None:
    """Writes a signed file that only its owner can read, atomically."""
    described = json.dumps({**header, "sizes": [len(program) for program in programs]}).encode()
    content = b"\n".join([_FORMAT, described, b"".join(programs)])
    with write_atomically(path, mode=stat.S_IRUSR | stat.S_IWUSR) as file:
        file.write(content + hmac.digest(_own_key(), content, "sha256"))


def read_compiled(path: Path) -> tuple[dict[str, Any], list[bytes]]:
    """Reads what `write_compiled` wrote."""
    written = regular_file(path).read_bytes()
    content, signature = written[:-_KEY_BYTES], written[-_KEY_BYTES:]
    if not content.startswith(_FORMAT):
        raise UserError(f"{path} holds no compiled programs, or those of another version of jvarlen")
    key_path = _key_path()
    key = _read_key(key_path) if key_path.exists() else None
    if key is None or not hmac.compare_digest(signature, hmac.digest(key, content, "sha256")):
        raise UserError(
            f"{path} is damaged, or not signed with the key of this user, {key_path}: loading what was made elsewhere "
            "could run anything. Compile and save it here, or copy the key from the machine that made it"
        )
    try:
        _, described, joined = content.split(b"\n", 2)
        header = json.loads(described)
        # Sizes below 0 would give out the same bytes again and again.
        if not all(is_integer(size) and size >= 0 for size in header["sizes"]) or sum(header["sizes"]) != len(joined):
            raise UserError(f"its header has other sizes of programs than {len(joined):,} bytes in all")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    ends = list(itertools.accumulate(header["sizes"], initial=0))
    return header, [joined[begin:end] for begin, end in itertools.pairwise(ends)]


def _key_path() -> Path:
    """Where this user's key lies, beside what is kept for good: a cache that is emptied must not make files useless."""
    return platformdirs.user_data_path("jvarlen") / "compiled.key"


def _own_key() -> bytes:
    """This user's key, made where there is none yet; of several processes at once, one makes it for all."""
    path = _key_path()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=stat.S_IRWXU)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                with write_atomically(path, mode=stat.S_IRUSR | stat.S_IWUSR) as file:
                    file.write(secrets.token_bytes(_KEY_BYTES))
    return _read_key(path)


def _read_key(path: Path) -> bytes:
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:  # a shorter one could be guessed
        raise UserError(f"{path} is no key of {_KEY_BYTES} bytes: delete it, and compile and save again")
    return key
