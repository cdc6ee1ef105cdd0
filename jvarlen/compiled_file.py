"""Compiled file: in go programs and what they were compiled for, out comes one file that another process loads.

A file is refused, never guessed at, where it is damaged or for other software or devices. Its programs are run as they
are, so that it is not read at all where another user could have written it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import stat
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jvarlen.files import write_atomically

__all__ = ["check_environment", "environment_of", "read_compiled", "write_compiled"]

_FORMAT = "jvarlen-compiled-1"
_HEADER = "header.json"


def environment_of(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """What must be the same where programs are compiled and where they are run, by name."""
    client = devices[0].client
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": client.platform,
        "platform version": client.platform_version,
        "device kinds": [device.device_kind for device in devices],
        "device ids": [device.id for device in devices],
        "processor": _processor(),
        "processes": jax.process_count(),
        "process": jax.process_index(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


def check_environment(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises ValueError that lists what differs."""
    differing = [f"{name}: {saved.get(name)} there, {here.get(name)} here" for name in {**here, **saved}
                 if saved.get(name) != here.get(name)]  # fmt: skip
    if differing:
        raise ValueError(f"{path} was compiled for something else: {'; '.join(differing)}")


def write_compiled(path: Path, header: Mapping[str, Any], programs: Sequence[bytes]) -> None:
    """Writes a file that only its owner can read, in one piece or not at all.

    Args:
      path: where.
      header: what the programs are, as JSON has it.
      programs: the bytes of each.
    """
    digests = [hashlib.sha256(program).hexdigest() for program in programs]
    with write_atomically(path, mode=stat.S_IRUSR | stat.S_IWUSR) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_HEADER, json.dumps({"format": _FORMAT, "sha256": digests, **header}))
        for number, program in enumerate(programs):
            archive.writestr(str(number), program)


def read_compiled(path: Path) -> tuple[dict[str, Any], list[bytes]]:
    """Reads what `write_compiled` wrote.

    Returns:
      The header and the programs.

    Raises:
      FileNotFoundError: there is no such file.
      PermissionError: it belongs to another user, or others may write to it.
      ValueError: it is no such file, or damaged.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())  # of what was opened: a name can be given to another file meanwhile
        if status.st_uid != os.geteuid():
            raise PermissionError(
                f"{path} belongs to user {status.st_uid}: programs are only loaded from one's own files"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} can be written by other users: it is not loaded")
        content = file.read()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            header = json.loads(archive.read(_HEADER))
            if header["format"] != _FORMAT:
                raise ValueError(f"its format is {header['format']!r}")
            programs = [archive.read(str(number)) for number in range(len(header["sha256"]))]
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, EOFError, NotImplementedError) as error:
        raise ValueError(f"{path} holds no compiled programs, or is damaged: {error}") from error
    damaged = [
        number
        for number, (program, digest) in enumerate(zip(programs, header["sha256"], strict=True))
        if hashlib.sha256(program).hexdigest() != digest
    ]
    if damaged:
        raise ValueError(f"{path} is damaged: programs {damaged} are not what was written")
    return header, programs


def _processor() -> str:
    """The kind of the host's processor; where the system tells, with what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return f"{platform.machine()} {hashlib.sha256(''.join(features).encode()).hexdigest()[:16]}"
