"""What the processes of the GPU benchmark share: they run named parts and write the answers as JSON."""

from __future__ import annotations

import datetime
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.gpu_sizes import OF_NAME, Sizes

Answer = dict[str, Any]
Parts = dict[str, Callable[[Answer], None]]
Save = Callable[[], None]


def run_parts(package: str, parts: Callable[[Sizes, dict[str, Answer], Save], Parts]) -> int:
    """Runs all parts; arguments of the program are the size's name and the file. Returns the exit code.

    The file is written after each part, and whenever a long one saves. "parts" lists all that there are to run.

    A part that fails is listed under "failed" with the last line of its error; what it had answered until then stays.
    """
    size, path = sys.argv[1:]
    answers: dict[str, Any] = {}
    failed: dict[str, str] = {}
    all_parts: list[str] = []

    def save() -> None:
        Path(path).write_text(json.dumps(answers | {"failed": failed, "parts": all_parts}))

    to_run = parts(OF_NAME[size], answers, save)
    all_parts += to_run
    save()
    for name, part in to_run.items():
        say(f"{package}: {name}")
        answers[name] = {}
        try:
            part(answers[name])
        except Exception as error:
            traceback.print_exc()
            failed[name] = said(error)
        save()
    return 1 if failed else 0


def said(error: Exception) -> str:
    """Its type and its first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def say(what: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {what}", file=sys.stderr, flush=True)
